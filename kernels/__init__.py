"""Triton kernels, each with a torch reference. Launchers raise ValueError for arguments of shapes, dtypes, strides or
sizes that they do not take.

transformers probes for a package named `kernels` and breaks on one without a version, hence `__version__`.
"""

from __future__ import annotations

import os
from pathlib import Path

__version__ = "0.1.0"


def outrider_home() -> Path:
    """Return the folder for what is fetched or compiled once: $OUTRIDER_HOME, or ~/.cache/outrider.

    Raises RuntimeError if the home directory cannot be determined.
    """
    return Path(os.environ.get("OUTRIDER_HOME") or "~/.cache/outrider").expanduser()
