"""Lossy acceptance: draft tokens that are likely enough pass, though the shared noise chose another one.

Off by default. The rule looks at the target's own distribution alone (docs/sampling.md): each level of the tree has
one coin, shared as the noise is; a child passes if the coin is below the accumulated chance of the children so far,
divided by one threshold, or if its own chance reaches the other. If none passes, one of the other tokens is sampled.
Numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.sampling.noise import gumbel, philox
from outrider.sampling.params import SamplingParams
from outrider.sampling.processors import Candidates

_COIN_COUNTER = 1
"""Last word of a coin's counter; that of the noise is 0."""


@dataclass(frozen=True, slots=True)
class AcceptRule:
    """Thresholds of lossy acceptance, above 0 and at most 1. At 1.0 both, sampling is exact and no coin is thrown."""

    single: float = 1.0
    """A child passes if its own chance is at least this."""
    acc: float = 1.0
    """A child passes if the coin is below the accumulated chance divided by this."""

    @property
    def lossy(self) -> bool:
        """Whether the rule ever applies."""
        return self.single < 1.0 or self.acc < 1.0

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether a request with `params` is sampled by this rule: greedy ones never are."""
        return self.lossy and not params.greedy


EXACT = AcceptRule()


def coin(seed: int, choice_index: int, position: int) -> float:
    """The coin thrown for the token at absolute `position`, above 0 and below 1; independent of the noise."""
    word = philox(np.zeros(1, np.uint64), position, choice_index, _COIN_COUNTER, seed)[0, 0]
    return (int(word) + 0.5) * 2.0**-32


def accepted_child(chances: Sequence[float], thrown: float, rule: AcceptRule) -> int | None:
    """Which child passes, given the target's chance of each in the order of the nodes; None if none does.

    A child that the processors have ruled out never passes.
    """
    accumulated = 0.0
    for index, chance in enumerate(chances):
        accumulated += chance
        if chance > 0.0 and (thrown < accumulated / rule.acc or chance >= rule.single):
            return index
    return None


def choose(
    candidates: Candidates, children: Sequence[int], params: SamplingParams, position: int, rule: AcceptRule
) -> int:
    """The token at absolute `position`, below a node with these `children` (token ids in the order of the nodes).

    `candidates` are the node's processed logits. If no child passes, their mass is removed and the noise chooses among
    the rest, so the token is none of them. Without children this is exact sampling.
    """
    ids, logits = candidates.token_ids, candidates.logits
    if ids is None:
        ids = np.arange(len(logits))
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    places = np.searchsorted(ids, children)
    known = places < len(ids)
    known[known] = ids[places[known]] == np.asarray(children)[known]
    chances = np.zeros(len(children))
    chances[known] = weights[places[known]] / weights.sum()
    index = accepted_child(chances.tolist(), coin(params.seed, params.choice_index, position), rule)
    if index is not None:
        return children[index]
    rest = logits.copy()
    rest[places[known]] = -np.inf
    # Children that hold all mass pass whatever the coin, but for the rounding of their sum.
    scores = (logits if np.isneginf(rest).all() else rest) + gumbel(params.seed, params.choice_index, position, ids)
    return int(ids[np.argmax(scores)])


def walk_tree(
    parents: Sequence[int], token_ids: Sequence[int], sample: Callable[[int, Sequence[int], Sequence[int]], int]
) -> tuple[list[int], list[int]]:
    """Walk a tree from its root along sampled tokens: the committed tokens and the accepted nodes.

    Node i hangs below node parents[i], or below the root at -1; parents come first. `sample` is called with a node
    (-1: the root), the committed tokens up to there, and its children's token ids in the order of the nodes. The walk
    goes on to the child that holds the token, and ends with a token that no child holds.
    """
    children: dict[int, dict[int, int]] = {}
    for index, (parent, held) in enumerate(zip(parents, token_ids, strict=True)):
        children.setdefault(parent, {})[held] = index
    tokens: list[int] = []
    accepted: list[int] = []
    node: int | None = -1
    while node is not None:
        below = children.get(node, {})
        token_id = sample(node, tokens, list(below))
        tokens.append(token_id)
        node = below.get(token_id)
        if node is not None:
            accepted.append(node)
    return tokens, accepted
