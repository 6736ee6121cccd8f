"""Tests of drafters share the tiny models of tests/models, and what makes the kernels' interpreter run."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "models"), str(TESTS / "kernels")]
