"""Scripts of benchmarks are not packaged: they are found by their folder."""

from __future__ import annotations

import sys
from pathlib import Path

_folder = Path(__file__).resolve().parents[2] / "benchmarks"
if str(_folder) not in sys.path:
    sys.path.append(str(_folder))
