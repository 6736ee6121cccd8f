"""What a draft has told of its trees, and what a target that believes its scores commits of them."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from outrider.protocol.messages import Grow

_MOST_TOKENS = 8


class ToldTrees:
    """Of all requests. It asks no author, who would put in order for that what is to be measured in disorder."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._luck = np.random.default_rng(seed)
        self._epochs: dict[int, int] = {}
        self._below: dict[int, defaultdict[int, dict[int, tuple[int, float]]]] = {}  # node to token to id and chance

    def note(self, grow: Grow) -> None:
        """A draft told this."""
        if self._epochs.get(grow.request) != grow.epoch:
            self._epochs[grow.request], self._below[grow.request] = grow.epoch, defaultdict(dict)
        columns = (grow.parents.tolist(), grow.token_ids.tolist(), grow.scores.tolist())
        for node, (parent, token, score) in enumerate(zip(*columns, strict=True), grow.first_id):
            self._below[grow.request][parent][token] = (node, math.exp(score))

    def commit(self, request: int, epoch: int, root: int) -> list[int]:
        """Tokens below the root of a tree: a path that was told, and one more."""
        told = self._below[request] if self._epochs.get(request) == epoch else {}
        tokens: list[int] = []
        node: int | None = root
        while node is not None and len(tokens) < _MOST_TOKENS:
            below = told.get(node, {})
            chances = [chance for _, chance in below.values()]
            pick = self._luck.choice(len(below) + 1, p=[*chances, max(0.0, 1 - sum(chances))]) if below else 0
            tokens.append([*below, int(self._luck.integers(self._vocab_size))][pick])
            node = below[tokens[-1]][0] if tokens[-1] in below else None
        return tokens
