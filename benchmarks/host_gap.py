"""Time that the engine's Python takes between the end of a round and the launch of the next, on a fake device.

Trees are grown and followed as in service, by a draft in the same process whose time is not counted. Needs no model.

python benchmarks/host_gap.py --out benchmarks/results/host_gap.json
"""

from __future__ import annotations

import argparse
import gc
import heapq
import math
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from report import Row, cpu_name, write_report

from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import RequestSampler
from outrider.tree.author import TreeAuthor
from outrider.tree.messages import Commit, Open, VerifyMessage
from verify_service.budget import WIDTHS, CostModel
from verify_service.engine import Engine
from verify_service.limits import EngineLimits
from verify_service.memory import Memory
from verify_service.request import Request
from verify_service.round import Entry, Result
from verify_service.submission import Update

VOCAB = 1000
CHANCES = (0.9, 0.06, 0.04)
"""Of the children of every node. The draft knows them, so that its trees are as good as trees can be."""


class FakeRound:
    """A round that ends at a given time."""

    gap_seconds = None

    def __init__(self, device: FakeDevice, entries: Sequence[Entry], gpu_seconds: float) -> None:
        self.gpu_seconds = gpu_seconds
        self._device = device
        self._end = time.perf_counter() + gpu_seconds
        self._results = [Result(accepted(entry, device.luck)) if entry.samples else Result() for entry in entries]

    def done(self) -> bool:
        """Whether its time is up."""
        if self._device.caught_up_at is None:
            self._device.caught_up_at = time.perf_counter()
        return time.perf_counter() >= self._end

    def wait(self) -> list[Result]:
        """The results; from here on the device is idle."""
        self._device.ended_at = time.perf_counter()
        return self._results


def accepted(entry: Entry, luck: random.Random) -> list[int]:
    """Tokens along the nodes as far as they hold what is drawn, and one more; few, so that much of a tree is left."""
    nodes = zip(entry.nodes.parents, entry.nodes.token_ids, strict=True)
    below = {node: index for index, node in enumerate(nodes)}
    tokens: list[int] = []
    node: int | None = -1
    while node is not None and len(tokens) < 3:
        tokens.append(luck.choices(range(len(CHANCES)), CHANCES)[0])
        node = below.get((node, tokens[-1]))
    return tokens


class FakeDevice:
    """An executor that notes when it had nothing to do. Stops the engine after so many rounds."""

    def __init__(self, round_seconds: float, num_rounds: int) -> None:
        self.engine: Engine | None = None
        self.draft: Draft | None = None
        self.ended_at: float | None = None
        self.caught_up_at: float | None = None
        self.gaps: list[float] = []
        self.busy: list[float] = []
        """Time after a launch until the engine looked for the round's end, the draft's own left out."""
        self.num_nodes: list[int] = []
        self.luck = random.Random(1)
        self._round_seconds = round_seconds
        self._num_rounds = num_rounds
        self._launched_at = 0.0

    def launch(self, entries: Sequence[Entry]) -> FakeRound:
        """See Executor."""
        now = time.perf_counter()
        if self.ended_at is not None and self.caught_up_at is not None and self.draft is not None:
            self.gaps.append(now - self.ended_at)
            self.busy.append(self.caught_up_at - self._launched_at - self.draft.seconds)
            self.num_nodes.append(sum(len(entry.nodes) for entry in entries))
            self.draft.seconds = 0.0
        self.caught_up_at = None
        if len(self.gaps) >= self._num_rounds and self.engine is not None:
            self.engine.stop()
        launched = FakeRound(self, entries, self._round_seconds)
        self._launched_at = time.perf_counter()
        return launched

    def forget(self, request: Request) -> None:
        """See Executor."""


class Draft:
    """A draft service that answers at once, and fills its credit with the best nodes that there are."""

    address = "fake"

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        """Time spent here, which a draft in a process of its own would spend there."""
        self._engine = engine
        self._authors: dict[int, TreeAuthor] = {}

    def send(self, messages: list[VerifyMessage]) -> None:
        """See DraftPort."""
        start = time.perf_counter()
        for message in messages:
            if isinstance(message, Open):
                self._authors[message.request] = TreeAuthor(message, VOCAB)
            elif isinstance(message, Commit):
                self._authors[message.request].apply(message)
        for author in self._authors.values():
            self._grow(author)
        self.seconds += time.perf_counter() - start

    def reset(self) -> None:
        """See DraftPort."""

    def _grow(self, author: TreeAuthor) -> None:
        frontier = [(-author.path_score(node), node) for node in author.live_ids()]
        heapq.heapify(frontier)
        while frontier and author.num_live < author.credit:
            score, node = heapq.heappop(frontier)
            for token, edge in enumerate(map(math.log, CHANCES)):
                child = author.add(node, token, edge, 0)
                if child is not None:
                    heapq.heappush(frontier, (score - edge, child))
        while (grow := author.take(64)) is not None:
            self._engine.draft_received(self, [grow])


class Silence:
    """An observer that notes nothing."""

    def round(self, entries: object, updates: object, seconds: float, held: float, *times: float | None) -> None:
        """See Observer."""

    def flush(self) -> None:
        """See Observer."""


def run(batch: int, max_nodes: int, round_seconds: float, num_rounds: int) -> FakeDevice:
    """Run so many rounds of `batch` requests."""
    device = FakeDevice(round_seconds, num_rounds)
    limits = EngineLimits(
        VOCAB, 1 << 20, max_running=batch, max_nodes=max_nodes, max_hold_seconds=0.0, root_apart=True, max_depth=31
    )
    # As if every round were padded to the same width: then all nodes that there are pay.
    cost = CostModel([round_seconds] * len(WIDTHS), width_of=lambda tokens: WIDTHS[-1])
    engine = Engine(device, Memory(batch * 1024 + 1024, 16), cost, limits, Silence())
    device.engine, device.draft = engine, Draft(engine)
    engine.draft_connected(device.draft)
    params = SamplingParams(temperature=0.0)
    for _ in range(batch):
        prompt = [7] * 100
        sampler = RequestSampler(params, prompt, VOCAB)
        engine.submit(Request("r", prompt, 100, params, sampler, 1 << 20, frozenset(), True, drop))
    gc.collect()
    gc.freeze()
    engine.run()
    return device


def drop(update: Update) -> None:
    """A client that nobody is."""


def measure(batch: int, options: argparse.Namespace) -> list[Row]:
    """All rows of one batch size."""
    device = run(batch, options.nodes, options.round_ms / 1e3, options.rounds + options.rounds // 5)
    gaps = [gap * 1e3 for gap in device.gaps[options.rounds // 5 :]]
    busy = [seconds * 1e3 for seconds in device.busy[options.rounds // 5 :]]
    nodes = statistics.median(device.num_nodes[options.rounds // 5 :])
    cuts = statistics.quantiles(gaps, n=100)
    figures = (cuts[9], statistics.median(gaps), cuts[98], statistics.median(busy))
    print(f"{batch:5d}{nodes:7.0f}" + "".join(f"{figure:10.3f}" for figure in figures))
    case = f"host b{batch} m{nodes + batch:.0f}"
    return [
        Row(case, "host_gap_ms", statistics.median(gaps), "ms"),
        Row(case, "host_gap_p99_ms", cuts[98], "ms"),
        Row(case, "overlapped_host_ms", statistics.median(busy), "ms"),
    ]


def main() -> None:
    """Parse options, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 32, 64])
    parser.add_argument("--nodes", type=int, default=64, help="tree nodes in a round, over all requests")
    parser.add_argument("--round-ms", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    print("batch  nodes    p10 ms    gap ms    p99 ms  ms beside a round")
    rows = [row for batch in options.batch for row in measure(batch, options)]
    if options.out:
        write_report(options.out, "host_gap", cpu_name(), rows, ("numpy",))


if __name__ == "__main__":
    main()
