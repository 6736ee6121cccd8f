"""The interface of executors, and what all of them do alike: features and prompts' log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.cache.kv import FeatureStore
from outrider.device import put
from outrider.errors import InternalError, OutriderError, OverloadedError
from outrider.logs import get_logger
from outrider.models.base import LanguageModel
from outrider.protocol.generation import PromptLogprobs
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Growth, Pending, Result
from verify_service.features.staging import FeaturePlan, FeatureStaging, Ring, StagedRows

log = get_logger(__name__)

_MAX_PIECE_LOGITS = 1 << 23
"""Most logits in memory at once, 32 MB of them: those of a whole chunk would take gigabytes."""


class Executor:
    """Runs a round's forward, sampling walk and KV compaction. Rounds run in the order of their launches.

    Methods for features, which all executors can store, are called between two rounds, except `read_features`.
    """

    launches_ahead: bool = False
    """Whether a round may be launched before the one before was waited for, so that two are under way.

    Such a round has only roots; for an entry with `is_ahead`, the root is the token that the device has just sampled.
    Without a device to keep busy this gains nothing, and a token computed past an answer's end costs time.
    """
    lends_features: bool = True
    """Whether features may be stored for drafts."""

    def __init__(self, model: LanguageModel, num_slots: int, attention: AttentionBackend) -> None:
        """`num_slots`: slots of the KV cache."""
        self._model = model
        self._kv = model.new_kv(num_slots)
        self._attention = attention
        self.feature_format = model.config.hidden_size, str(model.dtype).removeprefix("torch.")
        """Number of values in a layer's hidden state, and their dtype."""
        self._features: FeatureStore | None = None
        self._staging: FeatureStaging | None = None

    def launch(self, entries: Sequence[Entry], growth: Growth | None = None) -> Pending:
        """Queue a round, and the growth of trees behind it; returns before it has run.

        Page tables must cover all of its tokens. Entries are laid out here: between `launch` and `wait` the engine
        takes in messages, which may end requests of the round.
        """
        raise NotImplementedError

    def dry_run(self, entries: Sequence[Entry]) -> None:
        """Run the host's part of `launch` without effect, perhaps while a round runs; or do nothing.

        An engine that never sleeps calls this: code that has not run for a round's time is slow at first.
        """

    def forget(self, request: Request) -> None:
        """Forget a request that ended or gave up its pages, perhaps while a round with it is under way.

        The next launch may reuse whatever is kept for it, since it runs after all that was launched before. A preempted
        request comes back with `cached_len` at what the radix cache had.
        """
        raise NotImplementedError

    def begin_features(self, plan: FeaturePlan) -> None:
        """Prepare for rounds that store the features of `plan`, and no others, for every KV slot.

        Rounds go on as before until `refresh_features` has returned 0. Raises OutriderError, and changes nothing, if
        there is no memory for the features.
        """
        raise NotImplementedError

    def refresh_features(self) -> int:
        """Do a piece of what `begin_features` began. Returns how many are left; at 0, rounds store features."""
        return 0

    def lend_ring(self) -> Ring | None:
        """Return memory that a draft on this host may map; None if there is none to share."""
        try:
            return self._stage().rings.lend()
        except torch.OutOfMemoryError:
            return None

    def take_back_ring(self, ring: Ring) -> None:
        """Take back a ring whose draft does not use it, or is gone."""
        self._stage().rings.take_back(ring)

    def read_features(
        self, slots: NDArray[np.int32], parts: tuple[int, ...], after: Pending | None, ring: Ring | None = None
    ) -> StagedRows | None:
        """Copy the features at KV slots [N], once the round `after` has run, to `ring` or else to the host.

        Returns None if too much is being copied, or lies in the ring, already. While a later round is under way, only
        slots of committed positions may be read.
        """
        if self._features is None:
            raise RuntimeError("features are not stored")
        return self._stage().read(self._features, slots, parts, after.complete if after is not None else None, ring)

    def _forward(self, batch: TokenBatch, slots: Tensor, store: FeatureStore | None) -> Tensor:
        """Run a forward; features go to `slots` [M] of `store`, if there is one. Returns hidden states [M, hidden]."""
        layers = () if store is None else store.inputs
        hidden, features = self._model.forward_with_features(batch, self._kv, self._attention, layers)
        if store is not None:
            store.write(slots, features)
        return hidden

    def _new_store(self, plan: FeaturePlan) -> FeatureStore:
        model = self._model
        hidden, num_slots = model.config.hidden_size, self._kv.num_slots
        return FeatureStore(plan.layers, hidden, num_slots, model.dtype, model.device, plan.projection)

    def _stage(self) -> FeatureStaging:
        """Return the staging, made on first use. Raises torch.OutOfMemoryError if there is no memory for it."""
        if self._staging is None:
            self._staging = FeatureStaging(self._model.device)
        return self._staging


class PromptScores:
    """Log-probabilities of the prompt tokens that follow some positions of a chunk, on their way to the host."""

    def __init__(self, entry: Entry, positions: range) -> None:
        """`positions`: those of the entry's chunk whose logits are asked for, as `Entry.scored` gives them."""
        self._start = positions.start + 1
        request = entry.request
        self._token_ids = request.tokens[positions.start + 1 : positions.stop + 1]
        self._num_top = request.params.num_prompt_logprobs or 0
        # Padding of the model's vocabulary has no share of the probability.
        self._vocab_size = request.sampler.vocab_size
        self._host = torch.empty(0)
        self._error: OutriderError | None = None

    @torch.inference_mode()
    def compute(self, logits_of: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
        """Queue the work for `hidden`, [N or more, hidden_size]: its first N rows are the positions, in order.

        Rows past N are padding. They are computed if a piece of fixed size reaches into them, so that the shape of the
        products depends only on that of the chunk.
        """
        piece = max(1, _MAX_PIECE_LOGITS // self._vocab_size)
        parts = []
        try:
            ids = put(self._token_ids, hidden.device).long()
            for start in range(0, len(ids), piece):
                wanted = ids[start : start + piece]
                logits = logits_of(hidden[start : start + piece])[: len(wanted), : self._vocab_size]
                parts.append(_describe(logits, wanted, min(self._num_top, self._vocab_size)))
            found = torch.cat(parts)
            self._host = torch.empty(found.shape, dtype=found.dtype, pin_memory=found.device.type == "cuda")
            self._host.copy_(found, non_blocking=True)
        except torch.OutOfMemoryError:
            log.warning("the device has no memory for log-probabilities of a prompt; the request fails")
            self._error = OverloadedError("no memory for log-probabilities of the prompt; try again later")

    def read(self) -> PromptLogprobs | OutriderError:
        """Return the result, once the device has computed it, or an error of this request: no memory, or bad logits."""
        if self._error is not None:
            return self._error
        columns = self._host.numpy().copy()
        num_top = (columns.shape[1] - 2) // 2
        floats = columns.view("float32")
        logprobs = floats[:, 0].copy()
        # Each contains the sum over the vocabulary, so that one bad logit shows.
        if (logprobs != logprobs).any():
            return InternalError("the model's logits are unusable", code="unusable_logits")
        return PromptLogprobs(
            self._start, logprobs, columns[:, 1].astype("uint32"), columns[:, 2 : 2 + num_top], floats[:, 2 + num_top :]
        )


def with_prompt(result: Result, scores: PromptScores) -> Result:
    """Add the prompt's log-probabilities to a result; a failure of either fails the request."""
    read = scores.read()
    if result.error is not None:
        return result
    if isinstance(read, OutriderError):
        return Result(error=read)
    return result._replace(prompt_logprobs=read)


def _describe(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Return int32 [R, 2 + 2 num_top] of logits [R, V]: own logprob, rank, top ids, their logprobs; floats as bits.

    A token's own value is bitwise the one that it has among the top ids: clients compare them.
    """
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(-1, token_ids[:, None])
    places = torch.arange(logits.shape[-1], device=logits.device)
    better = (logits > own) | ((logits == own) & (places < token_ids[:, None]))
    rank = 1 + better.sum(-1, keepdim=True, dtype=torch.int32)
    top_ids = logits.topk(num_top, -1).indices.sort(-1).values
    top = logits.gather(-1, top_ids)
    order = top.sort(stable=True, dim=-1, descending=True).indices
    top, top_ids = top.gather(-1, order), top_ids.gather(-1, order).int()
    # NaN if the logits hold NaN or +inf, or nothing but -inf.
    sound = torch.where(total.isfinite(), total, torch.nan)
    return torch.cat([_bits(own - sound), rank, top_ids, _bits(top - sound)], -1)


def _bits(values: Tensor) -> Tensor:
    return values.float().contiguous().view(torch.int32)
