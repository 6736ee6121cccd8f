"""The folder for what is fetched or compiled once: models, and object code for CPUs."""

from __future__ import annotations

import os
from pathlib import Path


def outrider_home() -> Path:
    """Return $OUTRIDER_HOME, or ~/.cache/outrider. Raises RuntimeError if the home directory cannot be determined."""
    return Path(os.environ.get("OUTRIDER_HOME") or "~/.cache/outrider").expanduser()
