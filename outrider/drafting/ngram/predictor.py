"""From what followed a context before to the chances of what follows it now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outrider.drafting.ngram.confidence import Confidence, LocalConfidence
from outrider.drafting.ngram.trie import State, Trie

OWN, SHARED = 0, 1
"""Source numbers: the request's own text, and what its tenant's requests put out."""

_MAX_FOLLOWERS = 24
"""Of a match with more followers the latest count."""
_MIN_MASS = 0.01
"""Shorter matches are not asked once the longer ones leave less chance than this."""
_RECENCY = tuple(0.35**rank for rank in range(_MAX_FOLLOWERS))
"""Weights of followers by recency: that the latest repeats is likelier than that the one before does."""


@dataclass(frozen=True, slots=True)
class Context:
    """Where a context stands in both tries."""

    own: State
    shared: State

    @property
    def match_length(self) -> int:
        """Tokens of the longest suffix known."""
        return max(len(self.own), len(self.shared)) - 1


@dataclass(slots=True)
class Guess:
    """A token that may come next."""

    token: int
    chance: float
    source: int


class Predictor:
    """Blends the matches of a context, longest first: each takes its share of the chance that longer ones leave.

    Followers of a longer match are excluded from a shorter one, whose text mostly repeats the longer one's.
    """

    def __init__(self, shared: Trie, by_recency: bool, min_match: int) -> None:
        self.shared = shared
        self._by_recency = by_recency
        self._min_match = min_match
        self._confidence = Confidence()

    def predict(self, own: Trie, context: Context, local: LocalConfidence) -> list[Guess]:
        """Guesses with their chances, likeliest first; the chances add up to less than 1."""
        seen: set[int] = set()
        guesses: list[Guess] = []
        mass = 1.0
        for source, cell, followers in self._matches(own, context, seen):
            share = mass * self._confidence.chance(cell, local)
            mass -= share
            if len(followers) == 1:
                token = followers[0][0]
                seen.add(token)
                guesses.append(Guess(token, share, source))
            else:
                weights = _RECENCY if self._by_recency else [float(count) for _, count in followers]
                unit = share / sum(weights[: len(followers)])
                for (token, _), weight in zip(followers, weights, strict=False):
                    seen.add(token)
                    guesses.append(Guess(token, unit * weight, source))
            if mass < _MIN_MASS:
                break
        guesses.sort(key=_chance, reverse=True)
        return guesses

    def learn(self, own: Trie, context: Context, local: LocalConfidence, token: int) -> None:
        """Note that the target committed `token` after the context."""
        seen: set[int] = set()
        for _, cell, followers in self._matches(own, context, seen):
            tokens = [follower for follower, _ in followers]
            hit = token in tokens
            self._confidence.learn(cell, local, hit)
            if hit:
                return
            seen.update(tokens)

    def _matches(self, own: Trie, context: Context, seen: set[int]) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        """Source, confidence cell and unseen followers of each match, longest first; own text before shared."""
        sides = ((OWN, own, context.own, len(context.own)), (SHARED, self.shared, context.shared, len(context.shared)))
        for length in range(context.match_length, self._min_match - 1, -1):
            for source, trie, state, end in sides:
                place = state[length] if length < end else None
                if place is None:
                    continue
                followers = trie.followers(place, _MAX_FOLLOWERS, seen)
                if followers:
                    occurrences = followers[0][1] if len(followers) == 1 else sum([count for _, count in followers])
                    yield source, self._confidence.cell(source, length, len(followers), occurrences), followers


def _chance(guess: Guess) -> float:
    return guess.chance
