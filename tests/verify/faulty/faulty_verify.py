"""The verify service with an engine that fails: `python -m faulty_verify`, options as usual."""

from __future__ import annotations

import sys

from verify_service.door import engine_process
from verify_service.main import main

if __name__ == "__main__":
    engine_process.MODULE = "faulty_worker"
    sys.exit(main(sys.argv[1:]))
