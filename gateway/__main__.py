"""`python -m gateway`."""

import sys

from outrider import import_for_good

if __name__ == "__main__":
    sys.exit(import_for_good("gateway.main").main())
