"""`python -m verify_service`."""

import os
import sys

# Read when torch loads its OpenMP. Threads that spin while they wait starve the services beside them on the same
# cores, and themselves: measured with one busy process beside it on 2 cores, a 57 ms forward took 746 ms.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from verify_service.main import main

sys.exit(main())
