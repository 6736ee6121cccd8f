"""Exchanges between ranks that run at the same time: processes on one GPU or on two, and streams of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernels.exchange import CALLS, ExchangeCase, ExchangeVerdict, RankProcesses, check_streams

KINDS = ["one-shot", "two-shot", "join"]
WHERE = [pytest.param((0, 0), marks=pytest.mark.gpu), pytest.param((0, 1), marks=pytest.mark.multi_gpu)]


Devices = tuple[int, int]
Start = Callable[[Devices, float], RankProcesses]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts two processes on devices, which wait so many seconds for each other."""
    with ExitStack() as stack:
        yield lambda devices, timeout: stack.enter_context(closing(RankProcesses(devices, timeout)))


def case_of(kind: str, dtype: torch.dtype) -> ExchangeCase:
    return ExchangeCase(kind, 3, 4096 if kind == "join" else 1536, dtype)


def agree(verdicts: Sequence[ExchangeVerdict], repetitions: int) -> None:
    assert verdicts == [ExchangeVerdict(repetitions, 0, verdicts[0].norms)] * len(verdicts)


@pytest.mark.parametrize("devices", WHERE)
def test_processes_that_map_each_other_s_memory_get_the_same_bits(start: Start, devices: Devices) -> None:
    # Processes on one GPU take turns on it, a time slice each. Either may have to compile first.
    ranks, repetitions = start(devices, 60.0), CALLS if devices[0] == devices[1] else 100 * CALLS
    for kind in KINDS:
        for dtype in (torch.bfloat16, torch.float32):
            agree(ranks.ask("check", case_of(kind, dtype), repetitions), repetitions)


@pytest.mark.parametrize("devices", WHERE)
def test_a_rank_that_does_not_send_is_named_by_the_one_that_waits(start: Start, devices: Devices) -> None:
    assert start(devices, 1.0).ask("silent", case_of("one-shot", torch.bfloat16), 0) == [1, None]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_run_at_the_same_time_get_the_same_bits(kind: str, dtype: torch.dtype, world: int) -> None:
    agree(check_streams(case_of(kind, dtype), world, 20 * CALLS), 20 * CALLS)
