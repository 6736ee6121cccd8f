"""The language of the simulation's two models: what follows a path of tokens, and what the draft knows of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

UInt64s = NDArray[np.uint64]

VOCAB = 49152
_STRIDE = 997
"""Difference between the ids of a position's candidates."""
_OTHERS = 50
"""Number of tokens that share the chance not taken by candidates, where this matters."""
_U = np.uint64
_SPREAD = _U(0x9E3779B97F4A7C15)
_FLUENT = _U(1)
"""The bit of a state that says whether it is part of a fluent stretch."""
ORIGIN = np.zeros(1, np.uint64)
"""State before the first token."""


def _mix(values: UInt64s) -> UInt64s:
    values = (values ^ (values >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U(27))) * _U(0x94D049BB133111EB)
    return values ^ (values >> _U(31))


def _chance(values: UInt64s) -> NDArray[np.float64]:
    drawn: NDArray[np.float64] = (values >> _U(11)).astype(np.float64) * 2.0**-53
    return drawn


@dataclass(frozen=True, slots=True)
class Language:
    """What follows a path of tokens: the draft's candidates with their true chances, and the target's choice of them.

    Everything is drawn from a hash of the path, its state. A position is likely, open or flat, at random, except in
    fluent stretches, which last: a state is fluent if the one before was, unless this is drawn anew, with a chance of
    `switch`. The defaults match measurements of the 0.10-noise copy of SmolLM2-135M: right in 73 % of the positions,
    94 % within four, 98 % within eight and 99 % within 16, and accepted by lockstep trees as often, depth by depth.
    """

    fluent: float = 0.20
    switch: float = 0.1
    shares: tuple[float, float] = (0.28, 0.62)
    """Share of likely positions, and of likely and open positions together."""
    low: tuple[float, float, float, float] = (0.95, 0.40, 0.28, 0.97)
    high: tuple[float, float, float, float] = (1.0, 1.0, 0.55, 1.0)
    """Bounds of the first candidate's chance: likely, open, flat, fluent."""
    tail: tuple[float, ...] = (
        *(0.46, 0.21, 0.115, 0.055, 0.037, 0.028, 0.018),
        *(0.014, 0.012, 0.009, 0.008, 0.007, 0.006, 0.005, 0.004),
    )
    """The other candidates' shares of the remaining chance."""
    flatten: float = 1.0
    """Scores are of chances to the power of 1 / `flatten`: above 1, the draft promises too little."""

    def follow(self, states: UInt64s, tokens: NDArray[Any]) -> UInt64s:
        """Return the states one token further."""
        drawn = _mix((states >> _U(1)) * _SPREAD + tokens.astype(np.uint64) + _U(1))
        fresh = (_chance(_mix(drawn ^ _U(0x2222))) < self.fluent).astype(np.uint64)
        fluent = np.where(_chance(_mix(drawn ^ _U(0x1111))) < self.switch, fresh, states & _FLUENT)
        return (drawn & ~_FLUENT) | fluent

    def candidates(self, states: UInt64s, count: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Return tokens and their chances, [N, count] each, likeliest first; `count` is at most 16."""
        tokens, chances = self._likeliest(states)
        return tokens[:, :count], chances[:, :count]

    def _likeliest(self, states: UInt64s) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        kinds = np.searchsorted(self.shares, _chance(_mix(states ^ _U(0x6666))))
        kinds[(states & _FLUENT) > 0] = 3
        low, high = np.array(self.low)[kinds], np.array(self.high)[kinds]
        first = low + (high - low) * _chance(_mix(states ^ _U(0x3333))) - 1e-6
        chances = np.concatenate([first[:, None], (1 - first)[:, None] * self.tail], axis=1)
        chances = -np.sort(-chances, axis=1)
        base = (_mix(states ^ _U(0x4444)) % _U(VOCAB)).astype(np.int64)
        tokens = (base[:, None] + _STRIDE * np.arange(chances.shape[1])) % VOCAB
        return tokens.astype(np.int32), chances

    def scores(self, chances: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the edge scores of candidates as the draft computes them."""
        if self.flatten == 1.0:
            return np.log(chances)
        # The remaining chance is spread over many tokens, each of which gains more.
        rest = np.maximum(1 - chances.sum(1, keepdims=True), 1e-6)
        power = 1 / self.flatten
        total = (chances**power).sum(1, keepdims=True) + _OTHERS * (rest / _OTHERS) ** power
        edges: NDArray[np.float64] = np.log(chances) * power - np.log(total)
        return edges

    def choose(self, state: UInt64s) -> tuple[int, int]:
        """Return the target's token after one state, [1], and the number of likelier tokens."""
        tokens, chances = self._likeliest(state)
        rank = int(np.count_nonzero(chances[0].cumsum() <= _chance(_mix(state ^ _U(0x5555)))[0]))
        return (int(tokens[0, 0]) + _STRIDE * rank) % VOCAB, rank

    def states(self, before: UInt64s, tokens: Sequence[int]) -> UInt64s:
        """Return the [N] states after each of the tokens that follow one state, [1]."""
        states = []
        for token in tokens:
            before = self.follow(before, np.array([token]))
            states.append(before[0])
        return np.array(states, np.uint64)

    def text(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the target's text after a prompt."""
        state = self.states(ORIGIN, prompt)[-1:]
        text: list[int] = []
        for _ in range(count):
            text.append(self.choose(state)[0])
            state = self.follow(state, np.array(text[-1:]))
        return text
