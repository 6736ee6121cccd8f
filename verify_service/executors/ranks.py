"""Communication of ranks: rank 0 starts and watches the others, and broadcasts what it does, which they do, too.

On a CPU ranks meet at the model: rank 0 sends what it computes and which KV it moves (`LeadingModel`), and the others
do the same in `follow`.

On GPUs rank 0 sends the others what it launches, and the rest is in the graphs (`RankLink`). A round's tokens are
shared on the devices at the head of its graph, and its committed tokens after sampling. So the other ranks need neither
sampling tables nor masks, and run the same round whatever rank 0 does to it. A drafter whose model is cut, too, grows
the same trees on all ranks: tokens come from the same logits, which all ranks have whole, and features from the same
residual stream. Rows, pages and temperatures, which tell requests apart, come from rank 0's host.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.attention.base import AttentionBackend, ForwardBatch, Segment, TokenBatch
from outrider.attention.paged import PromptChunk
from outrider.attention.torch_backend import TorchAttention
from outrider.cache.kv import KVCache
from outrider.config.verify import VerifyOptions
from outrider.drafting.model.round_drafter import ChoiceShape, RoundDrafter, RoundShape
from outrider.errors import EXIT_CONFIG, EXIT_FAILURE, ConfigError, InternalError, exit_text
from outrider.graphs import compile_aside
from outrider.host.process import spawn
from outrider.host.rank_memory import RankError, RankMemory
from outrider.layers.exchange import Exchange
from outrider.logs import get_logger
from outrider.models.base import LanguageModel
from outrider.models.config import ModelConfig
from outrider.models.decoder import CausalLM
from outrider.sampling.params import SamplingParams

log = get_logger(__name__)

Ints = NDArray[np.int32]
Numbers = Sequence[int] | Ints

WORKER_MODULE = "verify_service.engine.rank_worker"
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 2.0
"""Time for the engine to meet the fault itself, and send its clients the error."""
_REFUSAL_SECONDS = 10.0
"""Time for a starting engine to refuse its options, which it does after it has read its part of the weights."""
START = 0
"""Kind of the first message of rank 0: the options."""
ROUND, CAPTURE, PROMPTS, CAPTURE_SMALL, PAGES, LOGITS = range(1, 7)
"""Kinds of messages on GPUs, all of int32, in this order: a bucket; several buckets; a shape of prompts and its
description; whether with graphs; a row, a place and the pages from there on; the first row of the last prompts, and how
many rows."""
DRAFT_CAPTURE, DRAFT_ROW, DRAFT_CUT, DRAFT_CONTEXT, DRAFT_GROW = range(7, 12)
"""Kinds of messages about a drafter that is cut over ranks: see RankedDrafter."""
NEW_KV, FORWARD, HIDDEN, CLEAR, MOVE = range(12, 17)
"""Kinds of messages on a CPU; HIDDEN brings rows for the output matrix."""
_SAMPLING = struct.Struct("<dQq")
_CHUNK_WORDS = 4


class Followers:
    """The processes of ranks 1 and up, tied to the thread that made them."""

    def __init__(self, options: VerifyOptions) -> None:
        """Start the processes, which begin to load. Call this on the main thread."""
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
        log.info("%d ranks; the other ranks are processes %s", world, [p.pid for p in self._processes.values()])
        # Watch from now on: a graph's first run waits on the device, and nothing else would notice a rank's end.
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def check(self) -> None:
        """Raise RankError if a rank has ended, or ConfigError if it has refused its options at the start."""
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                failure = self.memory.failure_of(rank)
                if code == EXIT_CONFIG and not self._is_started:
                    raise ConfigError(f"rank {rank}: {failure}")
                raise RankError(f"rank {rank} of {self.memory.world} has ended ({failure or exit_text(code)})")

    def started(self) -> None:
        """Note that all ranks serve: from now on one that hangs ends the engine, too, even while that is idle."""
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


class ExecutorLink:
    """An executor's link to the other ranks of its model. This one is for a model without other ranks."""

    is_ranked = False

    def broadcast(self, kind: int, *parts: Numbers) -> None:
        """As rank 0, send the other ranks a message to do what this one does now; other ranks send nothing."""

    def share(self, parts: Sequence[Tensor]) -> None:
        """See Exchange; may be captured."""

    def sample(self, commit: Callable[[], None], brought: Tensor, follow: Callable[[], None]) -> None:
        """Have rank 0 `commit`, which fills `brought`, and the others `follow` with what it holds; may be captured."""
        commit()

    def check(self) -> None:
        """Raise RankError if the ranks cannot go on, or if the results of a finished round are worthless."""

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Let each rank run on its own within this context, to compile; at its end, wait for all ranks."""
        yield

    @contextmanager
    def in_step(self, what: str) -> Iterator[None]:
        """Raise RankError if memory runs out amid `what`: the others run it to its end, or wait for this rank."""
        yield

    def give_up_drafting(self, error: Exception) -> None:
        """Raise RankError, since drafting failed on one rank; a model without other ranks goes on without drafting."""


class RankLink(ExecutorLink):
    """One rank's link to the others."""

    is_ranked = True

    def __init__(self, memory: RankMemory, exchange: Exchange) -> None:
        self._memory = memory
        self._exchange = exchange
        self._leads = memory.rank == 0

    def broadcast(self, kind: int, *parts: Numbers) -> None:
        """See ExecutorLink."""
        if self._leads:
            self._memory.send(kind, b"".join(np.asarray(part, np.int32).tobytes() for part in parts))

    def least(self, number: int) -> int:
        """Return the smallest of all ranks' numbers."""
        return min(int(text) for text in self._memory.trade(b"%d" % number))

    def share(self, parts: Sequence[Tensor]) -> None:
        """See ExecutorLink."""
        self._exchange.share(parts)

    def sample(self, commit: Callable[[], None], brought: Tensor, follow: Callable[[], None]) -> None:
        """See ExecutorLink."""
        if self._leads:
            commit()
        self._exchange.share([brought])
        if not self._leads:
            follow()

    def check(self) -> None:
        """See ExecutorLink."""
        if self._memory.fault:
            raise RankError(self._memory.fault)
        if (rank := self._exchange.silent_rank()) is not None:
            raise RankError(f"rank {rank} of {self._memory.world} did not answer in a round")

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """See ExecutorLink."""
        with self._exchange.alone():
            yield
        self._memory.trade(b"compiled")

    @contextmanager
    def in_step(self, what: str) -> Iterator[None]:
        """See ExecutorLink."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise RankError(f"no memory on rank 0 for {what}; lower --mem-fraction-static") from error

    def give_up_drafting(self, error: Exception) -> None:
        """See ExecutorLink."""
        raise RankError(f"drafting on all ranks failed on rank 0: {type(error).__name__}: {error}") from error


class RankedDrafter(RoundDrafter):
    """See RoundDrafter. The other ranks get only those sampling parameters that candidates are ranked by."""

    def __init__(self, link: ExecutorLink, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, compiling=link.compiling)
        self._link = link

    def admit(self, row: int, sampling: SamplingParams) -> None:
        """See RoundDrafter."""
        words = _SAMPLING.pack(sampling.temperature, sampling.seed, sampling.choice_index)
        self._link.broadcast(DRAFT_ROW, [row, *np.frombuffer(words, np.int32)])
        super().admit(row, sampling)

    def cut(self, row: int, shift: int, pages: Sequence[int]) -> None:
        """See RoundDrafter."""
        self._link.broadcast(DRAFT_CUT, [row, shift, *pages])
        super().cut(row, shift, pages)

    def compute_context(self, chunks: Sequence[PromptChunk], feature_slots: Sequence[int]) -> None:
        """See RoundDrafter."""
        self._link.broadcast(DRAFT_CONTEXT, pack_chunks(chunks, feature_slots))
        super().compute_context(chunks, feature_slots)

    def grow(self, shape: RoundShape, num_steps: int, num_nodes: int) -> None:
        """See RoundDrafter."""
        self._link.broadcast(DRAFT_GROW, [*shape, num_steps, num_nodes])
        super().grow(shape, num_steps, num_nodes)

    def capture(self, shapes: Sequence[RoundShape], choices: Sequence[ChoiceShape]) -> None:
        """See RoundDrafter."""
        pairs = [*shapes, *choices]
        self._link.broadcast(DRAFT_CAPTURE, [len(shapes), *(number for pair in pairs for number in pair)])
        super().capture(shapes, choices)

    def replay(self, kind: int, numbers: Ints) -> None:
        """Do, on a rank above 0, what rank 0 does. `kind`, `numbers`: kind and body of its message."""
        if kind == DRAFT_GROW:
            tokens, rows, num_steps, num_nodes = numbers.tolist()
            super().grow(RoundShape(tokens, rows), num_steps, num_nodes)
        elif kind == DRAFT_CONTEXT:
            super().compute_context(*unpack_chunks(numbers))
        elif kind == DRAFT_ROW:
            temperature, seed, choice = _SAMPLING.unpack(numbers[1:].tobytes())
            super().admit(int(numbers[0]), SamplingParams(temperature=temperature, seed=seed, choice_index=choice))
        elif kind == DRAFT_CUT:
            super().cut(int(numbers[0]), int(numbers[1]), numbers[2:].tolist())
        elif kind == DRAFT_CAPTURE:
            pairs = numbers[1:].reshape(-1, 2).tolist()
            shapes, choices = pairs[: numbers[0]], pairs[numbers[0] :]
            with compile_aside():
                super().capture([RoundShape(*pair) for pair in shapes], [ChoiceShape(*pair) for pair in choices])
        else:
            raise ValueError(f"rank 0 sent a message of kind {kind}")


def pack_chunks(chunks: Sequence[PromptChunk], feature_slots: Sequence[int]) -> Ints:
    """Encode their number; row, start, offset and number of tokens of each; all tokens, slots and feature slots."""
    heads = [(chunk.table_row, chunk.start, chunk.offset, len(chunk.slots)) for chunk in chunks]
    parts = [[len(chunks)], *heads, *(chunk.token_ids for chunk in chunks), *(chunk.slots for chunk in chunks)]
    return np.concatenate([np.asarray(part, np.int32) for part in (*parts, feature_slots)])


def unpack_chunks(numbers: Ints) -> tuple[list[PromptChunk], list[int]]:
    """Decode what `pack_chunks` was given."""
    count = int(numbers[0])
    heads = numbers[1 : 1 + _CHUNK_WORDS * count].reshape(-1, _CHUNK_WORDS)
    ends = np.cumsum(heads[:, 3])
    total = int(ends[-1])
    tokens, slots, feature_slots = np.split(numbers[1 + _CHUNK_WORDS * count :], [total, 2 * total])
    parts = zip(heads.tolist(), np.split(tokens, ends[:-1]), np.split(slots, ends[:-1]), strict=True)
    chunks = [PromptChunk(row, own, start, into, offset) for (row, start, offset, _), own, into in parts]
    return chunks, feature_slots.tolist()


class LeadingModel(LanguageModel):
    """Rank 0's part of a model, used as the whole model: it makes the other ranks compute their parts."""

    config: ModelConfig

    def __init__(self, model: LanguageModel, memory: RankMemory) -> None:
        if not isinstance(model, CausalLM):
            raise InternalError("a rank's model is not the decoder")
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
            self._memory.send(HIDDEN, rows.tobytes())
        return self._model.logits(hidden)


class _LeadingKV(KVCache):
    """Rank 0's part of a KV cache of which every rank has some heads."""

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
    """Repeat what rank 0 does, forever."""
    attention = TorchAttention()
    kv: KVCache | None = None
    while True:
        kind, body = memory.receive()
        if kind == NEW_KV:
            kv = model.new_kv(int(_slots(body)[0]))
        elif kind == HIDDEN:
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
    """Decode what `_pack_batch` was given."""
    token_ids, positions, parts = msgspec.msgpack.decode(data)
    segments = []
    for num_queries, kv_slots, mask_bytes, num_spare in parts:
        mask = None
        if mask_bytes is not None:
            mask = torch.frombuffer(bytearray(mask_bytes), dtype=torch.bool).view(num_queries, -1)
        segments.append(Segment(num_queries, _slots(kv_slots), mask, num_spare))
    return ForwardBatch(_slots(token_ids), _slots(positions), segments)
