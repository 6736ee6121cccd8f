"""How executors on GPUs keep in step: rank 0 tells the others what it launches, and the rest is in the graphs.

A round's tokens are shared on the devices, at the head of its graph, and what it commits behind its sampling: so the
other ranks need no sampling tables and no masks, and whatever rank 0 does to a round they do, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.host.rank_memory import RankError, RankMemory
from outrider.layers.exchange import Exchange

ROUND, CAPTURE, PROMPTS, CAPTURE_SMALL, PAGES, LOGITS = range(1, 7)
"""Kinds of messages, all of int32: a bucket; several; a shape of prompts and its description; whether with graphs; a
row, a place and the pages from there on; the first row of the last prompts, and how many."""
DRAFT_CAPTURE, DRAFT_ROW, DRAFT_CUT, DRAFT_CONTEXT, DRAFT_GROW = DRAFTING = range(7, 12)
"""The same of what a drafter does that is cut over ranks: see RankedDrafter."""


class RankLink:
    """One rank's link to the others."""

    def __init__(self, memory: RankMemory, exchange: Exchange) -> None:
        self._memory = memory
        self._exchange = exchange
        self.leads = memory.rank == 0

    def tell(self, kind: int, numbers: Sequence[int] | NDArray[np.int32]) -> None:
        """As rank 0, tell the others to do what it does now."""
        if self.leads:
            self._memory.send(kind, np.asarray(numbers, np.int32).tobytes())

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return min(int(text) for text in self._memory.trade(b"%d" % number))

    def share(self, parts: Sequence[Tensor]) -> None:
        """See Exchange; may be captured."""
        self._exchange.share(parts)

    def check(self) -> None:
        """Raise RankError if the ranks cannot go on, or what a finished round brought is worthless."""
        if self._memory.fault:
            raise RankError(self._memory.fault)
        if (rank := self._exchange.silent_rank()) is not None:
            raise RankError(f"rank {rank} of {self._memory.world} did not answer in a round")

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Meanwhile each rank runs what it likes, to compile it; then all are awaited."""
        with self._exchange.alone():
            yield
        self._memory.trade(b"compiled")
