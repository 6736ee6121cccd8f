"""The verify service's door over real gRPC: streams, refusals, cancellation, draining."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from cuda_harness import make_paged_engine
from engine_thread import EngineThread, engine_thread
from harness import make_engine
from local_draft import LocalDraft, oracle

from outrider.errors import ContextLengthError, InvalidRequestError, OutriderError, OverloadedError, UnavailableError
from outrider.models.decoder import CausalLM
from outrider.rpc.channel import open_channel
from outrider.rpc.server import GrpcServer
from outrider.rpc.status import error_from_rpc
from outrider.sampling.sampler import RequestSampler
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from verify_service.door.admission import Admission
from verify_service.door.servicer import VerifyServicer
from verify_service.main import drain

VOCAB = 61
Message = verify_pb2.VerifyServiceGenerateRequest


@dataclass
class Door:
    engine: EngineThread
    servicer: VerifyServicer
    server: GrpcServer
    stub: verify_pb2_grpc.VerifyServiceStub

    async def generate(self, message: Message) -> list[verify_pb2.VerifyServiceGenerateResponse]:
        return [response async for response in self.stub.Generate(message)]

    async def refused(self, message: Message) -> OutriderError:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.generate(message)
        return error_from_rpc(raised.value)

    async def idle(self) -> None:
        """Wait until no request holds a page that is not the radix cache's."""
        empty = asyncio.Event()
        loop = asyncio.get_running_loop()

        def look() -> None:
            memory, scheduler = self.engine.engine.memory, self.engine.engine.scheduler
            if not scheduler.running and memory.num_used == memory.radix.num_pages:
                loop.call_soon_threadsafe(empty.set)
            else:
                self.engine.ask(look)

        self.engine.ask(look)
        await asyncio.wait_for(empty.wait(), 20)


@asynccontextmanager
async def open_door(model: CausalLM, folder: Path, paged: bool = False, **limits: int) -> AsyncIterator[Door]:
    made = make_paged_engine(model, **limits)[0] if paged else make_engine(model, **limits)
    async with engine_thread(made) as engine:
        admission = Admission(VOCAB, 200, (60,), True)
        info = verify_pb2.VerifyServiceGetInfoResponse(model="tiny", vocab_size=VOCAB, context_length=200)
        servicer = VerifyServicer(engine.remote, admission, info, verify_pb2.VerifyServiceGetLoadResponse)
        server = GrpcServer(address=f"unix:{folder}/v", service_names=["outrider.v1.VerifyService"])
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server.grpc)
        channel = open_channel(await server.start())
        try:
            yield Door(engine, servicer, server, verify_pb2_grpc.VerifyServiceStub(channel))
        finally:
            await channel.close()
            await server.stop(0)


def message(**fields: object) -> Message:
    values: dict[str, object] = {"request_id": "r", "prompt_token_ids": [1, 2, 3], "max_tokens": 8, "ignore_eos": True}
    return Message(**(values | fields))  # type: ignore[arg-type]


async def test_a_stream_carries_every_token_once_and_ends_with_a_reason(model: CausalLM, tmp_path: Path) -> None:
    async with open_door(model, tmp_path) as door:
        greedy = common_pb2.SamplingParams(temperature=0, num_logprobs=2)
        responses = await door.generate(message(sampling=greedy))
        tokens = [token for response in responses for token in response.token_ids]
        assert len(tokens) == 8
        assert sum(len(response.origins) for response in responses) == 8
        assert all(len(entry.top) == 2 for response in responses for entry in response.logprobs)
        assert responses[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert all(response.finish_reason == 0 for response in responses[:-1])
        stopped = await door.generate(message(sampling=greedy, stop_token_ids=[tokens[4]]))
        got = [token for response in stopped for token in response.token_ids]
        assert got == tokens[: tokens.index(tokens[4]) + 1]
        assert stopped[-1].finish_reason == common_pb2.FINISH_REASON_STOP


async def test_what_was_accepted_before_unusable_logits_is_told_first(
    model: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, asked = RequestSampler.sample, message(sampling=common_pb2.SamplingParams(seed=1), max_tokens=16)

    def sample(self: RequestSampler, row: torch.Tensor, path: Sequence[int], position: int, *rest: Any) -> int:
        return sound(self, row * torch.nan if position == 9 else row, path, position, *rest)

    async with open_door(model, tmp_path) as door:
        text = [1, 2, 3, *(token for response in await door.generate(asked) for token in response.token_ids)]
        engine = door.engine.engine
        door.engine.ask(lambda: engine.draft_connected(LocalDraft(engine, VOCAB, oracle({(1, 2, 3): text}, VOCAB))))
        monkeypatch.setattr(RequestSampler, "sample", sample)
        responses = []
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for response in door.stub.Generate(asked):
                responses.append(response)
        assert error_from_rpc(raised.value).code == "unusable_logits"
        assert [token for response in responses for token in response.token_ids] == text[3:9]
        assert any(counts.num_accepted_tokens for counts in responses[-1].rounds)
        # An answer that is complete before them does not meet them without a draft, either.
        asked.stop_token_ids.append(text[8])
        stopped = await door.generate(asked)
        assert stopped[-1].finish_reason == common_pb2.FINISH_REASON_STOP
        await door.idle()


async def test_without_a_seed_answers_differ_and_with_one_they_do_not(model: CausalLM, tmp_path: Path) -> None:
    async with open_door(model, tmp_path) as door:

        async def text(**sampling: object) -> list[int]:
            params = common_pb2.SamplingParams(**sampling)  # type: ignore[arg-type]
            responses = await door.generate(message(sampling=params, max_tokens=30))
            return [token for response in responses for token in response.token_ids]

        assert await text(seed=5) == await text(seed=5)
        assert await text() != await text()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [VOCAB]}, "prompt_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
        ({"sampling": common_pb2.SamplingParams(temperature=-1)}, "sampling.temperature"),
        ({"sampling": common_pb2.SamplingParams(temperature=float("nan"))}, "sampling.temperature"),
        ({"sampling": common_pb2.SamplingParams(top_p=0)}, "sampling.top_p"),
        ({"sampling": common_pb2.SamplingParams(min_p=1.5)}, "sampling.min_p"),
        ({"sampling": common_pb2.SamplingParams(repetition_penalty=1e-300)}, "sampling.repetition_penalty"),
        ({"sampling": common_pb2.SamplingParams(num_logprobs=21)}, "sampling.num_logprobs"),
        ({"sampling": common_pb2.SamplingParams(logit_bias={VOCAB: 1.0})}, "sampling.logit_bias"),
        ({"sampling": common_pb2.SamplingParams(logit_bias={1: 101.0})}, "sampling.logit_bias"),
    ],
)
async def test_bad_fields_are_named_and_harm_nobody(
    model: CausalLM, tmp_path: Path, fields: dict[str, object], field: str
) -> None:
    async with open_door(model, tmp_path) as door:
        good = asyncio.create_task(door.generate(message(max_tokens=60)))
        error = await door.refused(message(**fields))
        assert isinstance(error, InvalidRequestError) and error.field == field
        assert sum(len(response.token_ids) for response in await good) == 60


async def test_a_prompt_over_the_context_is_a_context_error(model: CausalLM, tmp_path: Path) -> None:
    async with open_door(model, tmp_path) as door:
        error = await door.refused(message(prompt_token_ids=[1] * 200))
        assert isinstance(error, ContextLengthError) and "199" in error.message
        cut = await door.generate(message(prompt_token_ids=[1] * 195, max_tokens=100))
        assert sum(len(response.token_ids) for response in cut) == 5


async def test_min_tokens_end_with_the_context_as_max_tokens_do(model: CausalLM, tmp_path: Path) -> None:
    async with open_door(model, tmp_path, paged=True) as door:
        responses = await door.generate(message(prompt_token_ids=[1] * 190, max_tokens=2**32 - 1, min_tokens=2**32 - 1))
        assert sum(len(response.token_ids) for response in responses) == 10
        assert responses[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_cancelling_frees_pages_at_once(model: CausalLM, tmp_path: Path) -> None:
    async with open_door(model, tmp_path) as door:
        call = door.stub.Generate(message(max_tokens=150))
        assert await call.read() is not grpc.aio.EOF
        call.cancel()
        await door.idle()


async def test_a_full_queue_refuses_and_the_others_finish(model: CausalLM, tmp_path: Path) -> None:
    async with open_door(model, tmp_path, max_running=1, max_waiting=1) as door:
        may_run = threading.Event()
        door.engine.ask(lambda: may_run.wait(20) and None)  # lest one finish before all have come
        calls = [asyncio.create_task(door.generate(message(max_tokens=20))) for _ in range(3)]
        done, served = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        may_run.set()
        (refused,) = (call.exception() for call in done)
        assert isinstance(refused, grpc.aio.AioRpcError) and isinstance(error_from_rpc(refused), OverloadedError)
        for responses in await asyncio.gather(*served):
            assert responses[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_a_draining_service_refuses_and_finishes_what_runs(model: CausalLM, tmp_path: Path) -> None:
    async with open_door(model, tmp_path) as door:
        call = door.stub.Generate(message(max_tokens=150))
        first = await call.read()
        door.servicer.draining = True
        assert isinstance(await door.refused(message()), UnavailableError)
        count = len(first.token_ids)
        while (response := await call.read()) is not grpc.aio.EOF:
            count += len(response.token_ids)
        assert count == 150


async def test_a_draining_service_closes_when_its_callers_have_the_ends_of_their_answers(
    model: CausalLM, tmp_path: Path
) -> None:
    async with open_door(model, tmp_path) as door:
        call = door.stub.Generate(message(max_tokens=50))
        response = await call.read()
        door.servicer.draining = True
        while response.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED:
            response = await call.read()
        end = asyncio.ensure_future(call.read())
        await door.stub.GetLoad(verify_pb2.VerifyServiceGetLoadRequest())
        assert not end.done()  # the status would have come before this answer
        call.cancel()
        await asyncio.wait_for(door.server.stop(60), 20)
        await asyncio.gather(end, return_exceptions=True)


async def test_what_is_not_done_when_the_time_to_drain_is_over_is_told_so(
    model: CausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with open_door(model, tmp_path) as door:
        calls = [door.stub.Generate(message(max_tokens=150, request_id=f"r{number}")) for number in range(2)]
        for call in calls:
            await call.read()
        held = threading.Event()

        def hold() -> None:
            held.wait()

        door.engine.ask(hold)
        try:
            await asyncio.wait_for(drain(door.server, door.engine.remote, 0.1), 20)
        finally:
            held.set()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                while await call.read() is not grpc.aio.EOF:
                    pass
            decoded = error_from_rpc(raised.value)
            assert isinstance(decoded, UnavailableError) and decoded.code == "draining"
    assert "draining for at most 0.1 s; requests: 2" in caplog.text
    assert "the drain time is over; requests cancelled: 2" in caplog.text


async def test_an_engine_that_fails_tells_every_stream(model: CausalLM, tmp_path: Path) -> None:
    async with open_door(model, tmp_path) as door:
        call = door.stub.Generate(message(max_tokens=150))
        assert await call.read() is not grpc.aio.EOF

        def fail() -> None:
            raise RuntimeError("out of order")

        door.engine.ask(fail)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "out of order" not in (raised.value.details() or "")
        await asyncio.wait_for(door.engine.remote.lost(), 20)
        assert not door.engine.remote.alive
