"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import ConfigError


def expand(name: str | Path) -> Path:
    """The path that a name is, its `~` filled in. Raises ConfigError for a home that is not there."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ConfigError(f"{name} names a home that is not there; write the whole path") from None
