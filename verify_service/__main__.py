"""`python -m verify_service`."""

import sys

from outrider import import_for_good

sys.exit(import_for_good("verify_service.main").main())
