"""The reference sampler: one request's tokens from the target's logits, on the CPU, by the shared noise or lossily.

Lossy acceptance lets draft tokens pass that are likely enough, though the noise chose another one. Off by default. The
rule looks at the target's own distribution alone (docs/sampling.md): each level of the tree has one coin, shared as the
noise is; a child passes if the coin is below the accumulated chance of the children so far, divided by one threshold,
or if its own chance reaches the other. If none passes, one of the other tokens is sampled.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, float32

from outrider.errors import InternalError
from outrider.sampling.noise import gumbel, philox
from outrider.sampling.params import ANY_END, AnswerEnd, SamplingParams
from outrider.sampling.processors import Candidates, LogitsProcessor, TokenHistory, top_k_indices

# Rows of noise kept. A row serves all nodes of one depth, and again in the next round if the root moves little.
_NOISE_ROWS = 8
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


class RequestSampler:
    """Samples at any tree node of one request.

    The token depends on the row, the history and path, the parameters and the position alone: not on how the node was
    reached, on what was sampled before, or on what is cached. An error in one call leaves the sampler as it was.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int, end: AnswerEnd = ANY_END
    ) -> None:
        """Start at the end of the prompt. All token ids are of the vocabulary, as admission has seen to.

        Nothing of the vocabulary's size is made before it samples: where a device does, it never does.
        """
        self.params = params
        self.vocab_size = vocab_size
        self._prompt_ids = prompt_ids
        self._length = len(prompt_ids)
        self._processor = LogitsProcessor(params)
        self._min_length = len(prompt_ids) + end.min_tokens
        self._end = end
        self._noise: OrderedDict[int, NDArray[np.float32]] = OrderedDict()

    @cached_property
    def _goes_on(self) -> NDArray[np.bool_] | None:
        """Which tokens let an answer go on, if it has a least length."""
        return ~np.isin(np.arange(self.vocab_size), list(self._end.token_ids)) if self._end.min_tokens else None

    @cached_property
    def _history(self) -> TokenHistory | None:
        return TokenHistory(self._prompt_ids, self.vocab_size) if self.params.penalized else None

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens to the output that penalties see."""
        if self._history is not None:
            self._history.extend(token_ids)
        self._length += len(token_ids)
        for position in [position for position in self._noise if position < self._length]:
            del self._noise[position]

    def sample(
        self,
        logits_row: Tensor,
        path: Sequence[int],
        position: int,
        mask: NDArray[np.bool_] | None = None,
        children: Sequence[int] = (),
        rule: AcceptRule = EXACT,
    ) -> int:
        """The token at absolute `position`, given the target's logits there.

        `logits_row` is float32 [vocab_size] or longer (padding is never sampled) and stays untouched. `path` holds
        the draft tokens from below the root up to the node, none of them committed; at the root it is empty.
        `position` counts from the first prompt token, so the first output token is at len(prompt_ids). `mask`
        [vocab_size] is True where a grammar, or bad words, allow a token. `children` are the token ids below the node,
        for a `rule` that lets some of them pass; with the exact one they do not matter.
        Raises InternalError, for this request alone, if the logits hold NaN or +inf or leave no token.
        """
        if self._goes_on is not None and position < self._min_length:
            mask = self._goes_on if mask is None else self._goes_on & mask
        candidates = self._processor.process(self._row(logits_row), self._history, path, mask)
        if children and rule.applies_to(self.params):
            return choose(candidates, children, self.params, position, rule)
        scores = candidates.logits
        if not self.params.greedy:
            scores = scores + self._noise_of(candidates, position)
        # The first of equal maxima; candidates ascend, so that is the lowest id.
        best = int(np.argmax(scores))
        return best if candidates.token_ids is None else int(candidates.token_ids[best])

    def logprobs(self, logits_row: Tensor, token_id: int, k: int) -> tuple[float, list[tuple[int, float]]]:
        """Log-probability of `token_id`, and the `k` likeliest tokens with theirs, likeliest first.

        They are of the raw distribution: softmax of the logits before any processor, summed in float64. Equal logits
        stand in the order of their ids. Raises InternalError if the logits hold NaN or +inf or are all -inf.
        """
        row = self._row(logits_row)
        top = float(row.max())
        if not np.isfinite(top):
            raise InternalError("the model's logits hold NaN or infinity", code="unusable_logits")
        log_total = top + math.log(float(np.exp(row.astype(np.float64) - top).sum()))
        likeliest = top_k_indices(row, k) if k > 0 else np.empty(0, np.int64)
        likeliest = likeliest[np.argsort(-row[likeliest], kind="stable")]
        return float(row[token_id]) - log_total, [(int(i), float(row[i]) - log_total) for i in likeliest]

    def _row(self, logits_row: Tensor) -> NDArray[np.float32]:
        row: NDArray[np.float32] = logits_row.detach().to("cpu", float32).numpy()
        if row.ndim != 1 or len(row) < self.vocab_size:
            raise InternalError(f"logits have shape {row.shape}, not [{self.vocab_size}]", code="unusable_logits")
        return row[: self.vocab_size]

    def _noise_of(self, candidates: Candidates, position: int) -> NDArray[np.float32]:
        params, token_ids = self.params, candidates.token_ids
        row = self._noise.get(position)
        # A token alone costs as much as four of a row, which share one counter.
        if row is None and token_ids is not None and 4 * len(token_ids) < self.vocab_size:
            return gumbel(params.seed, params.choice_index, position, token_ids)
        if row is None:
            row = gumbel(params.seed, params.choice_index, position, vocab_size=self.vocab_size)
            self._noise[position] = row
            if len(self._noise) > _NOISE_ROWS:
                self._noise.popitem(last=False)
        return row if token_ids is None else row[token_ids]


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
