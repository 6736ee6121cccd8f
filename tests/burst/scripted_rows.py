"""What a scripted runner holds of its rows, and what it computes in place of a model's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.protocol.speculation import Features
from outrider.sampling.params import SamplingParams

Guesses = list[tuple[int, float]]
"""Tokens and their natural-log chances, the best first."""
Model = Callable[[tuple[int, ...]], Guesses]
"""What may follow a path of tokens."""

NONE = -np.inf


class RunnerFault(AssertionError):
    """The host broke the contract."""


def check(condition: object, text: str) -> None:
    if not condition:
        raise RunnerFault(text)


def feature_of(tokens: Sequence[int]) -> float:
    """The target's feature of the last of these tokens."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1000003
    return float(value)


def features_message(request: int, tokens: Sequence[int], start: int, count: int) -> Features:
    """True features of positions start, ... of a sequence."""
    values = np.array([[feature_of(tokens[: start + index + 1])] for index in range(count)], np.float32)
    return Features(request, start, count, False, values.tobytes(), "float32")


@dataclass
class Cell:
    """What a tree slot holds."""

    token: int
    position: int
    ancestors: set[int]


@dataclass
class Row:
    sampling: SamplingParams
    pages: list[int] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    """Tokens by KV position; for a drafter of features from the second token on."""
    cells: dict[int, Cell] = field(default_factory=dict)
