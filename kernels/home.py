"""The folder of what is fetched or compiled once: of models, and of object code for CPUs."""

from __future__ import annotations

import os
from pathlib import Path


def outrider_home() -> Path:
    """$OUTRIDER_HOME, or ~/.cache/outrider. Raises RuntimeError for a home that is not there."""
    return Path(os.environ.get("OUTRIDER_HOME") or "~/.cache/outrider").expanduser()
