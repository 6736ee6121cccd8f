"""On a CPU ranks meet at the model: rank 0 says what it computes and which KV it moves, the others do the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend, ForwardBatch, Segment, TokenBatch
from outrider.attention.torch_backend import TorchAttention
from outrider.cache.kv import KVCache
from outrider.errors import InternalError
from outrider.host.rank_memory import RankMemory
from outrider.models.base import LanguageModel
from outrider.models.config import ModelConfig
from outrider.models.decoder import CausalLM

NEW_KV, FORWARD, LOGITS, CLEAR, MOVE = range(1, 6)
"""Kinds of messages."""
_CAUSAL = -1
"""In the place of a mask's width."""


def lead(model: LanguageModel, memory: RankMemory) -> LanguageModel:
    """Rank 0's part of a model, as the model that all ranks together are."""
    if not isinstance(model, CausalLM):
        raise InternalError("a rank's model is not the decoder")
    return LeadingModel(model, memory)


class LeadingModel(LanguageModel):
    """Rank 0's part of a model, which has the other ranks compute theirs."""

    config: ModelConfig

    def __init__(self, model: CausalLM, memory: RankMemory) -> None:
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.has_experts, self.kv_dtype = model.has_experts, model.kv_dtype
        self._model = model
        self._memory = memory

    def new_kv(self, num_slots: int) -> KVCache:
        """See LanguageModel."""
        self._memory.send(NEW_KV, _to_bytes([num_slots]))
        return _LeadingKV(self._model, num_slots, self._memory)

    def forward_with_features(
        self, batch: TokenBatch, kv: KVCache, attention: AttentionBackend, feature_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """See LanguageModel. The residual stream is the same on all ranks, and so are features."""
        if not isinstance(batch, ForwardBatch):
            raise ValueError("ranks on a CPU need a batch of segments")
        self._memory.send(FORWARD, _pack_batch(batch))
        return self._model.forward_with_features(batch, kv, attention, feature_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """See LanguageModel."""
        if self.config.vocab_cuts > 1:
            rows = hidden.contiguous().view(torch.uint8).numpy()
            self._memory.send(LOGITS, rows.tobytes())
        return self._model.logits(hidden)


class _LeadingKV(KVCache):
    """Rank 0's part of a cache of which every rank has its heads."""

    def __init__(self, model: CausalLM, num_slots: int, memory: RankMemory) -> None:
        config = model.config
        dtype = model.kv_dtype or model.dtype
        super().__init__(config.num_layers, num_slots, config.num_kv_heads, config.head_dim, dtype, model.device)
        self._memory = memory

    def clear(self, slots: Tensor) -> None:
        self._memory.send(CLEAR, _to_bytes(slots))
        super().clear(slots)

    def move(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        self._memory.send(MOVE, _to_bytes(torch.cat((src_slots, dst_slots))))
        super().move(src_slots, dst_slots)


@torch.inference_mode()
def follow(model: CausalLM, memory: RankMemory) -> None:
    """Do what rank 0 does, for ever."""
    attention = TorchAttention()
    kv: KVCache | None = None
    while True:
        kind, body = memory.receive()
        if kind == NEW_KV:
            kv = model.new_kv(int(_slots(body)[0]))
        elif kind == LOGITS:
            rows = torch.frombuffer(bytearray(body), dtype=model.dtype)
            model.logits(rows.view(-1, model.config.hidden_size))
        elif kv is None:
            raise InternalError(f"rank 0 sent {kind} before there is a KV cache")
        elif kind == FORWARD:
            model.forward(_unpack_batch(body), kv, attention)
        elif kind == CLEAR:
            kv.clear(_slots(body))
        elif kind == MOVE:
            kv.move(*_slots(body).chunk(2))
        else:
            raise InternalError(f"rank 0 sent a message of kind {kind}")


def _to_bytes(slots: Tensor | Sequence[int]) -> bytes:
    return np.asarray(slots, np.int64).tobytes()


def _slots(body: bytes) -> Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.int64)


def _pack_batch(batch: ForwardBatch) -> bytes:
    """int32 words of tokens, positions and segments, and behind them the masks' bytes."""
    words = [len(batch.token_ids), len(batch.segments)]
    masks = []
    for segment in batch.segments:
        width = _CAUSAL
        if segment.mask is not None:
            width = segment.mask.shape[1]
            masks.append(segment.mask.contiguous().numpy().tobytes())
        words += [segment.num_queries, len(segment.kv_slots), segment.num_spare, width]
    arrays = [batch.token_ids, batch.positions, *(segment.kv_slots for segment in batch.segments)]
    parts = [np.array(words, np.int32), *(array.numpy().astype(np.int32) for array in arrays)]
    return b"".join([np.concatenate(parts).tobytes(), *masks])


def _unpack_batch(data: bytes) -> ForwardBatch:
    """What `_pack_batch` was given."""
    num_tokens, num_segments = np.frombuffer(data, np.int32, 2).tolist()
    heads = np.frombuffer(data, np.int32, 4 * num_segments, 8).reshape(-1, 4).tolist()
    at = 4 * (2 + 4 * num_segments)

    def ints(count: int) -> torch.Tensor:
        nonlocal at
        found = torch.from_numpy(np.frombuffer(data, np.int32, count, at).astype(np.int64))
        at += 4 * count
        return found

    token_ids, positions = ints(num_tokens), ints(num_tokens)
    slots = [ints(length) for _, length, _, _ in heads]
    segments = []
    for (queries, _, spare, width), own in zip(heads, slots, strict=True):
        mask = None
        if width != _CAUSAL:
            mask = torch.from_numpy(np.frombuffer(data, np.bool_, queries * width, at).reshape(queries, width).copy())
            at += queries * width
        segments.append(Segment(queries, own, mask, spare))
    return ForwardBatch(token_ids, positions, segments)
