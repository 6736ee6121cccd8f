"""Host time of a draft service that grows trees in bursts, phase by phase, on a runner that answers at once.

The gap lies between the end of a burst and the launch of the next one: read the result, follow commits, choose seeds,
fill the pinned memory. The device driver's time to queue work does not count. If a burst is continued there is no gap,
because further steps are queued before the earlier ones have ended. Trees, commits and credits are as in service: every
few bursts, the target commits for all requests at once what it draws by the scripted model's chances. Times are those
of the thread, so that other work on the machine counts little.

python -m benchmarks.split.draft_host --out benchmarks/results/draft_host.json
"""

from __future__ import annotations

import argparse
import gc
import heapq
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.split.bursts import row_list
from outrider.config.draft import DraftOptions
from outrider.drafting.base import Needs
from outrider.drafting.model.burst import FORCED, Burst, BurstResult, BurstShape, Extent, Reroots, StepBuckets
from outrider.drafting.model.burst_grower import BurstGrower
from outrider.drafting.model.cuda_runner import BurstInput, BurstOutput
from outrider.drafting.model.drafter import ModelDrafter
from outrider.drafting.model.runner import BurstRunner, PendingBurst
from outrider.drafting.requests import Requests
from outrider.protocol.speculation import Commit, DraftMessage, Features, Grow, Open
from outrider.protocol.speculation_codec import encode_draft
from outrider.sampling.params import SamplingParams
from outrider_tools.bench.report import Row, cpu_name, write_report

_MOST_TOKENS = 8


class SentTrees:
    """The trees of all requests as sent. Asking authors would tidy their state, and untidy state is to be timed."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._luck = np.random.default_rng(seed)
        self._epochs: dict[int, int] = {}
        self._below: dict[int, defaultdict[int, dict[int, tuple[int, float]]]] = {}  # node to token to id and chance

    def note(self, grow: Grow) -> None:
        """Add the nodes that a draft sent."""
        if self._epochs.get(grow.request) != grow.epoch:
            self._epochs[grow.request], self._below[grow.request] = grow.epoch, defaultdict(dict)
        columns = (grow.parents, grow.token_ids, grow.scores)
        for node, (parent, token, score) in enumerate(zip(*columns, strict=True), grow.first_id):
            self._below[grow.request][parent][token] = (node, math.exp(score))

    def commit(self, request: int, epoch: int, root: int) -> list[int]:
        """Draw tokens below the root of a tree: a path of sent nodes, and one more token."""
        children = self._below[request] if self._epochs.get(request) == epoch else {}
        tokens: list[int] = []
        node: int | None = root
        while node is not None and len(tokens) < _MOST_TOKENS:
            below = children.get(node, {})
            chances = [chance for _, chance in below.values()]
            pick = self._luck.choice(len(below) + 1, p=[*chances, max(0.0, 1 - sum(chances))]) if below else 0
            tokens.append([*below, int(self._luck.integers(self._vocab_size))][pick])
            node = below[tokens[-1]][0] if tokens[-1] in below else None
        return tokens


VOCAB = 32000
PROMPT = 40
_DRAWN = 4099
"""Number of the scripted model's sets of candidates."""
PHASES = (
    ("gap", "gap between bursts"),
    ("gap_commit", "gap after commits"),
    ("follow", "follow commits while a burst runs (no gap)"),
    ("go_on", "have a burst go on (no gap)"),
    ("take", "  read and merge a part"),
    ("land", "  read and merge"),
    ("apply", "  follow commits"),
    ("launch", "  choose and lay out"),
    ("fill", "  fill pinned memory"),
    ("prepare", "rank what to send"),
    ("append", "append to authors"),
    ("tell", "take from authors"),
    ("encode", "encode (event loop)"),
    ("handle", "apply commits to authors"),
)


class Clock:
    """Seconds by phase, for each turn."""

    def __init__(self) -> None:
        self.turn: defaultdict[str, float] = defaultdict(float)
        self.turns: list[dict[str, float]] = []

    def time(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its time counted under `phase`."""

        def timed(*args: object, **named: object) -> object:
            start = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                self.turn[phase] += time.thread_time() - start

        return timed

    def end_turn(self) -> None:
        """Begin another turn."""
        self.turns.append(dict(self.turn))
        self.turn.clear()


class DrawingRunner(BurstRunner):
    """See BurstRunner. Its model knows only chances; tokens are drawn, and bursts are over, when `work` is called."""

    def __init__(self, shape: BurstShape, clock: Clock) -> None:
        self.shape = shape
        self.queued: list[PendingBurst] = []
        self._states: dict[int, dict[str, Any]] = {}
        """Pool and free slots of each burst, passed from part to part."""
        self._step_seconds, self.launch_seconds = {}, 0.0
        device = torch.device("cpu")
        self.input, self.output = BurstInput(shape, device), BurstOutput(shape, device)
        self.buckets = StepBuckets(shape)
        self._fill = clock.time("fill", self.input.fill)
        # Drawn beforehand, so that the stand-in for device work does not empty the caches.
        luck, branching = np.random.default_rng(0), shape.branching
        chances = np.sort(luck.dirichlet([0.3] * branching, _DRAWN))[:, ::-1] * 0.95 + 1e-6
        self._edges = np.log(chances).astype(np.float32)
        self._tokens = (luck.integers(VOCAB, size=(_DRAWN, 1)) + 997 * np.arange(branching)) % VOCAB
        self._drawn = 0
        self._copy = 0

    def open(self, row: int, sampling: SamplingParams) -> None:
        """See BurstRunner."""

    def close(self, row: int) -> None:
        """See BurstRunner."""

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """See BurstRunner."""

    def extend(self, extents: Sequence[Extent]) -> None:
        """See BurstRunner."""

    def move(self, row: int, slots: Sequence[int], position: int) -> None:
        """See BurstRunner."""

    def project(self, features: Features) -> Tensor:
        """See BurstRunner."""
        return torch.zeros(features.count, 1)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See BurstRunner."""
        return torch.zeros(sum(map(len, parts)), 1)

    def launch(self, burst: Burst) -> PendingBurst:
        """See BurstRunner."""
        self._copy = 1 - self._copy
        self._fill(self._copy, burst)
        bucket = self.buckets.fit(burst.width, len(burst.rows))
        self._states[id(burst)] = {}
        self.queued.append(PendingBurst(self, burst, bucket, burst.num_steps, ran=True, copy=self._copy))
        return self.queued[-1]

    def go_on(self, pending: PendingBurst, num_steps: int, reroots: Reroots | None = None) -> PendingBurst | None:
        """See PendingBurst. Reroots only free slots here: commits arrive when a burst is over."""
        if reroots is not None:
            for row, slots in zip(reroots.rows.tolist(), reroots.free, strict=True):
                self._states[id(pending.burst)]["free"][row] += slots.tolist()
        done = pending.first_step + pending.num_steps
        if done + num_steps > self.shape.max_steps:
            return None
        more = PendingBurst(self, pending.burst, pending.bucket, num_steps, done, ran=True, copy=pending.copy)
        self.queued.append(more)
        return more

    def finish(self, pending: PendingBurst) -> BurstResult:
        """See BurstRunner."""
        return self._read(pending)

    def _read(self, pending: PendingBurst) -> BurstResult:
        return self.output.read(pending.copy, pending.bucket, pending.num_steps, pending.first_step)

    def _queue(self, pending: PendingBurst) -> None:
        raise NotImplementedError

    def _run_context(self, chunks: Sequence[Any], features: Any) -> None:
        raise NotImplementedError

    def work(self) -> None:
        """Do a device's work."""
        if not self.queued:
            return
        pending = self.queued.pop(0)
        burst, width, branching = pending.burst, pending.bucket.width, pending.bucket.branching
        state = self._states[id(burst)]
        if not state:
            state |= self._begin(burst)
        results = self.output.host_steps(pending.copy, pending.bucket, pending.num_steps, pending.first_step)
        for step in range(pending.num_steps):
            line = results[step]
            line[: 2 * width] = -1
            tokens = line[2 * width : (2 + branching) * width].reshape(width, branching)
            edges = line[(2 + branching) * width :].view(np.float32).reshape(width, branching)
            tokens[:], edges[:] = -1, -np.inf
            first = self.shape.max_seeds + (pending.first_step + step) * width * branching
            self._step(burst, line, tokens, edges, state["pool"], state["free"], first)

    def _begin(self, burst: Burst) -> dict[str, Any]:
        """Return a pool of the seeds, and the free slots."""
        seeds = burst.seeds
        free = [list(row.free) for row in row_list(burst.rows)]
        rows, slots, scores = seeds.rows.tolist(), seeds.slots.tolist(), seeds.scores.tolist()
        pool: list[tuple[float, int, int, int, float]] = []
        for seed, (row, slot, score) in enumerate(zip(rows, slots, scores, strict=True)):
            forced = score >= FORCED
            last = seed + 1 == len(rows) or rows[seed + 1] != row or scores[seed + 1] < FORCED
            base = (0.0 if last else -math.inf) if forced else score
            pool.append((-score, seed, row, slot, base))
        heapq.heapify(pool)
        return {"pool": pool, "free": free}

    def _step(self, burst: Burst, line: Any, tokens: Any, edges: Any, pool: Any, free: Any, first: int) -> None:
        width, branching = edges.shape
        found = []
        for place in range(min(width, len(pool))):
            _, index, row, slot, base = heapq.heappop(pool)
            if slot < 0:
                if not free[row]:
                    continue
                slot = free[row].pop(0)
            line[place], line[width + place] = index, slot
            self._drawn = (self._drawn + 1) % _DRAWN
            tokens[place], edges[place] = self._tokens[self._drawn], self._edges[self._drawn]
            for number, edge in enumerate(edges[place].tolist()):
                if base + edge >= burst.floor:
                    child = first + place * branching + number
                    found.append((-(base + edge), child, row, -1, base + edge))
        for one in found:
            heapq.heappush(pool, one)


@dataclass(eq=False)
class Peer:
    """Receives the service's messages."""

    vocab_size: int = VOCAB
    parts: frozenset[int] | None = None
    received: list[DraftMessage] = field(default_factory=list)

    def send(self, messages: Sequence[DraftMessage]) -> None:
        """See outrider.drafting.requests."""
        self.received.extend(messages)


class Service:
    """The requests of a draft service, and a verify service that commits to them."""

    def __init__(self, num_requests: int, options: argparse.Namespace) -> None:
        wide = 128 if num_requests > 32 else 64
        shape = BurstShape(
            num_rows=64, region=256, branching=8, max_seeds=512, max_steps=8, max_width=wide, page_size=16,
            num_pages=64 * 512, max_context=8192, feature_size=1 if options.features else 0,
        )  # fmt: skip
        self.clock = Clock()
        self.runner = DrawingRunner(shape, self.clock)
        draft_options = DraftOptions(max_positions=8192, speculative_algorithm=("STANDALONE",))
        self.requests = Requests(ModelDrafter(self.runner, ("standalone",), Needs()), draft_options)
        self.peer = Peer()
        self._sent = SentTrees(VOCAB, seed=1)
        self._credit = options.credit or max(8, min(64, 4 * options.nodes // num_requests))
        self._num_requests = num_requests
        self._features = options.features
        self._handle = self.clock.time("handle", self.requests.handle)
        for number in range(num_requests):
            prompt = list(range(1, PROMPT))
            self.requests.handle(self.peer, Open(number, prompt, len(prompt), SamplingParams(0.0), self._credit))
            self._send_features(number, 0, PROMPT - 2)
        growth = self.requests.growth.growers[0]
        assert isinstance(growth, BurstGrower)
        self._growth = growth
        for phase, owner, name in (
            ("follow", growth, "_follow_ahead"),
            ("land", growth, "_land"),
            ("go_on", growth, "_go_on"),
            ("take", growth, "_take"),
            ("apply", growth, "_apply"),
            ("launch", growth, "_launch"),
            ("prepare", growth._publisher, "prepare"),
            ("append", growth._publisher, "run"),
            ("tell", self.requests, "send_nodes"),
        ):
            setattr(owner, name, self.clock.time(phase, getattr(owner, name)))

    def turn(self, *, commit: bool) -> None:
        """Take in a burst, perhaps after commits, and launch the next one."""
        self.runner.work()
        before = self.clock.turn
        if commit:
            if (active := self._growth._active) is not None:
                active.is_outdated = True  # ends it, like a commit that cannot be passed to its device
            self._commit()
        for _ in range(1 + commit):  # the first call ends a running burst after commits
            self._growth.grow(math.inf, never)
        self.requests.send_nodes()
        received, self.peer.received = self.peer.received, []
        self.clock.time("encode", encode_draft)(received)
        for one in received:
            if isinstance(one, Grow):
                self._sent.note(one)
        before["launch"] -= before["fill"]
        if "take" in before:
            del before["launch"]
        else:
            before.pop("go_on", None)
            gap = before["land"] + before["apply"] + before["launch"] + before["fill"]
            before["gap_commit" if commit else "gap"] = gap
        before["bursts"] = float(bool(self.runner.queued))
        before["entries"] = float(self._growth._forest.entries.count)
        before["nodes"] = float(sum(len(one.token_ids) for one in received if isinstance(one, Grow)))
        self.clock.end_turn()

    def _commit(self) -> None:
        for number in range(self._num_requests):
            author = self.requests._trees[self.peer, number].author
            tokens = self._sent.commit(number, author.epoch, author.root)
            known, sent = author.committed_len, author.next_id - 1
            # As if verify had seen all but the last nodes, so that it resolves what it finds.
            message = Commit(number, known, list(tokens), author.epoch, max(0, sent - 64), None, self._credit)
            self._handle(self.peer, message)
            self._send_features(number, known - 1, len(tokens))

    def _send_features(self, number: int, start: int, count: int) -> None:
        if self._features:
            self._handle(self.peer, Features(number, start, count, False, memoryview(b""), "float32"))


def never() -> bool:
    """Return False: nothing arrives."""
    return False


def measure(num_requests: int, options: argparse.Namespace) -> list[Row]:
    """Return all rows for a number of requests."""
    service = Service(num_requests, options)
    gc.collect()
    gc.disable()
    for number in range(options.turns + 20):
        service.turn(commit=number % options.every == options.every - 1)
    gc.enable()
    turns = service.clock.turns[20:]
    case = f"host b{num_requests} every {options.every}" + (" features" if options.features else "")
    entries = statistics.median(turn["entries"] for turn in turns)
    nodes = statistics.mean(turn["nodes"] for turn in turns)
    bursts = statistics.mean(turn["bursts"] for turn in turns)
    print(f"{case}: {entries:.0f} entries, {nodes:.1f} nodes sent a turn, a burst in {bursts:.0%} of the turns")
    rows = []
    for phase, title in PHASES:
        commits = phase in ("gap_commit", "handle", "apply")
        times = [
            turn.get(phase, 0.0) * 1e6
            for turn in turns
            if turn["bursts"] and (phase in turn) and (not commits or "gap_commit" in turn)
        ]
        if not times:
            continue
        cuts = statistics.quantiles(times, n=10)
        print(f"  {title:28s}{statistics.median(times):8.0f}{cuts[8]:8.0f} us")
        rows.append(Row(case, f"{phase}_us", round(statistics.median(times), 1), "us"))
        rows.append(Row(case, f"{phase}_p90_us", round(cuts[8], 1), "us"))
    return rows


def main() -> None:
    """Parse options, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 16, 64])
    parser.add_argument("--nodes", type=int, default=64, help="tree nodes of a verify round, over all requests")
    parser.add_argument("--credit", type=int, help="nodes that a request may have, if not what those make")
    parser.add_argument("--every", type=int, default=3, help="bursts from one commit to the next")
    parser.add_argument("--turns", type=int, default=400)
    parser.add_argument("--features", action="store_true", help="a drafter that takes the target's features")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    rows = [row for number in options.requests for row in measure(number, options)]
    if options.out:
        write_report(options.out, "draft_host", cpu_name(), rows, ("numpy",))


if __name__ == "__main__":
    main()
