"""Too much work: what waits is bounded, who comes first is defined, and who gives way is, too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from fake_device import VOCAB, FakeDevice, count_up, fake_engine
from harness import Answer, make_request
from threaded_engine import ThreadedEngine

from outrider.errors import OverloadedError
from outrider.protocol.generation import FinishReason, GenerationRequest, GenerationUpdate, TokenLogprobs
from outrider.rpc.channel import open_channel
from outrider.rpc.server import GrpcServer
from outrider.rpc.status import error_from_rpc
from outrider.sampling.params import SamplingParams
from outrider.v1 import verify_pb2, verify_pb2_grpc
from verify_service.door.admission import Admission
from verify_service.door.remote import Backlog
from verify_service.door.servicer import Outbox, VerifyServicer


def submit(
    engine: ThreadedEngine, *, client: str = "", priority: int = 0, prompt_len: int = 3, max_tokens: int = 4
) -> Answer:
    answer = Answer()
    prompt = [count_up(position) for position in range(prompt_len)]
    greedy = SamplingParams(temperature=0.0)
    # Equal prompts are as much work as different ones.
    fields = {"client": client, "priority": priority, "skip_prefix_cache": True}
    request = make_request(answer, prompt, greedy, VOCAB, max_tokens, **fields)
    answer.request = request
    engine.submit(request)
    return answer


def run(engine: ThreadedEngine, *answers: Answer) -> None:
    engine.start()
    assert all(answer.done.wait(10) for answer in answers)
    engine.stop()


def first_rounds(device: FakeDevice, answers: list[Answer]) -> list[int]:
    """The answers in the order in which they first took part in a round."""
    seen: list[object] = []
    for entries in device.rounds:
        seen += [request for request, _, _ in entries if request not in seen]
    return [[answer.request for answer in answers].index(request) for request in seen]  # type: ignore[arg-type]


def test_a_lower_number_is_served_earlier_whoever_came_first() -> None:
    device = FakeDevice()
    engine = fake_engine(device, max_running=1)
    answers = [submit(engine, priority=priority) for priority in (5, 0, -3, 0)]
    run(engine, *answers)
    assert first_rounds(device, answers) == [2, 1, 3, 0]


def test_clients_take_turns_for_the_places_of_a_round() -> None:
    device = FakeDevice()
    engine = fake_engine(device, max_running=1)
    answers = [submit(engine, client="flood/0") for _ in range(6)] + [submit(engine, client="other/0")]
    run(engine, *answers)
    assert first_rounds(device, answers)[:3] == [0, 6, 1]


def chunks(device: FakeDevice, answers: list[Answer]) -> list[int]:
    """The answers whose prompts the rounds computed, in order, without roots alone."""
    extends = [(request, extend) for entries in device.rounds for request, extend, _ in entries]
    requests = [answer.request for answer in answers]
    return [requests.index(request) for request, extend in extends if extend > 1]


@pytest.mark.parametrize("root_apart", [False, True])
def test_a_short_prompt_does_not_wait_for_long_ones_that_came_before_it(root_apart: bool) -> None:
    device = FakeDevice()
    engine = fake_engine(device, chunk_size=4, root_apart=root_apart)
    answers = [submit(engine, prompt_len=41) for _ in range(3)] + [submit(engine, prompt_len=4)]
    run(engine, *answers)
    assert chunks(device, answers)[0] == 3


def test_a_long_prompt_gets_every_second_chunk_beside_any_number_of_short_ones() -> None:
    device = FakeDevice()
    engine = fake_engine(device, chunk_size=4)
    answers = [submit(engine, prompt_len=40)] + [submit(engine, prompt_len=4) for _ in range(12)]
    run(engine, *answers)
    assert chunks(device, answers)[:12] == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0]


def test_clients_take_turns_with_long_prompts() -> None:
    device = FakeDevice()
    engine = fake_engine(device, chunk_size=4)
    answers = [submit(engine, client="flood/0", prompt_len=20) for _ in range(4)]
    answers.append(submit(engine, client="other/0", prompt_len=20))
    run(engine, *answers)
    assert chunks(device, answers)[:15] == [0] * 5 + [4] * 5 + [1] * 5


def test_the_prompt_of_a_lower_number_is_computed_earlier_whoever_came_first_and_however_long_it_is() -> None:
    device = FakeDevice()
    engine = fake_engine(device, chunk_size=4)
    answers = [submit(engine, prompt_len=4), submit(engine, prompt_len=12, priority=-1)]
    run(engine, *answers)
    assert chunks(device, answers) == [1, 1, 1, 0]


@pytest.mark.parametrize(("priorities", "loser"), [((0, 0), 1), ((7, 0), 0), ((0, -7), 0), ((0, 7), 1)])
def test_when_memory_runs_out_the_least_urgent_gives_way_and_resumes(priorities: tuple[int, int], loser: int) -> None:
    device = FakeDevice()
    engine = fake_engine(device, num_pages=9, keep_prefixes=False, max_nodes=0)
    answers = [submit(engine, priority=priority, prompt_len=6, max_tokens=16) for priority in priorities]
    preempted: list[int] = []
    forget = engine.scheduler._preempt

    def note(request: object) -> None:
        preempted.append([answer.request for answer in answers].index(request))  # type: ignore[arg-type]
        forget(request)  # type: ignore[arg-type]

    engine.scheduler._preempt = note  # type: ignore[assignment, method-assign]
    run(engine, *answers)
    assert preempted and set(preempted) == {loser}
    for answer in answers:
        assert answer.token_ids == [count_up(position) for position in range(6, 22)], "nothing is lost or repeated"


def backlog(**clock: float) -> Backlog:
    made = Backlog(lambda: clock.get("now", 0.0))
    made.open(max_running=2, max_waiting=1)
    return made


def test_more_requests_than_places_are_refused_until_one_ends() -> None:
    queue = backlog()
    for number in range(3):
        queue.admit(number, 10)
    with pytest.raises(OverloadedError, match="1 request is waiting already") as caught:
        queue.admit(3, 10)
    assert caught.value.retry_after >= 1 and queue.refused == {"requests": 1}
    queue.ended(1)
    queue.admit(3, 10)


def test_prompt_tokens_that_wait_are_bounded_but_one_prompt_alone_may_be_long() -> None:
    queue = backlog()
    queue.max_tokens = 100
    queue.admit(1, 5000)
    with pytest.raises(OverloadedError, match="5000 prompt tokens are waiting already, 1 more would exceed"):
        queue.admit(2, 1)
    queue.began(1)
    assert queue.num_tokens == 0
    queue.admit(2, 60)
    with pytest.raises(OverloadedError):
        queue.admit(3, 41)
    queue.ended(2)
    queue.ended(2)
    assert queue.num_tokens == 0 and queue.refused == {"tokens": 2}


def test_retry_after_follows_how_fast_requests_end_within_bounds() -> None:
    now = 0.0
    queue = Backlog(lambda: now)
    queue.open(2, 0)
    queue.admit(0, 1)
    for seconds, low, high in ((0.01, 1, 1), (10, 5, 10), (1000, 30, 30)):
        for number in range(1, 21):
            now += seconds
            queue.admit(number, 1)
            with pytest.raises(OverloadedError) as caught:
                queue.admit(99, 1)
            queue.ended(number)
        assert low <= caught.value.retry_after <= high


def test_retry_after_does_not_count_time_without_requests() -> None:
    now = 0.0
    queue = Backlog(lambda: now)
    queue.open(1, 0)
    for number in range(3):
        now += 3600
        queue.admit(number, 1)
        now += 0.01
        with pytest.raises(OverloadedError) as caught:
            queue.admit(99, 1)
        queue.ended(number)
    assert caught.value.retry_after == 1


async def forever() -> None:
    await asyncio.Event().wait()


async def nothing() -> None:
    return


@pytest.mark.parametrize("write", [forever, nothing])
async def test_a_reader_that_falls_behind_is_told_so_and_nothing_more_is_kept(
    write: Callable[[], Awaitable[None]],
) -> None:
    outbox = Outbox(stall_seconds=3600, max_weight=1000)
    outbox.put(GenerationUpdate(token_ids=[1]))
    assert [update.token_ids for update in await outbox.take()] == [[1]]
    writing = asyncio.create_task(outbox.write(write))
    await asyncio.sleep(0)
    for _ in range(100):
        outbox.put(GenerationUpdate(token_ids=[1], logprobs=[TokenLogprobs(-1.0, ((1, -1.0),) * 20)]))
    assert outbox.overflowed and not outbox._updates
    with pytest.raises(OverloadedError, match="too much of the stream was not read") as caught:
        await writing
        await outbox.take()
    assert caught.value.code == "slow_reader"


async def test_a_write_that_never_ends_is_given_up() -> None:
    outbox = Outbox(stall_seconds=0.01)
    with pytest.raises(OverloadedError, match=r"the stream was not read for 0\.01 s"):
        await outbox.write(forever)


async def test_updates_gather_until_the_next_message_may_go() -> None:
    outbox = Outbox(stall_seconds=10)
    outbox.put(GenerationUpdate(token_ids=[1]))
    assert [update.token_ids for update in await outbox.take(interval=0.3)] == [[1]]
    outbox.put(GenerationUpdate(token_ids=[2]))
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.put(GenerationUpdate(token_ids=[3]))
    assert [update.token_ids for update in await taking] == [[2], [3]]


async def test_what_gathers_is_sent_in_messages_of_bounded_size_and_in_order() -> None:
    outbox = Outbox(stall_seconds=10)
    for number in range(40_000):
        outbox.put(GenerationUpdate(token_ids=[number]))
    outbox.put(GenerationUpdate(token_ids=[-1], finish_reason=FinishReason.STOP))
    taken = []
    while not taken or not taken[-1][-1].last:
        taken.append(list(await outbox.take()))
    assert [update.token_ids[0] for part in taken for update in part] == [*range(40_000), -1]
    assert max(map(len, taken)) < 20_000 and not outbox.overflowed


class Flood:
    """Stands for an engine: once it is let go on, sends more of one answer than anybody could read, and fast."""

    def __init__(self) -> None:
        self.num_running = 1
        self.goes_on = asyncio.Event()
        self.backlog = Backlog()
        self.cancelled = asyncio.Event()

    def submit(self, request: GenerationRequest, deliver: Callable[[GenerationUpdate], None]) -> int:
        self.task = asyncio.create_task(self._talk(deliver))
        return 1

    async def _talk(self, deliver: Callable[[GenerationUpdate], None]) -> None:
        while not self.cancelled.is_set():
            deliver(GenerationUpdate(token_ids=[1] * 50, logprobs=[TokenLogprobs(-1.0, ((1, -1.0),) * 20)] * 50))
            await asyncio.sleep(0)
            await self.goes_on.wait()

    def cancel(self, number: int) -> None:
        self.cancelled.set()


@pytest.mark.parametrize("reads_first", [True, False])
async def test_over_grpc_an_unread_answer_is_ended_and_leaves_the_engine(tmp_path: Path, reads_first: bool) -> None:
    engine = Flood()
    load, info = verify_pb2.VerifyServiceGetLoadResponse, verify_pb2.VerifyServiceGetInfoResponse()
    servicer = VerifyServicer(engine, Admission(VOCAB, 200, (), False), info, load, stall_seconds=3600)  # type: ignore[arg-type]
    server = GrpcServer(address=f"unix:{tmp_path}/v", service_names=["outrider.v1.VerifyService"])
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server.grpc)
    try:
        async with open_channel(await server.start()) as channel:
            request = verify_pb2.VerifyServiceGenerateRequest(prompt_token_ids=[1], max_tokens=10)
            call = verify_pb2_grpc.VerifyServiceStub(channel).Generate(request)
            if reads_first:
                await call.read()
            engine.goes_on.set()
            await asyncio.wait_for(engine.cancelled.wait(), 60)
            await engine.task
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            decoded = error_from_rpc(caught.value)
            assert isinstance(decoded, OverloadedError) and decoded.code == "slow_reader"
        assert engine.backlog.slow_readers == 1
    finally:
        await server.stop(0)
