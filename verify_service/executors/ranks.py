"""What tells ranks apart on GPUs: rank 0 tells the others what it launches, and the rest is in the graphs.

A round's tokens are shared on the devices, at the head of its graph, and what it commits behind its sampling: so the
other ranks need no sampling tables and no masks, and whatever rank 0 does to a round they do, too. A drafter whose
model is cut, too, grows the same trees on all ranks: their tokens come from the same logits, which all ranks have
whole, and their features from the same residual stream. What tells requests apart, their rows, pages and temperatures,
comes from rank 0's host.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.attention.paged import PromptChunk
from outrider.drafting.model.round_drafter import ChoiceShape, RoundDrafter, RoundShape
from outrider.graphs import compile_aside
from outrider.host.rank_memory import RankError, RankMemory
from outrider.layers.exchange import Exchange
from outrider.sampling.params import SamplingParams

Ints = NDArray[np.int32]
Numbers = Sequence[int] | Ints

ROUND, CAPTURE, PROMPTS, CAPTURE_SMALL, PAGES, LOGITS = range(1, 7)
"""Kinds of messages, all of int32: a bucket; several; a shape of prompts and its description; whether with graphs; a
row, a place and the pages from there on; the first row of the last prompts, and how many."""
DRAFT_CAPTURE, DRAFT_ROW, DRAFT_CUT, DRAFT_CONTEXT, DRAFT_GROW = range(7, 12)
"""The same of what a drafter does that is cut over ranks: see RankedDrafter."""
_SAMPLING = struct.Struct("<dQq")
_CHUNK_WORDS = 4


class ExecutorLink:
    """What an executor says to other ranks of its model. This one has none."""

    is_ranked = False

    def tell(self, kind: int, *parts: Numbers) -> None:
        """As rank 0, tell the others to do what it does now."""

    def share(self, parts: Sequence[Tensor]) -> None:
        """See Exchange; may be captured."""

    def sample(self, commit: Callable[[], None], brought: Tensor, follow: Callable[[], None]) -> None:
        """Have rank 0 `commit`, which fills `brought`, and the others `follow` with what it holds; may be captured."""
        commit()

    def check(self) -> None:
        """Raise RankError if the ranks cannot go on, or what a finished round brought is worthless."""

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Meanwhile each rank runs what it likes, to compile it; then all are awaited."""
        yield

    @contextmanager
    def in_step(self, what: str) -> Iterator[None]:
        """Raise RankError for memory that ends amid `what`: the others run it to its end, or wait for this rank."""
        yield

    def give_up_drafting(self, error: Exception) -> None:
        """Raise RankError where drafting failed on one rank; alone it may be done without."""

    def new_drafter(self, *arguments: Any, **options: Any) -> RoundDrafter:
        """See RoundDrafter."""
        return RoundDrafter(*arguments, **options)


class RankLink(ExecutorLink):
    """One rank's link to the others."""

    is_ranked = True

    def __init__(self, memory: RankMemory, exchange: Exchange) -> None:
        self._memory = memory
        self._exchange = exchange
        self._leads = memory.rank == 0

    def tell(self, kind: int, *parts: Numbers) -> None:
        """See ExecutorLink."""
        if self._leads:
            self._memory.send(kind, b"".join(np.asarray(part, np.int32).tobytes() for part in parts))

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
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

    def new_drafter(self, *arguments: Any, **options: Any) -> RoundDrafter:
        """See ExecutorLink."""
        return RankedDrafter(self, *arguments, **options)


class RankedDrafter(RoundDrafter):
    """See RoundDrafter. Of a request's sampling the other ranks get what candidates are ranked by."""

    def __init__(self, link: ExecutorLink, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, compiling=link.compiling)
        self._link = link

    def admit(self, row: int, sampling: SamplingParams) -> None:
        """See RoundDrafter."""
        words = _SAMPLING.pack(sampling.temperature, sampling.seed, sampling.choice_index)
        self._link.tell(DRAFT_ROW, [row, *np.frombuffer(words, np.int32)])
        super().admit(row, sampling)

    def cut(self, row: int, shift: int, pages: Sequence[int]) -> None:
        """See RoundDrafter."""
        self._link.tell(DRAFT_CUT, [row, shift, *pages])
        super().cut(row, shift, pages)

    def compute_context(self, chunks: Sequence[PromptChunk], feature_slots: Sequence[int]) -> None:
        """See RoundDrafter."""
        self._link.tell(DRAFT_CONTEXT, pack_chunks(chunks, feature_slots))
        super().compute_context(chunks, feature_slots)

    def grow(self, shape: RoundShape, num_steps: int, num_nodes: int) -> None:
        """See RoundDrafter."""
        self._link.tell(DRAFT_GROW, [*shape, num_steps, num_nodes])
        super().grow(shape, num_steps, num_nodes)

    def capture(self, shapes: Sequence[RoundShape], choices: Sequence[ChoiceShape]) -> None:
        """See RoundDrafter."""
        pairs = [*shapes, *choices]
        self._link.tell(DRAFT_CAPTURE, [len(shapes), *(number for pair in pairs for number in pair)])
        super().capture(shapes, choices)

    def replay(self, kind: int, numbers: Ints) -> None:
        """As another rank than 0, do what rank 0 does; `kind`: see RankLink."""
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
    """Their number, of each row, start, offset and number of tokens, then all tokens, all slots, all feature slots."""
    heads = [(chunk.table_row, chunk.start, chunk.offset, len(chunk.slots)) for chunk in chunks]
    parts = [[len(chunks)], *heads, *(chunk.token_ids for chunk in chunks), *(chunk.slots for chunk in chunks)]
    return np.concatenate([np.asarray(part, np.int32) for part in (*parts, feature_slots)])


def unpack_chunks(numbers: Ints) -> tuple[list[PromptChunk], list[int]]:
    """What `pack_chunks` was given."""
    count = int(numbers[0])
    heads = numbers[1 : 1 + _CHUNK_WORDS * count].reshape(-1, _CHUNK_WORDS)
    ends = np.cumsum(heads[:, 3])
    total = int(ends[-1])
    tokens, slots, feature_slots = np.split(numbers[1 + _CHUNK_WORDS * count :], [total, 2 * total])
    parts = zip(heads.tolist(), np.split(tokens, ends[:-1]), np.split(slots, ends[:-1]), strict=True)
    chunks = [PromptChunk(row, own, start, into, offset) for (row, start, offset, _), own, into in parts]
    return chunks, feature_slots.tolist()
