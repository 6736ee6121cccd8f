"""`outrider doctor`: checks of machine, options, models and services.

Each finding is fine, worth knowing, worth a look, or in the way.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """Which, in a word or two: "port", "gpu", ..."""
    level: Level
    text: str
    fix: str = ""
    """What to do; empty where all is well."""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self) | {"level": self.level.value}


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(check, Level.OK, text)


def note(check: str, text: str) -> Finding:
    """Neither good nor bad."""
    return Finding(check, Level.NOTE, text)


def warning(check: str, text: str, fix: str) -> Finding:
    """It works, but not as one might wish."""
    return Finding(check, Level.WARNING, text, fix)


def problem(check: str, text: str, fix: str) -> Finding:
    """It does not work."""
    return Finding(check, Level.PROBLEM, text, fix)
