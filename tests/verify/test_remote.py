"""The engine behind its socket does what it does without: tokens, refusals, drafts, figures, ends."""

from __future__ import annotations

import asyncio
import threading

import pytest
from engine_thread import EngineThread, engine_thread
from feature_draft import ProjectedDraft, random_projection
from harness import make_engine, run_all
from local_draft import LocalDraft, oracle

from outrider.errors import OutriderError, OverloadedError, UnavailableError
from outrider.models.decoder import CausalLM
from outrider.protocol.generation import FinishReason, GenerationRequest, GenerationUpdate
from outrider.protocol.speculation import (
    MAX_FEATURE_BYTES,
    Decline,
    DeclineReason,
    DraftMessage,
    FeaturesBegin,
    Grow,
    Hello,
    ProjectionPart,
    VerifyMessage,
)
from outrider.sampling.params import SamplingParams
from outrider.tree.handshake import Projection
from verify_service.door.remote import MAX_UNREAD_DRAFT_WEIGHT, RemoteVerifyEngine
from verify_service.frames import FeatureStreamAccepted, FeatureStreamReleased, ProjectionFrame

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=2**63 + 1, num_logprobs=2),
    SamplingParams(temperature=0.7, seed=5, frequency_penalty=0.5, logit_bias={3: 1.0}),
]


@pytest.fixture(scope="module")
def wanted(model: CausalLM) -> list[list[int]]:
    engine = make_engine(model)
    engine.start()
    try:
        return [
            answer.token_ids
            for answer in run_all(engine, list(zip(PROMPTS, PARAMS, strict=True)), speculate=False, max_tokens=24)
        ]
    finally:
        engine.stop()


def submission(prompt: list[int], params: SamplingParams = PARAMS[0], max_tokens: int = 24) -> GenerationRequest:
    return GenerationRequest("r", prompt, params, max_tokens)


class Stream:
    """Updates of one request."""

    def __init__(self, thread: EngineThread, asked: GenerationRequest) -> None:
        self.updates: list[GenerationUpdate] = []
        self._done = asyncio.Event()
        self.number = thread.remote.submit(asked, self._take)

    def _take(self, update: GenerationUpdate) -> None:
        self.updates.append(update)
        if update.last:
            self._done.set()

    async def end(self) -> GenerationUpdate:
        await asyncio.wait_for(self._done.wait(), 20)
        return self.updates[-1]

    async def token_ids(self) -> list[int]:
        await self.end()
        return [token for update in self.updates for token in update.token_ids]


class Silent:
    """A draft that answers nothing by itself."""

    address = "silent"

    def __init__(self) -> None:
        self.num_resets = 0
        self.sent: list[VerifyMessage] = []

    def send(self, messages: list[VerifyMessage]) -> None:
        self.sent += messages

    def reset(self) -> None:
        self.num_resets += 1


def flood(num_nodes: int) -> list[DraftMessage]:
    nodes = [0] * num_nodes
    return [Grow(1, 1, 1, 1, 1, nodes, nodes, [0.0] * num_nodes, bytes(num_nodes))]


async def test_tokens_are_those_of_the_engine_alone(model: CausalLM, wanted: list[list[int]]) -> None:
    async with engine_thread(make_engine(model)) as thread:
        streams = [Stream(thread, submission(*job)) for job in zip(PROMPTS, PARAMS, strict=True)]
        assert [await stream.token_ids() for stream in streams] == wanted
        assert [update.finish_reason for update in streams[1].updates if update.last] == [FinishReason.LENGTH]
        assert sum(len(update.logprobs) for update in streams[1].updates) == 24


async def test_drafts_reach_the_engine_and_change_no_token(model: CausalLM, wanted: list[list[int]]) -> None:
    texts = {tuple(prompt): prompt + tokens for prompt, tokens in zip(PROMPTS, wanted, strict=True)}
    async with engine_thread(make_engine(model)) as thread:
        draft = LocalDraft(thread.remote, 61, oracle(texts, 61))  # type: ignore[arg-type]
        thread.remote.draft_connected(draft)
        accepted = 0
        # The first answers may be over before the draft's first word is here.
        for _ in range(20):
            streams = [Stream(thread, submission(*job)) for job in zip(PROMPTS, PARAMS, strict=True)]
            assert [await stream.token_ids() for stream in streams] == wanted
            accepted += sum(update.num_accepted_tokens for stream in streams for update in stream.updates)
        assert accepted > 0
        assert sum(sum(report.accepted) for report in thread.remote.rounds) == accepted
        thread.remote.draft_disconnected(draft)
        assert await Stream(thread, submission(PROMPTS[0])).token_ids() == wanted[0]
        assert draft.num_resets == 0


async def test_rounds_and_state_are_reported(model: CausalLM) -> None:
    async with engine_thread(make_engine(model)) as thread:
        remote = thread.remote
        await remote.until(lambda: remote.snapshot.num_pages == 256)
        assert await Stream(thread, submission(PROMPTS[1])).token_ids()
        await remote.until(lambda: sum(sum(report.committed) for report in remote.rounds) == 24)
        assert sum(report.num_prefilled for report in remote.rounds) == 4
        assert all(report.figures.seconds > 0 and report.num_failed == 0 for report in remote.rounds)
        assert remote.snapshot.cost
        await remote.until(lambda: remote.snapshot.num_pages_used > 0 and not remote.snapshot.num_running)
        assert remote.num_running == remote.num_waiting == 0


async def test_a_cancelled_request_is_unfinished_until_the_engine_has_ended_it(model: CausalLM) -> None:
    async with engine_thread(make_engine(model, max_running=1, max_waiting=0)) as thread:
        may_run = threading.Event()
        thread.ask(lambda: may_run.wait(20) and None)
        stream = Stream(thread, submission(PROMPTS[0], max_tokens=200))
        thread.remote.cancel(stream.number)
        with pytest.raises(OverloadedError, match="0 requests are waiting"):
            Stream(thread, submission(PROMPTS[0]))
        may_run.set()
        await thread.remote.until(lambda: thread.remote.num_waiting + thread.remote.num_running == 0)
        assert not any(update.last for update in stream.updates)
        assert len(await Stream(thread, submission(PROMPTS[0])).token_ids()) == 24


async def test_cancelling_what_has_ended_does_nothing(model: CausalLM) -> None:
    async with engine_thread(make_engine(model)) as thread:
        stream = Stream(thread, submission(PROMPTS[0]))
        await stream.end()
        thread.remote.cancel(stream.number)
        assert len(await Stream(thread, submission(PROMPTS[0])).token_ids()) == 24


async def test_stopping_tells_everybody_and_refuses_the_next(model: CausalLM) -> None:
    async with engine_thread(make_engine(model, max_running=1)) as thread:
        streams = [Stream(thread, submission(PROMPTS[0], max_tokens=200)) for _ in range(3)]
        await thread.remote.until(lambda: bool(streams[0].updates))
        thread.remote.stop()
        for stream in streams:
            assert isinstance((await stream.end()).error, UnavailableError)
        with pytest.raises(UnavailableError):
            Stream(thread, submission(PROMPTS[0]))
        await asyncio.wait_for(thread.remote.lost(), 20)
    assert thread.exit_codes == [0]


async def test_a_failing_engine_tells_everybody_and_ends_with_another_code(model: CausalLM) -> None:
    def fail() -> None:
        raise RuntimeError("out of order")

    async with engine_thread(make_engine(model)) as thread:
        stream = Stream(thread, submission(PROMPTS[0], max_tokens=200))
        await thread.remote.until(lambda: bool(stream.updates))
        thread.ask(fail)
        error = (await stream.end()).error
        assert isinstance(error, UnavailableError) and "out of order" not in error.message
        await asyncio.wait_for(thread.remote.lost(), 20)
        assert not thread.remote.alive
    assert thread.exit_codes == [1]


async def test_an_engine_that_hangs_up_without_a_word_fails_all_streams(model: CausalLM) -> None:
    async with engine_thread(make_engine(model)) as thread:
        may_run = threading.Event()
        thread.ask(lambda: may_run.wait(20) and None)
        stream = Stream(thread, submission(PROMPTS[0]))
        assert thread.remote._transport is not None
        thread.remote._transport.abort()
        error = (await stream.end()).error
        assert isinstance(error, UnavailableError)
        with pytest.raises(OutriderError):
            Stream(thread, submission(PROMPTS[0]))
        may_run.set()


async def test_a_draft_that_floods_loses_its_session_and_nothing_gathers(model: CausalLM) -> None:
    async with engine_thread(make_engine(model)) as thread:
        may_run = threading.Event()
        thread.ask(lambda: may_run.wait(20) and None)
        draft, honest = Silent(), Silent()
        for port in (draft, honest):
            thread.remote.draft_connected(port)
        for _ in range(100):
            thread.remote.draft_received(draft, flood(4096))
        assert draft.num_resets == 100 - MAX_UNREAD_DRAFT_WEIGHT // (4096 + 16)
        thread.remote.draft_received(honest, flood(4096))
        assert honest.num_resets == 0
        may_run.set()
        assert len(await Stream(thread, submission(PROMPTS[0])).token_ids()) == 24
        await thread.remote.until(lambda: not any(draft.unread_weight for draft in thread.remote._sessions.values()))
        before = draft.num_resets
        thread.remote.draft_received(draft, flood(4096))
        assert draft.num_resets == before, "what was read makes room"


async def test_long_words_of_a_draft_count_for_what_they_take(model: CausalLM) -> None:
    async with engine_thread(make_engine(model)) as thread:
        draft = Silent()
        thread.remote.draft_connected(draft)
        decline = Decline(1, DeclineReason.INVALID, False, "no " * MAX_UNREAD_DRAFT_WEIGHT)
        thread.remote.draft_received(draft, [decline])
        assert draft.num_resets == 1


async def test_an_array_too_long_for_its_message_counts_for_what_it_takes(model: CausalLM) -> None:
    async with engine_thread(make_engine(model)) as thread:
        draft = Silent()
        thread.remote.draft_connected(draft)
        thread.remote.draft_received(draft, [Grow(1, 1, 1, 1, 1, scores=[0.0] * MAX_UNREAD_DRAFT_WEIGHT)])
        assert draft.num_resets == 1


class DistantDraft(ProjectedDraft):
    """Gives its projection through the door, in small parts."""

    def __init__(
        self, remote: RemoteVerifyEngine, texts: dict[tuple[int, ...], list[int]], projection: Projection
    ) -> None:
        super().__init__(remote, 61, oracle(texts, 61), projection)  # type: ignore[arg-type]
        self.remote = remote
        self.opening: asyncio.Task[None] | None = None

    def accept(self, begin: FeaturesBegin) -> None:
        self.opening = asyncio.create_task(self._open(begin))

    async def _open(self, begin: FeaturesBegin) -> None:
        data = self.projection.data if begin.wants_projection else b""
        for offset in range(0, len(data), 1000):
            part = ProjectionPart(0, self.projection.dtype, offset, bytes(data[offset : offset + 1000]))
            self.remote.send(ProjectionFrame(self.number, part))
        self.remote.send(FeatureStreamAccepted(self.number, 0))

    def release(self) -> None:
        self.remote.send(FeatureStreamReleased(self.number, self.messages[-1].sequence))


async def test_a_projection_reaches_the_engine_in_parts(model: CausalLM, wanted: list[list[int]]) -> None:
    texts = {tuple(prompt): prompt + tokens for prompt, tokens in zip(PROMPTS, wanted, strict=True)}
    async with engine_thread(make_engine(model)) as thread:
        hidden = model.config.hidden_size
        draft = DistantDraft(thread.remote, texts, random_projection((0, 2), hidden, hidden))
        thread.remote.draft_connected(draft, draft.terms)
        for _ in range(20):
            streams = [Stream(thread, submission(*job)) for job in zip(PROMPTS, PARAMS, strict=True)]
            assert [await stream.token_ids() for stream in streams] == wanted
        assert draft.opening is not None and draft.begun is not None and draft.begun.wants_projection
        await draft.opening
        thread.remote.draft_disconnected(draft)
        draft.num_begun, draft.opening = 0, None
        thread.remote.draft_connected(draft, draft.terms)
        await thread.remote.until(lambda: draft.num_begun == 1)
        assert not draft.begun.wants_projection, "the engine has it already"
        assert draft.check(model, 1e-3, preempted=True) > 50


async def test_parts_of_a_projection_wait_for_an_engine_that_is_behind(model: CausalLM) -> None:
    async with engine_thread(make_engine(model)) as thread:
        remote, draft, may_run, is_held = thread.remote, Silent(), threading.Event(), threading.Event()
        remote.draft_connected(draft)
        thread.ask(lambda: is_held.set() or (may_run.wait(20) and None))
        await asyncio.to_thread(is_held.wait, 20)
        num_sent = 0

        async def give() -> None:
            nonlocal num_sent
            for number in range(100):
                part = ProjectionPart(0, "float32", number, bytes(MAX_FEATURE_BYTES))
                remote.send(ProjectionFrame(draft.number, part))
                await remote.writable()
                num_sent += 1

        giving = asyncio.create_task(give())
        before = -1
        while num_sent > before:
            before = num_sent
            for _ in range(100):
                await asyncio.sleep(0)
        assert num_sent < 20 and remote._transport is not None
        assert remote._transport.get_write_buffer_size() < 2 * MAX_FEATURE_BYTES
        may_run.set()
        await asyncio.wait_for(giving, 20)


async def test_what_a_draft_should_not_send_is_counted(model: CausalLM) -> None:
    async with engine_thread(make_engine(model)) as thread:
        draft = Silent()
        thread.remote.draft_connected(draft)
        thread.remote.draft_received(draft, [Hello(1, 1), Grow(99, 1, 1, 1, 1)])
        await thread.remote.until(lambda: thread.remote.snapshot.dropped.get("unexpected") == 1)
        thread.remote.draft_disconnected(draft)
