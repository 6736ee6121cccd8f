"""The draft service in virtual time: its real engine and growth, on a runner whose model is a `Language`.

The runner's device works in parallel with the host: steps are computed when they are queued, and end at their time.
`benchmarks.simulate.pool` has the device's memory. See `benchmarks.simulate.split`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

import draft_service.engine.worker as draft_engine
import outrider.drafting.model.batch_manager as batch_manager
import outrider.drafting.model.burst_grower as growth
import outrider.drafting.model.drafter as drafter
import outrider.drafting.model.forest as reroot
import outrider.drafting.model.publisher as publisher
import outrider.drafting.model.runner as runner
from benchmarks.simulate.language import VOCAB, Language
from benchmarks.simulate.pool import CONTEXT, BurstMemory, Pool
from benchmarks.simulate.world import Actor, Costs
from outrider.config.draft import DraftOptions
from outrider.drafting.base import Needs
from outrider.drafting.model.burst import Burst, BurstResult, BurstShape, Extent, Reroots, StepBuckets
from outrider.drafting.model.drafter import ModelDrafter
from outrider.drafting.requests import AnswerPort, Requests
from outrider.host.frames import FromVerify
from outrider.host.worker import GarbageCollector
from outrider.models.capacity import DRAFT_REGION, DRAFT_ROWS
from outrider.protocol.speculation import DraftMessage, VerifyMessage
from outrider.sampling.params import SamplingParams

_GLANCE = 3e-6
"""Seconds between two checks of a working device."""
_SESSION = 1


class Event:
    """The end of a part of a burst, as the host sees it."""

    def __init__(self, actor: Actor, at: float) -> None:
        self._actor = actor
        self.at = at

    def query(self) -> bool:
        """Whether the end has been reached. A check takes a moment."""
        if self._actor.now < self.at:
            self._actor.wait(min(self._actor.now + _GLANCE, self.at))
        return self._actor.now >= self.at

    def synchronize(self) -> None:
        """Wait for the end."""
        self._actor.now = max(self._actor.now, self.at)


class SimulatedRunner(runner.BurstRunner):
    """See BurstRunner. Expected times are computed as by the real runner."""

    def __init__(self, actor: Actor, costs: Costs, language: Language, max_width: int) -> None:
        self.shape = BurstShape(
            num_rows=DRAFT_ROWS, region=DRAFT_REGION, branching=drafter.BRANCHING, max_seeds=512,
            max_steps=drafter.MAX_BURST_STEPS, max_width=max_width, page_size=16, num_pages=65536 // 16,
            max_context=CONTEXT, feature_size=0, lone_branching=drafter.LONE_BRANCHING,
        )  # fmt: skip
        self.buckets = StepBuckets(self.shape)
        self.busy = 0.0
        """Seconds that the device has worked."""
        self._actor, self._costs = actor, costs
        self._cells = BurstMemory(self.shape, language)
        self._pools: dict[int, tuple[Burst, Pool]] = {}
        self._results: dict[runner.PendingBurst, BurstResult] = {}
        self._free_at = 0.0
        actor.pace = lambda: costs.host * (1.0 if self._free_at > actor.now else costs.idle_host)
        self._step_seconds, self.launch_seconds = {}, 0.0

    def open(self, row: int, sampling: SamplingParams) -> None:
        """See BurstRunner."""

    def close(self, row: int) -> None:
        """See BurstRunner."""

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """See BurstRunner."""

    def extend(self, extents: Sequence[Extent]) -> None:
        """See BurstRunner."""
        began = self._actor.now
        for extent in extents:
            self._cells.extend(extent.row, extent.tokens, extent.start)
        self._actor.spend("extend", self._costs.extend)
        self._work(1e-3 * self._costs.extend, began)

    def move(self, row: int, slots: Sequence[int], position: int) -> None:
        """See BurstRunner."""
        self._cells.context[row, position : position + len(slots)] = self._cells.states[row, list(slots)]

    def launch(self, burst: Burst) -> runner.PendingBurst:
        """See BurstRunner."""
        bucket = self.buckets.fit(burst.width, len(burst.rows))
        pending = runner.PendingBurst(self, burst, bucket, burst.num_steps)
        costs, rows = self._costs, len(burst.rows)
        self._actor.spend("launch", costs.launch + costs.launch_row * rows + costs.launch_step * burst.num_steps)
        pool = Pool(burst, bucket, self.shape, self._cells)
        self._pools = {id(burst): (burst, pool)}
        self._work(1e-3 * self._costs.begin)
        self._run(pending, pool)
        return pending

    def go_on(
        self, pending: runner.PendingBurst, num_steps: int, reroots: Reroots | None = None
    ) -> runner.PendingBurst | None:
        """See BurstRunner."""
        done = pending.first_step + pending.num_steps
        found = self._pools.get(id(pending.burst))
        if found is None or done + num_steps > self.shape.max_steps:
            return None
        more = runner.PendingBurst(self, pending.burst, pending.bucket, num_steps, done)
        self._actor.spend("go_on", self._costs.go_on + self._costs.launch_step * num_steps)
        if reroots is not None:
            self._actor.spend("go_on", self._costs.go_on_roots + self._costs.go_on_row * len(reroots.rows))
            found[1].reroot(reroots)
            self._work(1e-3 * self._costs.reroot)
        self._run(more, found[1])
        return more

    def finish(self, pending: runner.PendingBurst) -> BurstResult:
        """See BurstRunner."""
        if pending.event is not None:
            pending.event.synchronize()
        return self._results.pop(pending)

    def _run(self, pending: runner.PendingBurst, pool: Pool) -> None:
        steps = [pool.run() for _ in range(pending.num_steps)]
        columns: list[Any] = [np.stack(column) for column in zip(*steps, strict=True)]
        first = self.shape.max_seeds + pending.first_step * pending.bucket.num_candidates
        self._results[pending] = BurstResult(first, *columns)
        self._work(pending.num_steps * self._costs.of_step(pending.bucket.width, len(pending.burst.rows)))
        event: Any = Event(self._actor, self._free_at)
        pending.event = event

    def _work(self, seconds: float, began: float | None = None) -> None:
        """Queue work on the device."""
        start = max(self._free_at, self._actor.now if began is None else began)
        self._free_at = start + seconds
        self.busy += seconds

    def _queue(self, pending: runner.PendingBurst) -> None:
        raise NotImplementedError

    def _read(self, pending: runner.PendingBurst) -> BurstResult:
        raise NotImplementedError

    def _run_context(self, chunks: Sequence[Any], features: Any) -> None:
        raise NotImplementedError


class SimulatedDraftInbox:
    """The inbox in which the engine finds verify's messages: see draft_service.engine.inbox."""

    def __init__(self, actor: Actor) -> None:
        self.ended: set[int] = set()
        self.waiting = actor.waiting
        self._actor = actor
        self._received: list[FromVerify] = []

    def next(self) -> FromVerify | None:
        """Return the next frame, or None."""
        self._received += self._actor.take()
        return self._received.pop(0) if self._received else None

    def wait(self, timeout: float | None) -> None:
        """Wait until something arrives."""
        self._actor.wait(self._actor.now + (1e9 if timeout is None else timeout))


class DraftService:
    """A draft service's engine that lives in virtual time."""

    def __init__(
        self, actor: Actor, costs: Costs, language: Language, deliver: Callable[[float, list[DraftMessage]], None]
    ) -> None:
        """`deliver` is called with messages for verify, and the time of their arrival there."""
        self.runner = SimulatedRunner(actor, costs, language, 128)
        options = DraftOptions(max_positions=CONTEXT, speculative_algorithm=("STANDALONE",))
        self.requests = Requests(ModelDrafter(self.runner, ("standalone",), Needs()), options)
        grown = self.requests.growth.growers[0]
        assert isinstance(grown, growth.BurstGrower)
        self.growth = grown
        self.totals: Counter[str] = Counter()
        self._actor, self._costs, self._deliver = actor, costs, deliver
        self._outgoing: list[DraftMessage] = []
        self._engine = self._make_engine()
        self._charge()

    def live(self) -> None:
        """Take turns forever."""
        while True:
            self._engine._turn()
            self._actor.spend("turn", self._costs.turn)

    def send(self, messages: list[VerifyMessage]) -> None:
        """Send verify's messages, on verify's thread and in verify's time."""
        at = self._actor.other.now + 1e-3 * self._costs.line
        self._actor.post(at, FromVerify(_SESSION, list(messages)))

    def _make_engine(self) -> draft_engine.DraftEngine:
        """Return the real engine, without the door's process."""
        engine: Any = draft_engine.DraftEngine.__new__(draft_engine.DraftEngine)
        engine.requests, engine.inbox = self.requests, SimulatedDraftInbox(self._actor)
        reporter: Any = SimpleNamespace(
            flush=self._flush, report_state=lambda: None, seconds_left=None,
            count_slice=lambda seconds: self.totals.update(slices=1, slice_seconds=seconds),
        )  # fmt: skip
        engine._reporter, engine._features = reporter, SimpleNamespace(mapping=False)
        engine._ports = {_SESSION: AnswerPort(VOCAB, None, partial(self._send, _SESSION))}
        engine._garbage, engine._stopping, engine._num_turns = GarbageCollector(), False, 0
        engine._watch_seconds = 0.0
        made: draft_engine.DraftEngine = engine
        return made

    def _send(self, session: int, messages: Sequence[DraftMessage]) -> None:
        self._actor.spend("send", self._costs.send * len(messages))
        self._outgoing += messages

    def _flush(self) -> None:
        self.totals.update(self.growth.take_counts())
        if self._outgoing:
            messages, self._outgoing = self._outgoing, []
            self._deliver(self._actor.now + 1e-3 * self._costs.line, messages)

    def _charge(self) -> None:
        """Charge virtual time for host work."""
        costs, grown, rows = self._costs, self.growth, self.requests.__len__
        trees = self.requests.growth
        for owner, name, ms in (
            (grown._planner, "plan", lambda *_: costs.plan),
            (grown._planner, "take", lambda *_: costs.merge + costs.merge_row * rows()),
            (grown._planner, "more_steps", lambda *_: costs.more + costs.more_row * rows()),
            (grown._planner, "reroots", lambda *_: costs.roots + costs.roots_row * rows()),
            (grown._publisher, "prepare", lambda *_: costs.prepare + costs.prepare_row * rows()),
            (grown._batch_manager, "_update", lambda *_: costs.look),
            (trees, "appended", lambda tree, source, count=1: costs.append * count),
            (self.requests, "handle", lambda *_: costs.handle + costs.handle_node * trees.num_live / max(rows(), 1)),
        ):
            setattr(owner, name, self._actor.charged(name, getattr(owner, name), ms))

    def module_changes(self) -> list[tuple[Any, str, Any]]:
        """Return the changes of modules while this service lives: owner, name and value."""
        costs, actor = self._costs, self._actor
        follow: Any = actor.charged(
            "follow", reroot.reroot, lambda _, steps: costs.follow + costs.follow_row * len(steps)
        )
        has_path = actor.charged("has_path", reroot.has_path, lambda *_: costs.reach)
        clocks = [(one, "perf_counter", actor.clock) for one in (growth, publisher, runner, draft_engine)]
        return [*clocks, (batch_manager, "reroot", follow), (batch_manager, "has_path", has_path)]
