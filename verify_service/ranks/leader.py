"""Rank 0 before the other ranks: it starts them, and ends the engine when one of them does not go on.

On a CPU they meet at the model: rank 0 says what it computes and which KV it moves, and `follow` has the others do the
same.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend, ForwardBatch, Segment, TokenBatch
from outrider.attention.torch_backend import TorchAttention
from outrider.cache.kv import KVCache
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError, InternalError
from outrider.host.process import spawn
from outrider.host.rank_memory import RankError, RankMemory
from outrider.logs import get_logger
from outrider.models.base import LanguageModel
from outrider.models.config import ModelConfig
from outrider.models.decoder import CausalLM
from outrider.rpc.lifecycle import EXIT_CONFIG, EXIT_FAILURE, exit_text

log = get_logger(__name__)

WORKER_MODULE = "verify_service.ranks.worker"
START = 0
"""Kind of the first message: the options. Kinds of others are the executor's."""
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 2.0
"""An engine that meets the fault itself tells its clients, and has so long for it."""
_REFUSAL_SECONDS = 10.0
"""So long one at its start has to refuse its options, which it does when it has read its part of the weights."""


class Followers:
    """The processes of ranks 1 and up, tied to the thread that made them."""

    def __init__(self, options: VerifyOptions) -> None:
        """Start them; they begin to load. Call it on the main thread."""
        world = options.tensor_parallel_size
        self.memory = RankMemory.create(world, options.rank_seconds)
        self._seconds = options.rank_seconds
        self._processes = {
            rank: spawn(WORKER_MODULE, [self.memory.descriptor], arguments=[str(rank), str(world)])
            for rank in range(1, world)
        }
        self._is_started = False
        self.memory.check = self.check
        self.memory.send(START, msgspec.msgpack.encode(options))
        log.info("%d ranks; those behind this one are processes %s", world, [p.pid for p in self._processes.values()])
        # From now on: a graph's first run waits on the device, where nobody else would see that a rank has ended.
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def check(self) -> None:
        """Raise RankError, or ConfigError for one that refuses its options at the start, for a rank that has ended."""
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                said = self.memory.said(rank)
                if code == EXIT_CONFIG and not self._is_started:
                    raise ConfigError(f"rank {rank}: {said}")
                raise RankError(f"rank {rank} of {self.memory.world} has ended ({said or exit_text(code)})")

    def started(self) -> None:
        """All ranks serve: from now on one that hangs ends the engine, too, also while nothing is asked of it."""
        self.memory.started()
        self._is_started = True

    def _watch(self) -> None:
        read = {rank: (self.memory.num_read(rank), time.monotonic()) for rank in self._processes}
        while True:
            time.sleep(_LOOK_SECONDS)
            fault, grace, code = "", _GRACE_SECONDS, EXIT_FAILURE
            try:
                self.check()
            except RankError as error:
                fault = error.message
            except ConfigError as error:
                fault, grace, code = error.message, _REFUSAL_SECONDS, EXIT_CONFIG
            for rank, (count, since) in read.items():
                now, found = time.monotonic(), self.memory.num_read(rank)
                if found != count or not self.memory.is_behind(rank) or not self._is_started:
                    read[rank] = (found, now)
                elif now - since > self._seconds:
                    fault = f"rank {rank} of {self.memory.world} did not answer within {self._seconds:g} s"
            if fault:
                self.memory.fault = fault
                log.error("%s; the engine ends", fault)
                time.sleep(grace)
                sys.stderr.flush()
                os._exit(code)


NEW_KV, FORWARD, LOGITS, CLEAR, MOVE = range(1, 6)
"""Kinds of messages."""


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
    segments = []
    for segment in batch.segments:
        mask = None if segment.mask is None else segment.mask.contiguous().numpy().tobytes()
        segments.append((segment.num_queries, _to_bytes(segment.kv_slots), mask, segment.num_spare))
    return msgspec.msgpack.encode((_to_bytes(batch.token_ids), _to_bytes(batch.positions), segments))


def _unpack_batch(data: bytes) -> ForwardBatch:
    """What `_pack_batch` was given."""
    token_ids, positions, parts = msgspec.msgpack.decode(data)
    segments = []
    for num_queries, kv_slots, mask_bytes, num_spare in parts:
        mask = None
        if mask_bytes is not None:
            mask = torch.frombuffer(bytearray(mask_bytes), dtype=torch.bool).view(num_queries, -1)
        segments.append(Segment(num_queries, _slots(kv_slots), mask, num_spare))
    return ForwardBatch(_slots(token_ids), _slots(positions), segments)
