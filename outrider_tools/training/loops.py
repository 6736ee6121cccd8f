"""Answers that fall into loops: greedy decoding of small models repeats itself, which any drafter guesses well."""

from __future__ import annotations

from collections.abc import Sequence

LOOP_TOKENS = 64
LOOP_PERIOD = 32


def loops(answer: Sequence[int]) -> bool:
    """Whether the last 64 tokens of an answer repeat with a period of at most 32 tokens.

    That is, for some period each of them equals the one that many places before it, as far as both are among the
    last 64. An answer of fewer tokens does not loop.
    """
    tail = list(answer[-LOOP_TOKENS:])
    if len(tail) < LOOP_TOKENS:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD + 1))
