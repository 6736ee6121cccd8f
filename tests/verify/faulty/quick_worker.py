"""The engine process that times its rounds once: what ranks do does not hang on it, and each round is an exchange."""

from __future__ import annotations

from verify_service.engine import worker
from verify_service.speculation import budget


def main(argv: list[str]) -> int:
    budget._MAX_SWEEPS = 1
    return worker.main(argv)
