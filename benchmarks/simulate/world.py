"""A world in virtual time: two actors that exchange messages, the costs of their work, and notes of rounds.

Each actor has its own thread, but only one runs at a time, while the other one has stopped at a time that it reached.
No actor sees a message before it arrives, or goes further than the time at which the other could still send to it.
See `benchmarks.simulate.split`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from outrider.protocol.generation import GenerationUpdate
from verify_service.engine.engine import Action
from verify_service.engine.round import Entry
from verify_service.frames import RoundFigures

_USUAL_LEARN = 0.05
"""As in verify's metrics."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations, in ms. Host times are of one thread."""

    round: tuple[tuple[int, float], ...] = (
        (1, 4.12), (2, 4.12), (4, 4.15), (8, 4.20), (12, 4.23), (16, 4.25), (24, 4.31), (32, 4.35), (48, 4.44),
        (64, 4.60), (96, 5.0), (128, 5.4),
    )  # fmt: skip
    """A round on the GPU, by the number of tokens that it is padded to."""
    round_row: float = 0.008
    """For each request of a round but the first."""
    prefill: float = 5.0
    prefill_token: float = 0.01
    gap: float = 0.11
    """Between two rounds of one request without trees; `gap_row` for each other request."""
    gap_row: float = 0.0115
    gap_trees: float = 0.05
    """Added to the gap by trees, and `gap_node` for each node that a round takes."""
    gap_node: float = 0.003
    send_commit: float = 0.03
    """For verify to send a request's commit to a draft."""
    settle: float = 0.1
    """Post-processing of a round while the next one runs; `settle_row` for each request."""
    settle_row: float = 0.01
    take_grow: float = 0.02
    """For verify to take in a draft's message."""
    line: float = 0.1
    """From engine to engine."""
    client: float = 3.0
    """From the end of an answer until the next request arrives."""
    step: tuple[tuple[int, float], ...] = ((8, 0.475), (16, 0.51), (32, 0.555), (64, 0.65), (128, 0.87))
    """A draft step, by its nodes."""
    lone_step: tuple[tuple[int, float], ...] = ((8, 0.44), (16, 0.49), (32, 0.515), (64, 0.59), (128, 0.87))
    """A draft step for one request, whose context is short."""
    step_row: float = 0.012
    """For each request of a step's burst but the first."""
    begin: float = 0.04
    """On the draft's device, before a burst's first step, and for new roots."""
    reroot: float = 0.03
    extend: float = 8.4
    """A forward of prompts, on host and device."""
    plan: float = 0.03
    """To see whether there is anything to launch; the rest of planning is in `launch`."""
    launch: float = 0.22
    """On the host, for a burst; `launch_step` for each step, also of a continued burst."""
    launch_row: float = 0.012
    launch_step: float = 0.005
    go_on: float = 0.07
    go_on_roots: float = 0.03
    go_on_row: float = 0.003
    more: float = 0.004
    more_row: float = 0.0005
    roots: float = 0.004
    """To prepare the new roots for the device, even if there are none."""
    roots_row: float = 0.001
    merge: float = 0.05
    merge_row: float = 0.003
    follow: float = 0.12
    """To follow commits, and `follow_row` for each; `reach` to find a commit's path while a burst runs."""
    follow_row: float = 0.02
    reach: float = 0.015
    look: float = 0.007
    prepare: float = 0.03
    prepare_row: float = 0.01
    append: float = 0.0008
    """For each node."""
    send: float = 0.015
    """For each message to verify."""
    handle: float = 0.018
    """For each message from verify, and `handle_node` for each live node of its tree."""
    handle_node: float = 0.00015
    turn: float = 0.01
    host: float = 1.25
    """Factor of all the draft's host times, which were measured in code that runs over and over."""
    idle_host: float = 1.0
    """Factor of host times that begin while the device is idle; with 0, the device hardly ever waits."""

    def of_round(self, tokens: int, rows: int) -> float:
        """Return the seconds of a round of `tokens` tokens, of which `rows` are roots."""
        return 1e-3 * (_padded(self.round, tokens) + self.round_row * max(rows - 1, 0))

    def of_step(self, width: int, rows: int) -> float:
        """Return the seconds of a draft step."""
        if rows <= 1:
            return 1e-3 * _padded(self.lone_step, width)
        return 1e-3 * (_padded(self.step, width) + self.step_row * (rows - 1))


def _padded(table: Sequence[tuple[int, float]], count: int) -> float:
    return table[min(bisect_left(table, (count, 0.0)), len(table) - 1)][1]


class OverError(BaseException):
    """Raised in an actor that wakes up after the world has ended."""


class SimulatedWorld:
    """State that the two actors share."""

    def __init__(self, latency: float) -> None:
        """`latency` is the least time of a message between the actors, in seconds."""
        self.latency = latency
        self.over = False
        self.error: BaseException | None = None
        self.numbers = itertools.count()
        self.verify, self.draft = Actor(self), Actor(self)
        self.verify.other, self.draft.other = self.draft, self.verify

    def run(self, verify: Callable[[], None], draft: Callable[[], None]) -> None:
        """Run both actors until `verify` returns. Raises an error of either one."""
        thread = threading.Thread(target=partial(self._live, draft), name="draft", daemon=True)
        thread.start()
        try:
            verify()
        except OverError:
            pass
        finally:
            self.over = True
            self.draft.baton.release()
            thread.join()
        if self.error is not None:
            raise self.error

    def _live(self, act: Callable[[], None]) -> None:
        self.draft.baton.acquire()
        try:
            if not self.over:
                act()
        except OverError:
            return
        except BaseException as error:
            self.error = error
        self.over = True
        self.verify.baton.release()


class Actor:
    """One of two actors in virtual time; all times are in seconds."""

    other: Actor

    def __init__(self, world: SimulatedWorld) -> None:
        self.now = 0.0
        self.pace: Callable[[], float] = lambda: 1.0
        """Factor of the actor's work times in `Costs`."""
        self.spent: dict[str, float] = {}
        """Time by the kind of work."""
        self.baton = threading.Semaphore(0)
        self._world = world
        self._mail: list[tuple[float, int, Any]] = []
        self._until: float | None = None

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def spend(self, what: str, ms: float) -> None:
        """Work for a while."""
        seconds = 1e-3 * ms * self.pace()
        self.now += seconds
        self.spent[what] = self.spent.get(what, 0.0) + seconds

    def charged(self, what: str, call: Callable[..., Any], ms: Callable[..., float]) -> Callable[..., Any]:
        """Return a function that spends a time, computed from its arguments, before it calls `call`."""

        def run(*args: Any, **named: Any) -> Any:
            self.spend(what, ms(*args))
            return call(*args, **named)

        return run

    def post(self, at: float, what: object) -> None:
        """Leave something in this actor's mail, to arrive at time `at`."""
        heapq.heappush(self._mail, (at, next(self._world.numbers), what))

    def waiting(self) -> bool:
        """Whether something has arrived."""
        self._catch_up()
        return bool(self._mail) and self._mail[0][0] <= self.now

    def take(self) -> list[Any]:
        """Return all that has arrived, in order."""
        self._catch_up()
        taken = []
        while self._mail and self._mail[0][0] <= self.now:
            taken.append(heapq.heappop(self._mail)[2])
        return taken

    def wait(self, until: float) -> None:
        """Pass time until `until`, or until something arrives."""
        while True:
            goal = max(min(until, self._arrival), self.now)
            if goal <= self.other._bound + self._world.latency and goal < math.inf:
                self.now, self._until = goal, None
                return
            if goal == math.inf == self.other._bound:
                raise RuntimeError("nothing happens any more")
            self._until = until
            self._switch()

    @property
    def _arrival(self) -> float:
        return self._mail[0][0] if self._mail else math.inf

    @property
    def _bound(self) -> float:
        """The earliest time at which this actor may next send something."""
        return self.now if self._until is None else max(min(self._until, self._arrival), self.now)

    def _catch_up(self) -> None:
        """Run the other actor until all mail that arrives by now is there."""
        while self.other._bound + self._world.latency < self.now:
            self._switch()

    def _switch(self) -> None:
        self.other.baton.release()
        self.baton.acquire()
        if self._world.over:
            raise OverError


class SimulatedVerifyInbox:
    """The inbox of verify's engine: see verify_service.engine.engine."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    def post(self, action: Action) -> None:
        """Queue an action."""
        self._actor.post(self._actor.now, lambda at: action())

    def take(self, timeout: float | None) -> list[Action]:
        """See VerifyInbox."""
        if timeout is not None and not self._actor.waiting():
            self._actor.wait(self._actor.now + timeout)
        now = self._actor.now
        return [partial(arrived, now) for arrived in self._actor.take()]


@dataclass
class Notes:
    """Measurements of rounds, as in verify's metrics: see Observer."""

    rounds: int = 0
    tokens: int = 0
    drafted_tokens: int = 0
    request_rounds: int = 0
    drafted: int = 0
    hits: int = 0
    found: int = 0
    held: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    gpu: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    usual: float = 0.0

    def round(self, entries: Sequence[Entry], updates: Sequence[GenerationUpdate], figures: RoundFigures) -> None:
        """Note a round."""
        committed = [update for update in updates if update.token_ids]
        nodes = sum(update.num_draft_tokens for update in committed)
        self.rounds += 1
        self.tokens += sum(len(update.token_ids) for update in committed)
        self.request_rounds += len(committed)
        self.drafted_tokens += nodes
        self.held.append(figures.held)
        self.gpu.append(figures.gpu or 0.0)
        self.answers += figures.answers
        if figures.gap is not None:
            self.gaps.append(figures.gap)
        if figures.ready is None:
            return
        self.drafted += 1
        if nodes:
            self.usual += (_USUAL_LEARN if self.usual else 1.0) * (nodes - self.usual)
        self.hits += bool(figures.ready) and figures.ready >= self.usual / 2
        self.found += bool(figures.ready and nodes) and figures.ready >= nodes / 2

    def flush(self) -> None:
        """See Observer."""
