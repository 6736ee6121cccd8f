"""Ranks' memory: messages of any size, exchanges of any size, and who is late is named."""

from __future__ import annotations

import platform
import random
import threading

import numpy as np
import pytest
import torch

from outrider.errors import ConfigError
from outrider.host.rank_memory import BOX_BYTES, RING_BYTES, RankError, RankMemory
from outrider.layers.exchange import HostExchange


@pytest.fixture
def memories() -> list[RankMemory]:
    first = RankMemory.create(3, seconds=0.2)
    return [first, *(RankMemory(first.descriptor, rank, 3, seconds=0.2) for rank in (1, 2))]


def test_messages_arrive_whole_and_in_order(memories: list[RankMemory]) -> None:
    source = random.Random(1)
    sizes = [0, 1, 3, 70_000, RING_BYTES - 8, 3 * RING_BYTES + 5, *(source.randrange(5000) for _ in range(2000))]
    sent = [(number, source.randbytes(size)) for number, size in enumerate(sizes)]
    read: dict[int, list[tuple[int, bytes]]] = {1: [], 2: []}

    def follow(memory: RankMemory) -> None:
        for _ in sent:
            read[memory.rank].append(memory.receive())

    threads = [threading.Thread(target=follow, args=(memory,)) for memory in memories[1:]]
    for thread in threads:
        thread.start()
    for kind, body in sent:
        memories[0].send(kind, body)
    for thread in threads:
        thread.join(60)
    assert read[1] == sent and read[2] == sent
    assert not memories[0].is_behind(1)


def on_all(memories: list[RankMemory], work: object) -> list[object]:
    found: dict[int, object] = {}

    def run(memory: RankMemory) -> None:
        found[memory.rank] = work(memory)  # type: ignore[operator]

    threads = [threading.Thread(target=run, args=(memory,)) for memory in memories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[memory.rank] for memory in memories]


def test_all_ranks_get_what_all_ranks_gave(memories: list[RankMemory]) -> None:
    texts = [b"", b"x" * 5, bytes(range(256)) * (BOX_BYTES // 100)]
    assert on_all(memories, lambda memory: memory.trade(texts[memory.rank])) == [texts] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_taken_in_the_order_of_ranks_and_rounded_once(memories: list[RankMemory], dtype: torch.dtype) -> None:
    # More rows than a box holds, of numbers whose sum depends on the order.
    shape = (BOX_BYTES // 2048 + 3, 1024)
    generator = torch.Generator().manual_seed(0)
    parts = [(torch.randn(shape, generator=generator) * 10**rank).to(dtype) for rank in range(3)]
    stream = torch.randn(shape, generator=generator).to(dtype)
    total = parts[0].float() + parts[1].float() + parts[2].float()

    def work(memory: RankMemory) -> list[torch.Tensor]:
        exchange, part = HostExchange(memory), parts[memory.rank]
        return [exchange.total(part), exchange.add(stream, part), exchange.join(part.float())]

    for found in on_all(memories, work):
        assert torch.equal(found[0], total.to(dtype))  # type: ignore[index]
        assert torch.equal(found[1], (total + stream.float()).to(dtype))  # type: ignore[index]
        assert torch.equal(found[2], torch.cat(parts, 1).float())  # type: ignore[index]


def test_a_rank_that_does_not_come_is_named(memories: list[RankMemory]) -> None:
    for memory in memories:
        memory.started()

    def work(memory: RankMemory) -> object:
        if memory.rank == 2:
            return None
        with pytest.raises(RankError, match=r"rank 2 of 3 did not answer within 0\.2 s"):
            memory.swap(np.zeros(4, np.uint8))
        return None

    on_all(memories, work)


def test_a_rank_that_does_not_read_is_named(memories: list[RankMemory]) -> None:
    for memory in memories:
        memory.started()

    def read() -> None:
        assert memories[1].receive() == (1, b"both")
        # What is never written in full.
        with pytest.raises(RankError, match="rank 0 of 3"):
            memories[1].receive()

    reader = threading.Thread(target=read)
    reader.start()
    memories[0].send(1, b"both")
    with pytest.raises(RankError, match="rank 2 of 3"):
        memories[0].send(1, bytes(2 * RING_BYTES))
    assert memories[0].is_behind(2)
    reader.join(30)


def test_last_words_are_there_for_rank_0(memories: list[RankMemory]) -> None:
    assert memories[0].failure_of(2) == ""
    memories[2].record_failure("no memory for the weights: 1 GiB are free" + "!" * 5000)
    assert memories[0].failure_of(2).startswith("no memory for the weights")
    assert memories[0].failure_of(1) == ""


def test_processors_that_may_show_writes_in_another_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size: .* this is aarch64; leave it at 1"):
        RankMemory.create(2)
