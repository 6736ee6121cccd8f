"""The tokens that penalties look at, counted as they are committed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InternalError
from outrider.sampling.params import SamplingParams


class TokenHistory:
    """Prompt and output of one request as dense counts over the vocabulary (5 bytes a vocabulary entry).

    A tree node's own history adds its path; that gives a new array, so nodes never see each other's tokens.
    """

    def __init__(self, prompt_ids: Sequence[int], vocab_size: int) -> None:
        """Count a prompt. Ids, here and below, are of the vocabulary."""
        self._in_prompt = np.zeros(vocab_size, np.bool_)
        self._in_prompt[np.asarray(prompt_ids, np.int64)] = True
        self._counts = np.zeros(vocab_size, np.int32)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed output tokens."""
        np.add.at(self._counts, np.asarray(token_ids, np.int64), 1)

    def counts(self, path: Sequence[int]) -> NDArray[np.int32]:
        """How often each token occurs in output + path: int32 [vocab_size]. Not to be written to."""
        if not len(path):
            return self._counts
        counts = self._counts.copy()
        np.add.at(counts, np.asarray(path, np.int64), 1)
        return counts

    def present(self, counts: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which tokens occur in the prompt or in what `counts` counted: bool [vocab_size]."""
        return self._in_prompt | (counts > 0)


Logits = NDArray[np.float32]
TokenIds = NDArray[np.int64]

MIN_TEMPERATURE = 1e-6
"""Temperatures between 0 and this count as this: nearer to 0 the quotient would leave float32."""

# Shortlists hold the tokens within so many nats of the likeliest; the last one holds all.
_SHORTLIST_NATS = (3.0, 8.0, 16.0)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that survive top-k, top-p and min-p, with their processed logits."""

    token_ids: TokenIds | None
    """Ascending, int64 [N]; None stands for the whole vocabulary."""
    logits: Logits
    """float32 [N]. Tokens that the mask forbids may be among them, at -inf."""


class LogitsProcessor:
    """The processors of one request. Never writes to the logits it is given."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))

    def process(
        self, logits: Logits, history: TokenHistory | None, path: Sequence[int], mask: NDArray[np.bool_] | None = None
    ) -> Candidates:
        """Candidates of the row `logits` [vocab_size] at the end of `path`.

        `history` may be None if the request has no penalties. `mask` [vocab_size] is True where a token is allowed.
        Raises InternalError if a logit is NaN or +inf, or if no token is left.
        """
        params = self.params
        _check_top(logits, "the model's logits")
        # What leaves float32 is refused below; numpy need not warn of it.
        with np.errstate(over="ignore", invalid="ignore"):
            logits = self._adjusted(logits, history, path, mask)
            if not params.greedy:
                logits = logits / np.float32(max(params.temperature, MIN_TEMPERATURE))
        _check_top(logits, "the processed logits")
        if params.greedy:
            # The filters keep the likeliest token of lowest id, whatever they are set to.
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
    """A copy of `logits` [vocab_size] under the repetition, then frequency, then presence penalty."""
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
    """Where the `k` largest entries lie, ascending; of equal ones at the border, the first. All if there are fewer."""
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
    """Where the smallest set of likeliest tokens with mass `top_p` or more lies, ascending; never empty.

    The likeliest first, equal ones by place; a token stays if those before it have less mass than `top_p`. Weights
    and sums are float64.
    """
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    target = top_p * float(weights.sum())
    for ids in _shortlists(logits):
        if len(ids) < len(logits) and weights[ids].sum() < target:
            continue
        # A shortlist is complete above its border, so in order it is the beginning of the whole row in order, and
        # running sums agree bitwise: if they reach the target here, a full sort would give the same set.
        order = ids[np.argsort(-logits[ids], kind="stable")]
        mass = np.cumsum(weights[order])
        if mass[-1] >= target:
            break
    return np.sort(order[: int(np.searchsorted(mass, target)) + 1])


def min_p_indices(logits: Logits, min_p: float) -> TokenIds:
    """Where the tokens lie that are at least `min_p` times as likely as the likeliest, ascending; never empty."""
    distance = logits.astype(np.float64) - float(logits.max())
    return np.flatnonzero(distance >= math.log(min(min_p, 1.0)))


def _narrow(token_ids: TokenIds | None, logits: Logits, kept: TokenIds) -> tuple[TokenIds, Logits]:
    return (kept if token_ids is None else token_ids[kept]), logits[kept]


def _shortlists(logits: Logits) -> Iterator[TokenIds]:
    """Ever longer lists of places, ascending, each with all entries above some border; the last one has all."""
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
