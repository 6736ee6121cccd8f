"""Whether a draft's guesses are ever right, and how often it is told of commits if they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.tree.mirror import Observation

TRIAL = 64
"""Looks in a row that found nothing right, after which a draft is in doubt: guesses that are right once in 10 tokens
come so far once in 800 trials, and those that are right less often hardly pay for what they cost."""

_FIRST_PASS = 4
_LONGEST_PASS = 32
"""Commits in a row that a draft in doubt is not told of: so many at first, twice as many after each further look, and
so many at most."""


@dataclass(slots=True)
class DraftBackoff:
    """What came of a draft's guesses lately. One that has none costs little, and says nothing of what it is worth.

    A draft in doubt costs what it always costs: commits and features leave, answers are read. So it is told of commits
    rarely, of several at once, and grows little. The first guess that is right ends the doubt.
    """

    num_wrong: int = 0
    """Looks in a row at guesses for committed tokens that found nothing right."""
    num_passed: int = 0
    """Commits that the draft was not told of since it last was."""

    @property
    def in_doubt(self) -> bool:
        """Whether nothing was right for long."""
        return self.num_wrong >= TRIAL

    def judge(self, seen: Sequence[Observation]) -> None:
        """Take what a look has shown: the draft's guesses for tokens that were committed since the last one."""
        if any(one.hit for one in seen):
            self.num_wrong = 0
        elif seen:
            self.num_wrong += 1

    def passes(self) -> bool:
        """Whether the draft need not be told of a commit now; to be asked once for each."""
        doubt = self.num_wrong - TRIAL
        if doubt >= 0 and self.num_passed < min(_FIRST_PASS << min(doubt, 10), _LONGEST_PASS):
            self.num_passed += 1
            return True
        self.num_passed = 0
        return False
