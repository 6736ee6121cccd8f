"""The reference sampler: one request's tokens from the target's logits, on the CPU, by the shared noise or lossily.

Processors turn a row's logits into candidates (docs/sampling.md), and one of these is chosen.

Lossy acceptance lets draft tokens pass that are likely enough, though the noise chose another one. It is off by
default. The rule looks only at the target's own distribution (docs/sampling.md). Each level of the tree has one coin,
shared like the noise. A child passes if the coin is below the accumulated chance of the children so far, divided by one
threshold, or if its own chance reaches the other. If none passes, another token is sampled. Imports no torch.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InternalError
from outrider.sampling.noise import gumbel, philox
from outrider.sampling.params import ANY_END, AnswerEnd, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class TokenHistory:
    """Prompt and output of one request as dense counts over the vocabulary (5 bytes a vocabulary entry).

    A tree node's own history adds its path in a new array, so nodes never see each other's tokens.
    """

    def __init__(self, prompt_ids: Sequence[int], vocab_size: int) -> None:
        """Count a prompt. All ids given to this class must be below `vocab_size`."""
        self._in_prompt = np.zeros(vocab_size, np.bool_)
        self._in_prompt[np.asarray(prompt_ids, np.int64)] = True
        self._counts = np.zeros(vocab_size, np.int32)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed output tokens."""
        np.add.at(self._counts, np.asarray(token_ids, np.int64), 1)

    def counts(self, path: Sequence[int]) -> NDArray[np.int32]:
        """Return how often each token occurs in output + path: int32 [vocab_size]. Not to be written to."""
        if not len(path):
            return self._counts
        counts = self._counts.copy()
        np.add.at(counts, np.asarray(path, np.int64), 1)
        return counts

    def present(self, counts: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which tokens occur in the prompt or have a count in `counts`: bool [vocab_size]."""
        return self._in_prompt | (counts > 0)


Logits = NDArray[np.float32]
TokenIds = NDArray[np.int64]

MIN_TEMPERATURE = 1e-6
"""Temperatures above 0 are raised to at least this: nearer to 0 the quotient would overflow float32."""

# Each shortlist holds the tokens within so many nats of the likeliest; a last one holds all.
_SHORTLIST_NATS = (3.0, 8.0, 16.0)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that survive top-k, top-p and min-p, with their processed logits."""

    token_ids: TokenIds | None
    """Ascending, int64 [N]; None stands for the whole vocabulary."""
    logits: Logits
    """float32 [N]; -inf for tokens that the mask forbids, which may be among the candidates."""


class LogitsProcessor:
    """The processors of one request. Never writes to the given logits."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))

    def process(
        self, logits: Logits, history: TokenHistory | None, path: Sequence[int], mask: NDArray[np.bool_] | None = None
    ) -> Candidates:
        """Return the candidates of the row `logits` [vocab_size] at the end of `path`.

        `history` may be None if the request has no penalties. `mask` [vocab_size] is True where a token is allowed.
        Raises InternalError if a logit is NaN or +inf, or if no token is left.
        """
        params = self.params
        _check_top(logits, "the model's logits")
        given = logits
        # Overflow is refused below; numpy need not warn of it.
        with np.errstate(over="ignore", invalid="ignore"):
            logits = self._adjusted(logits, history, path, mask)
            if not params.greedy:
                logits = logits / np.float32(max(params.temperature, MIN_TEMPERATURE))
        if logits is not given:
            _check_top(logits, "the processed logits")
        if params.greedy:
            # Every setting of the filters keeps the likeliest token of lowest id.
            return Candidates(None, logits)

        token_ids: TokenIds | None = None
        if 0 < params.top_k < len(logits):
            token_ids, logits = _narrow(token_ids, logits, top_k_indices(logits, params.top_k))
        if params.top_p < 1.0:
            token_ids, logits = _narrow(token_ids, logits, top_p_indices(logits, params.top_p))
        if params.min_p > 0.0:
            token_ids, logits = _narrow(token_ids, logits, min_p_indices(logits, params.min_p))
        return Candidates(token_ids, logits)

    def _adjusted(
        self, logits: Logits, history: TokenHistory | None, path: Sequence[int], mask: NDArray[np.bool_] | None
    ) -> Logits:
        if history is not None and self.params.penalized:
            logits = penalize(logits, self.params, history, path)
        if len(self._bias_ids):
            logits = logits.copy()
            logits[self._bias_ids] += self._bias
        if mask is not None:
            logits = np.where(mask, logits, np.float32(-np.inf))
        return logits


def penalize(logits: Logits, params: SamplingParams, history: TokenHistory, path: Sequence[int]) -> Logits:
    """Return a copy of `logits` [vocab_size] after the repetition, then frequency, then presence penalty."""
    logits = logits.copy()
    counts = history.counts(path)
    if params.repetition_penalty != 1.0:
        ids = np.flatnonzero(history.present(counts))
        penalty = np.float32(params.repetition_penalty)
        values = logits[ids]
        logits[ids] = np.where(values < 0, values * penalty, values / penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        ids = np.flatnonzero(counts)
        logits[ids] -= np.float32(params.frequency_penalty) * counts[ids].astype(np.float32)
        logits[ids] -= np.float32(params.presence_penalty)
    return logits


def top_k_indices(logits: Logits, k: int) -> TokenIds:
    """Return the indices of the `k` largest entries, ascending; all if there are fewer.

    Among equal entries at the border the first ones stay.
    """
    if k >= len(logits):
        return np.arange(len(logits))
    for ids in _shortlists(logits):
        if len(ids) >= k:
            break
    values = logits[ids]
    border = np.partition(values, len(values) - k)[len(values) - k]
    above, ties = ids[values > border], ids[values == border]
    return np.sort(np.concatenate((above, ties[: k - len(above)])))


def top_p_indices(logits: Logits, top_p: float) -> TokenIds:
    """Return the indices of the smallest set of likeliest tokens with mass `top_p` or more, ascending; never empty.

    In order of likelihood, equal ones by index, a token stays if those before it have less mass than `top_p`. Weights
    and sums are float64.
    """
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    target = top_p * float(weights.sum())
    for ids in _shortlists(logits):
        if len(ids) < len(logits) and weights[ids].sum() < target:
            continue
        # A shortlist has all tokens above its border. So, sorted, it is the beginning of the sorted row, and running
        # sums agree bitwise: if they reach the target here, a full sort would give the same set.
        order = ids[np.argsort(-logits[ids], kind="stable")]
        mass = np.cumsum(weights[order])
        if mass[-1] >= target:
            break
    return np.sort(order[: int(np.searchsorted(mass, target)) + 1])


def min_p_indices(logits: Logits, min_p: float) -> TokenIds:
    """Return the indices of tokens at least `min_p` times as likely as the likeliest, ascending; never empty."""
    distance = logits.astype(np.float64) - float(logits.max())
    return np.flatnonzero(distance >= math.log(min(min_p, 1.0)))


def _narrow(token_ids: TokenIds | None, logits: Logits, kept: TokenIds) -> tuple[TokenIds, Logits]:
    return (kept if token_ids is None else token_ids[kept]), logits[kept]


def _shortlists(logits: Logits) -> Iterator[TokenIds]:
    """Yield ever longer lists of ascending indices, each with all entries above some border; the last one has all."""
    top = logits.max()
    for nats in _SHORTLIST_NATS:
        yield np.flatnonzero(logits >= top - np.float32(nats))
    yield np.arange(len(logits))


def _check_top(logits: Logits, what: str) -> None:
    # The maximum is NaN if any entry is, and infinite if the row cannot be sampled from.
    top = logits.max()
    if np.isfinite(top):
        return
    problem = "hold NaN" if np.isnan(top) else "hold +inf" if top > 0 else "leave no token: all are -inf"
    raise InternalError(f"{what} {problem}", code="unusable_logits")


# Rows of noise to keep. A row serves all nodes of one depth, and again in the next round if the root moves little.
_NOISE_ROWS = 8
_COIN_COUNTER = 1
"""Last word of a coin's counter, which is 0 for the noise."""


@dataclass(frozen=True, slots=True)
class AcceptRule:
    """Thresholds of lossy acceptance, above 0 and at most 1. If both are 1.0, sampling is exact and throws no coin."""

    single: float = 1.0
    """A child passes if its own chance is at least this."""
    acc: float = 1.0
    """A child passes if the coin is below the accumulated chance divided by this."""

    @property
    def lossy(self) -> bool:
        """Whether the rule ever applies."""
        return self.single < 1.0 or self.acc < 1.0

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether a request with `params` is sampled by this rule; greedy requests never are."""
        return self.lossy and not params.greedy


EXACT = AcceptRule()


class RequestSampler:
    """Samples at any tree node of one request.

    The token depends only on the row, the history and path, the parameters and the position: not on how the node was
    reached, what was sampled before, or what is cached. An error in one call leaves the sampler unchanged.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int, end: AnswerEnd = ANY_END
    ) -> None:
        """Start at the end of the prompt. Admission has checked that all token ids are in the vocabulary.

        Arrays of the vocabulary's size are made only when this samples, which it never does where a device samples.
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
    def _non_ending(self) -> NDArray[np.bool_] | None:
        """Mask of the tokens that do not end the answer; None if the answer has no minimum length."""
        return ~np.isin(np.arange(self.vocab_size), list(self._end.token_ids)) if self._end.min_tokens else None

    @cached_property
    def _history(self) -> TokenHistory | None:
        return TokenHistory(self._prompt_ids, self.vocab_size) if self.params.penalized else None

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens to the output that penalties count."""
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
        """Return the token at absolute `position`, given the target's logits there.

        `logits_row` is float32 [vocab_size] or longer (padding is never sampled) and stays untouched. `path` holds
        the draft tokens from below the root up to the node, none of them committed; at the root it is empty.
        `position` counts from the first prompt token, so the first output token is at len(prompt_ids). `mask`
        [vocab_size] is True where grammar and bad words allow a token. `children` are the token ids below the node,
        for a lossy `rule`; the exact rule ignores them.
        Raises InternalError, for this request alone, if the logits hold NaN or +inf or leave no token.
        """
        if self._non_ending is not None and position < self._min_length:
            mask = self._non_ending if mask is None else self._non_ending & mask
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
        """Return the log-probability of `token_id`, and the `k` likeliest tokens with theirs, likeliest first.

        The distribution is the raw one: softmax of the logits before any processor, summed in float64. Equal logits
        are in the order of their ids. Raises InternalError if the logits hold NaN or +inf or are all -inf.
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
        row: NDArray[np.float32] = logits_row.detach().cpu().float().numpy()
        if row.ndim != 1 or len(row) < self.vocab_size:
            raise InternalError(f"logits have shape {row.shape}, not [{self.vocab_size}]", code="unusable_logits")
        return row[: self.vocab_size]

    def _noise_of(self, candidates: Candidates, position: int) -> NDArray[np.float32]:
        params, token_ids = self.params, candidates.token_ids
        row = self._noise.get(position)
        # A single token costs as much as four of a row, which share one counter.
        if row is None and token_ids is not None and 4 * len(token_ids) < self.vocab_size:
            return gumbel(params.seed, params.choice_index, position, token_ids)
        if row is None:
            row = gumbel(params.seed, params.choice_index, position, vocab_size=self.vocab_size)
            self._noise[position] = row
            if len(self._noise) > _NOISE_ROWS:
                self._noise.popitem(last=False)
        return row if token_ids is None else row[token_ids]


def coin(seed: int, choice_index: int, position: int) -> float:
    """Return the coin for the token at absolute `position`, above 0 and below 1; independent of the noise."""
    word = philox(np.zeros(1, np.uint64), position, choice_index, _COIN_COUNTER, seed)[0, 0]
    return (int(word) + 0.5) * 2.0**-32


def accepted_child(chances: Sequence[float], thrown: float, rule: AcceptRule) -> int | None:
    """Return the index of the child that passes, given the target's chance of each in node order; None if none does.

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
    """Return the token at absolute `position`, below a node with these `children` (token ids in node order).

    `candidates` are the node's processed logits. If no child passes, their mass is removed and the noise chooses among
    the other tokens. Without children this is exact sampling.
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
    # Children with all the mass pass for any coin, unless their sum is rounded down.
    scores = (logits if np.isneginf(rest).all() else rest) + gumbel(params.seed, params.choice_index, position, ids)
    return int(ids[np.argmax(scores)])


def walk_tree(
    parents: Sequence[int], token_ids: Sequence[int], sample: Callable[[int, Sequence[int], Sequence[int]], int | None]
) -> tuple[list[int], list[int]]:
    """Walk a tree from its root along sampled tokens; return the committed tokens and the accepted nodes.

    Node i hangs below node parents[i], or below the root at -1; parents come first. `sample` is called with a node
    (-1: the root), the committed tokens up to there, and the node's children as token ids in node order. The walk
    goes on to the child that holds the token, and ends with a token that no child holds. If `sample` returns None, it
    ends before that node, which is not accepted.
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
        if token_id is None:
            break
        tokens.append(token_id)
        if node >= 0:
            accepted.append(node)
        node = below.get(token_id)
    return tokens, accepted
