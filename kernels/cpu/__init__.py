"""Functions for CPUs, written in Python and compiled by LLVM."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path


def sources() -> str:
    """A digest of this package as it lies on disk; empty where its sources are not there, or one cannot be read."""
    try:
        found = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    except OSError:  # such as an editor's lock, or one that another release has just taken away
        return ""
    return sha256(b"".join(found)).hexdigest() if found else ""


SOURCES = sources()
"""As it was before any other module of it was imported: some are long before functions are compiled."""
