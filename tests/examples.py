"""How much hypothesis draws: little in every run, since each draws anew, and as much more as a long run asks for."""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("OUTRIDER_FUZZ_FACTOR", "1"))


def examples(usual: int) -> int:
    """How many examples a test draws that usually draws this many."""
    return usual * FACTOR
