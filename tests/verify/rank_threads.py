"""Ranks of a model as threads of one process, which share memory as processes do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from outrider.host.rank_memory import RankMemory
from outrider.layers.exchange import HostExchange
from outrider.models.base import LanguageModel
from outrider.models.decoder import CausalLM
from outrider.models.loader import load_decoder
from verify_service.ranks.replay import follow, lead


class _End(Exception):
    """A follower's end."""


@contextmanager
def ranked(folder: Path, world: int, dtype: torch.dtype = torch.float32) -> Iterator[LanguageModel]:
    """Rank 0's view of the model in `folder`, while the other ranks follow."""
    memory = RankMemory.create(world)
    ending = threading.Event()
    faults: list[BaseException] = []

    def run(mine: RankMemory, part: CausalLM) -> None:
        def check() -> None:
            if ending.is_set():
                raise _End

        mine.check = check
        try:
            follow(part, mine)
        except _End:
            pass
        except BaseException as error:
            faults.append(error)

    memories = [memory, *(RankMemory(memory.descriptor, rank, world) for rank in range(1, world))]
    parts = [load_decoder(folder, dtype, exchange=HostExchange(mine)) for mine in memories]
    threads = [
        threading.Thread(target=run, args=pair, daemon=True) for pair in zip(memories[1:], parts[1:], strict=True)
    ]
    for thread in threads:
        thread.start()
    for mine in memories:
        mine.started()
    try:
        yield lead(parts[0], memory)
    finally:
        ending.set()
        for thread in threads:
            thread.join(30)
        memory.close()
        assert not faults, faults
