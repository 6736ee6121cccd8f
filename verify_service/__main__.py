"""`python -m verify_service`."""

import sys

from verify_service.main import main

sys.exit(main())
