"""`outrider doctor`: checks of machine, options, models and services.

A finding is ok, a note, a warning or a problem.
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
    """Result of one check."""

    check: str
    """The check's name, in a word or two: "port", "gpu", ..."""
    level: Level
    text: str
    fix: str = ""
    """What to do; empty if all is well."""

    def as_dict(self) -> dict[str, str]:
        """Return the fields for JSON."""
        return asdict(self) | {"level": self.level.value}


def ok(check: str, text: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(check, Level.OK, text)


def note(check: str, text: str) -> Finding:
    """Return a finding that is neither good nor bad."""
    return Finding(check, Level.NOTE, text)


def warning(check: str, text: str, fix: str) -> Finding:
    """Return a finding on something that works, but not well."""
    return Finding(check, Level.WARNING, text, fix)


def problem(check: str, text: str, fix: str) -> Finding:
    """Return a finding on something that does not work."""
    return Finding(check, Level.PROBLEM, text, fix)
