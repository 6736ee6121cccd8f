"""Time of the engine's Python between the end of a round and the launch of the next one, on a fake device.

Trees are grown and followed as in service, by a draft in the same process whose time is not counted. Needs no model.
As in service, what the draft has grown after a commit is spread over a round: it comes for all requests at the same
moments, in `--messages` messages for each request, which the engine unpacks. With `--answer-ms` the first message comes
that long after a commit, and rounds may be held for it, which shows gaps after holds and with late answers.

python -m benchmarks.engine.host_gap --out benchmarks/results/host_gap.json
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from outrider.host.worker import disable_automatic_collection
from outrider.protocol.generation import GenerationRequest, GenerationUpdate
from outrider.protocol.speculation import Commit, Grow, Open, VerifyMessage
from outrider.sampling.params import SamplingParams
from outrider.tree.author import TreeAuthor
from outrider_tools.bench.report import Row, cpu_name, write_report
from verify_service.engine.engine import Action, VerifyEngine
from verify_service.engine.memory import Memory
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Growth, Pending, Result
from verify_service.engine.scheduler import EngineLimits
from verify_service.frames import RoundFigures
from verify_service.speculation.budget import WIDTHS, CostModel

VOCAB = 1000
CHANCES = (0.9, 0.06, 0.04)
"""Chances of each node's children. The draft knows them, so its trees are as good as possible."""


class FakeRound(Pending):
    """A round that ends at a given time."""

    def __init__(self, device: FakeDevice, entries: Sequence[Entry], gpu_seconds: float) -> None:
        self.gpu_seconds = gpu_seconds
        self._device = device
        now = time.perf_counter()
        # The gap starts at the end itself, which the engine may have seen late.
        self.gap_seconds = None if device.idle_since is None else now - device.idle_since
        device.idle_since = now + gpu_seconds
        self._results = [Result(accepted(entry, device.luck)) if entry.samples else Result() for entry in entries]

    def done(self) -> bool:
        """Whether the round's time is up."""
        if self._device.caught_up_at is None:
            self._device.caught_up_at = time.perf_counter()
        return self._device.idle_since is not None and time.perf_counter() >= self._device.idle_since

    def wait(self) -> list[Result]:
        """Return the results; the device is idle from here on."""
        self._device.ended_at = time.perf_counter()
        return self._results


def accepted(entry: Entry, luck: random.Random) -> list[int]:
    """Draw tokens down the tree until one is not a node, but at most 3, so that much of a tree is left."""
    nodes = zip(entry.nodes.parents, entry.nodes.token_ids, strict=True)
    below = {node: index for index, node in enumerate(nodes)}
    tokens: list[int] = []
    node: int | None = -1
    while node is not None and len(tokens) < 3:
        tokens.append(luck.choices(range(len(CHANCES)), CHANCES)[0])
        node = below.get((node, tokens[-1]))
    return tokens


class FakeDevice:
    """An executor that notes when it had nothing to do. Stops the engine after `num_rounds` rounds."""

    launches_ahead = False

    def __init__(self, round_seconds: float, num_rounds: int) -> None:
        self.engine: VerifyEngine | None = None
        self.draft: PacedDraft | None = None
        self.ended_at: float | None = None
        self.caught_up_at: float | None = None
        self.idle_since: float | None = None
        """When the last round ends, or has ended."""
        self.gaps: list[float] = []
        self.busy: list[float] = []
        """Times from a launch until the engine first looked for the round's end, without the draft's own time."""
        self.messages: list[float] = []
        """Times in a round to take in drafts' messages."""
        self.num_nodes: list[int] = []
        self.luck = random.Random(1)
        self._round_seconds = round_seconds
        self._num_rounds = num_rounds
        self._launched_at = 0.0

    def launch(self, entries: Sequence[Entry], growth: Growth | None = None) -> FakeRound:
        """See Executor."""
        now = time.perf_counter()
        if self.ended_at is not None and self.caught_up_at is not None and self.draft is not None:
            self.gaps.append(now - self.ended_at)
            self.busy.append(self.caught_up_at - self._launched_at - self.draft.seconds)
            self.num_nodes.append(sum(len(entry.nodes) for entry in entries))
            self.messages.append(self.draft.receiving)
            self.draft.seconds = self.draft.receiving = 0.0
        self.caught_up_at = None
        if len(self.gaps) >= self._num_rounds and self.engine is not None:
            self.engine.stop()
        launched = FakeRound(self, entries, self._round_seconds)
        self._launched_at = time.perf_counter()
        return launched

    def postpone(self, seconds: float) -> None:
        """End the round later by the draft's time, which must not count; does nothing if the round has ended."""
        if self.idle_since is not None and self.ended_at is not None and self.ended_at < self._launched_at:
            self.idle_since += seconds

    def dry_run(self, entries: Sequence[Entry]) -> None:
        """See Executor."""

    def forget(self, request: Request) -> None:
        """See Executor."""


class DraftPace(NamedTuple):
    """The time pattern of a draft's answer to a commit."""

    answer_seconds: float
    """Seconds until the first message."""
    num_messages: int
    every: float
    """Seconds from one message to the next."""
    most_nodes: int
    """Most nodes of a request in all messages."""


class PacedDraft:
    """A draft service that answers at once, and fills its credit with the best possible nodes."""

    address = "fake"

    def __init__(self, engine: VerifyEngine, device: FakeDevice, wire: Wire, pace: DraftPace) -> None:
        self._device = device
        self._wire = wire
        self._pace = pace
        self.seconds = 0.0
        """Time spent in this class, which a real draft spends in its own process."""
        self.receiving = 0.0
        """Time that the engine spends on the draft's messages."""
        self._engine = engine
        self._authors: dict[int, TreeAuthor] = {}

    def send(self, messages: list[VerifyMessage]) -> None:
        """See DraftConnection."""
        start = time.perf_counter()
        for message in messages:
            if isinstance(message, Open):
                self._authors[message.request] = TreeAuthor(message, VOCAB)
            elif isinstance(message, Commit):
                self._authors[message.request].apply(message)
        sizes = [math.ceil(self._grow(author) / self._pace.num_messages) for author in self._authors.values()]
        answers = [self._cut(author, max(size, 1)) for author, size in zip(self._authors.values(), sizes, strict=True)]
        spent = time.perf_counter() - start
        self.seconds += spent
        self._device.postpone(spent)
        now = time.monotonic()
        for parts in answers:
            for number, part in enumerate(parts):
                self._post_later(now + self._pace.answer_seconds + number * self._pace.every, part)

    def reset(self) -> None:
        """See DraftConnection."""

    def _grow(self, author: TreeAuthor) -> int:
        first = author.next_id
        frontier = [(-author.from_start(node)[0], node) for node in author.live_ids()]
        heapq.heapify(frontier)
        while frontier and author.num_live < author.credit and author.next_id - first < self._pace.most_nodes:
            score, node = heapq.heappop(frontier)
            for token, edge in enumerate(map(math.log, CHANCES)):
                child = author.add(node, token, edge, 0)
                if child is not None:
                    heapq.heappush(frontier, (score - edge, child))
        return author.next_id - first

    def _cut(self, author: TreeAuthor, size: int) -> list[Grow]:
        grows: list[Grow] = []
        while (grow := author.take(size)) is not None:
            grows.append(grow)
        return grows

    def _post_later(self, at: float, grow: Grow) -> None:
        self._wire.post_later(at, lambda: self._wire.post(partial(self._receive, grow, at)))

    def _receive(self, grow: Grow, arrived_at: float) -> None:
        start = time.perf_counter()
        self._engine.drafts.receive(self, [grow], arrived_at)
        self.receiving += time.perf_counter() - start


class Wire:
    """The engine's inbox, with messages that arrive later."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def post(self, action: Action) -> None:
        """See VerifyInbox."""
        self._actions.append(action)

    def post_later(self, at: float, arrive: Callable[[], None]) -> None:
        """Call `arrive` when the clock reaches `at`."""
        heapq.heappush(self._later, (at, next(self._count), arrive))

    def take(self, timeout: float | None) -> list[Action]:
        """See VerifyInbox. Sleeps as a wait for a socket does."""
        self._arrive()
        if timeout is not None and not self._actions:
            left = self._later[0][0] - time.monotonic() if self._later else timeout
            time.sleep(max(min(timeout, left), 0.0))
            self._arrive()
        actions, self._actions = self._actions, []
        return actions

    def _arrive(self) -> None:
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()


class GapLog:
    """An observer that notes gaps, without holds, and holds."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.holds: list[float] = []

    def round(self, entries: object, updates: object, figures: RoundFigures) -> None:
        """See Observer."""
        if figures.gap is not None:
            self.gaps.append(figures.gap)
            self.holds.append(figures.held)

    def flush(self) -> None:
        """See Observer."""


def run(
    batch: int, max_nodes: int, round_seconds: float, num_rounds: int, pace: DraftPace
) -> tuple[FakeDevice, GapLog]:
    """Run `num_rounds` rounds of `batch` requests."""
    device = FakeDevice(round_seconds, num_rounds)
    limits = EngineLimits(
        VOCAB,
        1 << 20,
        max_running=batch,
        max_nodes=max_nodes,
        max_hold_seconds=0.02 if pace.answer_seconds else 0.0,
        root_apart=True,
        max_depth=31,
        spin=True,
    )
    # Pretend that every round is padded to the same width, so that all available nodes pay.
    cost = CostModel([round_seconds] * len(WIDTHS), width_of=lambda tokens: WIDTHS[-1])
    notes, wire = GapLog(), Wire()
    engine = VerifyEngine(device, Memory(batch * 1024 + 1024, 16), cost, limits, notes, wire)
    device.engine, device.draft = engine, PacedDraft(engine, device, wire, pace)
    engine.draft_connected(device.draft)
    params = SamplingParams(temperature=0.0)
    for _ in range(batch):
        prompt = [7] * 100
        engine.submit(Request.begin(GenerationRequest("r", prompt, params, 1 << 20), drop, VOCAB))
    disable_automatic_collection()
    engine.run()
    gc.enable()
    return device, notes


def drop(update: GenerationUpdate) -> None:
    """Ignore an update: there is no client."""


def measure(batch: int, options: argparse.Namespace) -> list[Row]:
    """Return all rows of one batch size."""
    num_rounds, answer = options.rounds + options.rounds // 5, options.answer_ms / 1e3
    pace = DraftPace(answer, options.messages, options.round_ms / 1e3 / (options.messages + 1), options.grown)
    device, notes = run(batch, options.nodes, options.round_ms / 1e3, num_rounds, pace)
    gaps = [gap * 1e3 for gap in notes.gaps[options.rounds // 5 :]]
    holds = [held * 1e3 for held in notes.holds[options.rounds // 5 :]]
    busy = [seconds * 1e3 for seconds in device.busy[options.rounds // 5 :]]
    messages = [seconds * 1e3 for seconds in device.messages[options.rounds // 5 :]]
    nodes = statistics.median(device.num_nodes[options.rounds // 5 :])
    cuts = statistics.quantiles(gaps, n=100)
    beside = (statistics.median(busy), statistics.median(messages), statistics.mean(holds))
    figures = (cuts[9], statistics.median(gaps), cuts[89], cuts[98], *beside)
    print(f"{batch:5d}{nodes:7.0f}" + "".join(f"{figure:10.3f}" for figure in figures))
    case = f"host b{batch} m{nodes + batch:.0f}" + (f" answer {options.answer_ms:g} ms" if answer else "")
    return [
        Row(case, "host_gap_ms", statistics.median(gaps), "ms"),
        Row(case, "host_gap_p99_ms", cuts[98], "ms"),
        Row(case, "overlapped_host_ms", statistics.median(busy), "ms"),
        Row(case, "messages_host_ms", statistics.median(messages), "ms"),
        Row(case, "hold_ms", statistics.mean(holds), "ms"),
    ]


def main() -> None:
    """Parse options, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 32, 64])
    parser.add_argument("--nodes", type=int, default=64, help="tree nodes in a round, over all requests")
    parser.add_argument("--round-ms", type=float, default=5.0)
    parser.add_argument("--answer-ms", type=float, default=0.0, help="time from a commit to the draft's answer")
    parser.add_argument("--messages", type=int, default=6, help="in which a draft sends what it grows a round")
    parser.add_argument("--grown", type=int, default=128, help="nodes that it grows a round at most")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    print("batch  nodes    p10 ms    gap ms    p90 ms    p99 ms    beside  messages      held")
    rows = [row for batch in options.batch for row in measure(batch, options)]
    if options.out:
        write_report(options.out, "host_gap", cpu_name(), rows, ("numpy",))


if __name__ == "__main__":
    main()
