"""The verify service with an engine that fails: `python -m faulty_verify`, options as usual."""

from __future__ import annotations

import sys

from verify_service import main

if __name__ == "__main__":
    main.ENGINE_MODULE = "faulty_worker"
    sys.exit(main.main(sys.argv[1:]))
