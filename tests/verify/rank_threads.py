"""Ranks of a model as threads of one process, which share memory as processes do."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_harness import make_paged_engine
from threaded_engine import ThreadedEngine

from outrider.host import rank_memory
from outrider.host.rank_memory import RankError, RankMemory
from outrider.layers.exchange import HostExchange
from outrider.models.base import LanguageModel
from outrider.models.decoder import CausalLM
from outrider.models.drafters.base import DraftModel
from outrider.models.loader import load_decoder
from verify_service.engine.rank_worker import follow_rounds
from verify_service.executors.cuda import CudaExecutor
from verify_service.executors.ranks import LeadingModel, RankLink, follow


class RankEnd(Exception):
    """A follower's end."""


Follow = Callable[[CausalLM, RankMemory], None]
Prepare = Callable[[CausalLM], None]
"""Done to a follower's part of the model before it follows."""


@contextmanager
def _parts(
    folder: Path, world: int, dtype: torch.dtype, prepare: Prepare | None, work: Follow
) -> Iterator[tuple[CausalLM, RankMemory]]:
    """Rank 0's part of the model in `folder`, while the other ranks `work`."""
    memory = RankMemory.create(world)
    ending = threading.Event()
    faults: list[BaseException] = []

    def run(part: CausalLM, mine: RankMemory) -> None:
        def check() -> None:
            if ending.is_set():
                raise RankEnd

        mine.check = check
        try:
            work(part, mine)
        except RankEnd:
            pass
        except BaseException as error:
            faults.append(error)

    memories = [memory, *(RankMemory(memory.descriptor, rank, world) for rank in range(1, world))]
    parts = [load_decoder(folder, dtype, exchange=HostExchange(mine)) for mine in memories]
    threads = [
        threading.Thread(target=run, args=pair, daemon=True) for pair in zip(parts[1:], memories[1:], strict=True)
    ]
    for part in parts[1:]:
        if prepare is not None:
            prepare(part)

    def check_threads() -> None:
        for rank, thread in enumerate(threads, 1):
            if not thread.is_alive():
                raise RankError(f"rank {rank} of {world} has ended")

    memory.check = check_threads
    for mine in memories:
        mine.started()
    with pytest.MonkeyPatch.context() as patch:
        # A rank that polls keeps the interpreter from the thread that it waits for.
        patch.setattr(rank_memory, "_SPIN_LOOKS", 0)
        patch.setattr(rank_memory, "_YIELD_SECONDS", 0.0)
        for thread in threads:
            thread.start()
        try:
            yield parts[0], memory
        finally:
            ending.set()
            for thread in threads:
                thread.join(30)
            os.close(memory.descriptor)
            assert not faults, faults


@contextmanager
def ranked(
    folder: Path, world: int, dtype: torch.dtype = torch.float32, prepare: Prepare | None = None
) -> Iterator[LanguageModel]:
    """Rank 0's view of a model whose ranks meet at the model, as on a CPU."""
    with _parts(folder, world, dtype, prepare, follow) as (part, memory):
        yield LeadingModel(part, memory)


@contextmanager
def linked(
    folder: Path,
    world: int,
    draft: Any = None,
    growth: Any = None,
    prepare: Prepare | None = None,
    part_of_draft: Callable[[CausalLM], DraftModel] | None = None,
    followers: list[CudaExecutor] | None = None,
    **options: Any,
) -> Iterator[ThreadedEngine]:
    """Rank 0's engine on a model whose ranks replay its rounds, as on GPUs; for `options` see make_paged_engine.

    `part_of_draft`: what a rank with its part of the model has of a draft model, in the place of `draft`, which is rank
    0's alone. `followers` get the other ranks' executors.
    """

    def own(part: CausalLM) -> DraftModel | None:
        return None if part_of_draft is None else part_of_draft(part)

    def replay(part: CausalLM, memory: RankMemory) -> None:
        _, executor = make_paged_engine(part, link=_link(part, memory), draft=own(part), **options)
        if followers is not None:
            followers.append(executor)
        follow_rounds(executor, memory)

    with _parts(folder, world, torch.float32, prepare, replay) as (part, memory):
        yield make_paged_engine(part, link=_link(part, memory), draft=draft or own(part), growth=growth, **options)[0]


def _link(part: CausalLM, memory: RankMemory) -> RankLink:
    assert part.exchange is not None
    return RankLink(memory, part.exchange)
