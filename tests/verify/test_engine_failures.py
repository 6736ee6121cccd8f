"""Whatever fails, floods or is slow around the engine: every request gets its end, and no draft stops the others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from harness import PAGE_SIZE, Answer, Silence, make_request
from local_draft import LocalDraft
from threaded_engine import ThreadedEngine

from outrider.errors import InternalError, UnavailableError
from outrider.protocol.speculation import VerifyMessage
from outrider.sampling.params import SamplingParams
from verify_service.door.metrics import VerifyMetrics
from verify_service.engine.memory import Memory
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Growth, Pending, Result
from verify_service.engine.scheduler import EngineLimits
from verify_service.speculation.budget import WIDTHS, CostModel

VOCAB = 61


class Finished(Pending):
    """A round that is over when it is launched."""

    def __init__(self, results: list[Result]) -> None:
        self._results = results

    def done(self) -> bool:
        return True

    def wait(self) -> list[Result]:
        return self._results


class Scripted:
    """An executor that answers token 7 to everything."""

    launches_ahead = False

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self._before = before

    def launch(self, entries: Sequence[Entry], growth: Growth | None = None) -> Finished:
        self._before()
        return Finished([Result([7]) if entry.samples else Result() for entry in entries])

    def dry_run(self, entries: Sequence[Entry]) -> None:
        """See Executor."""

    def forget(self, request: Request) -> None:
        return


def scripted_engine(executor: Scripted, **limits: float) -> ThreadedEngine:
    cost = CostModel([1e-3] * len(WIDTHS))
    return ThreadedEngine(
        executor,
        Memory(64, PAGE_SIZE),
        cost,
        EngineLimits(VOCAB, 200, **limits),  # type: ignore[arg-type]
        Silence(),
    )


def submit(engine: ThreadedEngine, max_tokens: int = 8) -> Answer:
    answer = Answer()
    engine.submit(make_request(answer, [1, 2, 3], SamplingParams(temperature=0.0), VOCAB, max_tokens))
    return answer


def fail() -> None:
    raise RuntimeError("out of order")


def test_an_engine_that_fails_tells_requests_that_it_has_not_looked_at() -> None:
    engine = scripted_engine(Scripted())
    engine.ask(fail)
    behind = submit(engine)
    engine.ask(fail)
    last = submit(engine)
    engine.start()
    for answer in (behind, last):
        assert answer.done.wait(10)
        assert isinstance(answer.updates[-1].error, UnavailableError)


@pytest.mark.parametrize("error", [RuntimeError("out of order"), InternalError("rank 1 has ended")])
def test_log_and_clients_are_told_the_same_end_of_the_service(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    engine = scripted_engine(Scripted())
    engine.ask(fail)
    answer = submit(engine)
    with caplog.at_level(logging.ERROR, "verify_service"):
        engine.start()
        assert answer.done.wait(10)
        engine.stop()
    error = answer.updates[-1].error
    assert error is not None and error.message.endswith("; the service exits to be restarted")
    assert caplog.records[-1].getMessage() == "the engine failed; the service exits to be restarted"


def test_an_engine_that_fails_while_it_ends_a_request_tells_it_and_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted_engine(Scripted(fail))
    monkeypatch.setattr(engine.memory, "release", lambda request: fail())
    answers = [submit(engine) for _ in range(3)]
    engine.start()
    for answer in answers:
        assert answer.done.wait(10)
        assert isinstance(answer.updates[-1].error, UnavailableError)


def test_what_a_failing_device_has_committed_is_told_though_its_features_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_launched = 0

    def break_down() -> None:
        nonlocal num_launched
        num_launched += 1
        if num_launched == 2:
            fail()

    engine = scripted_engine(Scripted(break_down))
    monkeypatch.setattr(engine.features, "collect", lambda after: fail() if num_launched == 2 else None)
    complete, cut_off = submit(engine, max_tokens=1), submit(engine, max_tokens=9)
    engine.start()
    assert complete.done.wait(10) and cut_off.done.wait(10)
    assert complete.token_ids == [7] and complete.updates[-1].error is None
    assert cut_off.token_ids == [7] and isinstance(cut_off.updates[-1].error, UnavailableError)


class Silent:
    """A port that answers nothing by itself."""

    address = "silent"

    def __init__(self) -> None:
        self.num_resets = 0

    def send(self, messages: list[VerifyMessage]) -> None:
        return

    def reset(self) -> None:
        self.num_resets += 1


def test_a_draft_that_answers_during_a_long_round_is_not_lost() -> None:
    now = time.monotonic()

    def three_seconds() -> None:
        nonlocal now
        now += 3.0

    engine = scripted_engine(Scripted(three_seconds))
    engine.drafts.clock = lambda: now
    port = LocalDraft(engine, VOCAB, lambda author: None)
    engine.draft_connected(port)
    answer = submit(engine)
    engine.start()
    assert answer.done.wait(10)
    engine.stop()
    assert port.num_resets == 0


def test_a_round_is_not_held_for_a_request_that_can_accept_nothing_more() -> None:
    engine = scripted_engine(Scripted(), max_hold_seconds=30.0)
    asked = threading.Event()
    engine._draft_wait.wait_seconds = lambda *arguments, **named: float(asked.set() or 0.0)  # type: ignore[method-assign, func-returns-value]
    engine.draft_connected(Silent())
    answer = submit(engine, max_tokens=1)
    engine.start()
    assert answer.done.wait(10)
    engine.stop()
    assert not asked.is_set()


def test_reading_the_rate_takes_nothing_from_the_engine() -> None:
    metrics = VerifyMetrics()
    metrics._recent.extend([(time.monotonic() - 60.0, 5), (time.monotonic(), 10)])
    assert metrics.tokens_per_second == 2.0
    assert len(metrics._recent) == 2
