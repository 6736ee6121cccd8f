"""A progress callback that shows nothing."""

from __future__ import annotations


def silent(stage: str, done: int, total: int) -> None:
    pass
