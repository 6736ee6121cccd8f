"""The engine process that times its rounds once: what ranks do does not hang on it, and each round is an exchange."""

from __future__ import annotations

import sys

from outrider.host.worker import exit_process
from verify_service.engine import worker
from verify_service.speculation import budget

if __name__ == "__main__":
    budget._MAX_SWEEPS = 1
    exit_process(worker.main(sys.argv[1:]))
