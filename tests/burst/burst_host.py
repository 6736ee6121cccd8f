"""A host for runners: keeps trees of several requests, grows them by bursts, and checks every candidate."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from tiny_drafts import Plain
from torch import Tensor

from benchmarks.split.bursts import RowState, row_list, row_states, seeds_of
from outrider.drafting.model.burst import FORCED, Burst, BurstResult, Extent, Reroots
from outrider.drafting.model.runner import BurstRunner, PendingBurst
from outrider.models.drafters.base import DraftModel
from outrider.sampling.noise import gumbel
from outrider.sampling.params import SamplingParams


@dataclass
class Node:
    """A token that was run or could be: all tokens up to it, and the features that each but the first took."""

    row: int
    tokens: tuple[int, ...]
    score: float
    parent: Node | None
    slot: int = -1
    features: tuple[Tensor, ...] = ()
    given: int = -1
    logits: Tensor | None = None
    output: Tensor | None = None
    """The feature that it hands its children."""

    @property
    def position(self) -> int:
        return len(self.tokens) - 1

    def above(self) -> list[Node]:
        """Itself and what it descends from, nearest first."""
        return [self, *([] if self.parent is None else self.parent.above())]


@dataclass
class Request:
    """What a host knows of a row."""

    tokens: list[int]
    sampling: SamplingParams
    context_len: int
    pages: list[int] = field(default_factory=list)
    root: Node | None = None
    nodes: dict[int, Node] = field(default_factory=dict)
    """Live ones by tree slot."""
    waiting: list[Node] = field(default_factory=list)
    """Candidates."""
    forced: list[Node] = field(default_factory=list)
    truth: dict[int, Tensor] = field(default_factory=dict)
    """The target's features by position."""


RESULT_FIELDS = ("picked", "slots", "tokens", "scores")


def burst_line(result: BurstResult) -> int:
    """Candidates of a step."""
    return int(result.tokens.shape[1] * result.tokens.shape[2])


class Host:
    """Drives one runner; `check` compares what each node proposes with the model run plainly."""

    def __init__(self, runner: BurstRunner, model: DraftModel, tolerance: float = 2e-4) -> None:
        self.runner, self.model, self.tolerance = runner, model, tolerance
        self.plain = Plain(model)
        self.requests: dict[int, Request] = {}
        self.free_pages = list(range(runner.shape.num_pages))
        self.num_checked = 0
        self._more_free: dict[int, list[int]] = {}  # by row, slots that the burst under way was given later
        self._generator = torch.Generator().manual_seed(1)

    @property
    def lag(self) -> int:
        return self.runner.shape.lag

    def open(self, row: int, prompt: list[int], sampling: SamplingParams | None = None) -> Request:
        """All but the last token become context."""
        return self.open_all({row: prompt}, sampling)[0]

    def open_all(self, prompts: dict[int, list[int]], sampling: SamplingParams | None = None) -> list[Request]:
        """The same for several rows, whose contexts are computed together, in two parts."""
        extents = [self._extents(row, prompt, sampling) for row, prompt in prompts.items()]
        for part in zip(*extents, strict=True):
            self.runner.extend(part)
        return [self.requests[row] for row in prompts]

    def _extents(self, row: int, prompt: list[int], sampling: SamplingParams | None) -> list[Extent]:
        sampling = sampling or SamplingParams(temperature=0.0)
        request = self.requests[row] = Request(list(prompt), sampling, len(prompt) - 1 - self.lag)
        self.runner.open(row, sampling)
        self._reserve(row)
        if self.lag:
            for position in range(len(prompt)):
                request.truth[position] = self._true_feature()
        count = len(prompt) - 1
        known = tuple(request.truth[p] for p in range(count)) if self.lag else ()
        request.root = Node(row, tuple(prompt), 0.0, None, slot=0, features=known, given=0 if self.lag else -1)
        request.forced = [request.root]
        # The first token takes none.
        taken = torch.stack([request.truth[max(p - 1, 0)] for p in range(count)]) if self.lag else None
        middle = max(count // 2, self.lag)
        bounds = ((self.lag, middle), (middle, count))
        return [
            Extent(row, prompt[a:b], a, () if taken is None else self._given(taken[a:b]).split(3)) for a, b in bounds
        ]

    def close(self, row: int) -> None:
        self.free_pages += self.requests.pop(row).pages
        self.runner.close(row)

    def burst(
        self, num_steps: int, width: int, floor: float = -50.0, rows: list[int] | None = None, num_free: int = 1000
    ) -> tuple[Burst, list[Node]]:
        """What to launch, and its seeds."""
        rows = list(self.requests) if rows is None else rows
        seeds: list[Node] = []
        features: list[Tensor] = []
        states = []
        for row in rows:
            request = self.requests[row]
            for node in request.forced:
                if node.given >= 0:
                    node.given = len(features)
                    features.append(node.features[-1])
            seeds += request.forced
            live = np.zeros(self.runner.shape.region, np.bool_)
            live[list(request.nodes)] = True
            taken = {*request.nodes, *(node.slot for node in request.forced)}
            free = [slot for slot in range(self.runner.shape.region) if slot not in taken]
            states.append(RowState(row, request.context_len, live, free[:num_free]))
        forced = len(seeds)
        seeds += sorted((node for row in rows for node in self.requests[row].waiting), key=lambda node: -node.score)
        seeds = seeds[: self.runner.shape.max_seeds]
        scores = [float(FORCED)] * forced + [node.score for node in seeds[forced:]]
        parts = [self._given(torch.stack(part)) for part in (features[:1], features[1:]) if part]

        def ints(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
            return np.array(values, np.int32)

        seed_block = seeds_of(
            rows=ints([rows.index(node.row) for node in seeds]),
            parents=ints([self._parent_slot(node) for node in seeds]),
            tokens=ints([node.tokens[-1] for node in seeds]),
            positions=ints([node.position for node in seeds]),
            scores=np.array(scores, np.float32),
            slots=ints([node.slot for node in seeds]),
            features=ints([node.given for node in seeds]),
        )
        return Burst(row_states(states, self.runner.shape.region), seed_block, num_steps, width, floor, parts), seeds

    def merge(
        self,
        burst: Burst,
        seeds: list[Node],
        result: BurstResult,
        check: bool = True,
        pool: dict[int, Node] | None = None,
    ) -> list[Node]:
        """Nodes that were run; their candidates wait from now on. `pool`: what was left by the part before."""
        num_steps, width, branching = result.tokens.shape
        if pool is None:
            pool = dict(enumerate(seeds))
        ran: list[Node] = []
        for step, place in np.ndindex(num_steps, width):
            index, slot = int(result.picked[step, place]), int(result.slots[step, place])
            if index < 0:
                assert slot == -1 and (result.tokens[step, place] == -1).all()
                continue
            node = pool.pop(index)
            self._ran(burst, node, slot)
            ran.append(node)
            forced_above_root = node in self.requests[node.row].forced[:-1]
            if check:
                self._check(node, result.tokens[step, place], result.scores[step, place])
            for child in range(branching):
                token = int(result.tokens[step, place, child])
                if token < 0 or forced_above_root:
                    continue
                score = (0.0 if node is self.requests[node.row].root else node.score) + float(
                    result.scores[step, place, child]
                )
                features = (*node.features, node.output) if node.output is not None else ()
                child_node = Node(node.row, (*node.tokens, token), score, node, features=features)
                first = result.first
                pool[first + (step * width + place) * branching + child] = child_node
        for request in (self.requests[state.row] for state in row_list(burst.rows)):
            request.forced = [node for node in request.forced if node not in ran]
        left = [node for node in pool.values() if node not in seeds or node.score <= 0]
        for state in row_list(burst.rows):
            request = self.requests[state.row]
            request.waiting = [node for node in left if node.row == state.row and node not in request.forced]
        return ran

    def in_parts(self, burst: Burst, steps: list[int]) -> BurstResult:
        """A burst of `steps[0]` that goes on by the others; the results of all, as if it were one."""
        parts: list[PendingBurst] = [self.runner.launch(burst)]
        for count in steps[1:]:
            more = parts[-1].go_on(count)
            assert more is not None
            parts.append(more)
        results = [part.wait() for part in parts]
        line = burst_line(results[0])
        for result, done in zip(results, np.cumsum([0, *steps]).tolist(), strict=False):
            assert result.first == results[0].first + done * line
        joined = [np.concatenate([getattr(result, name) for result in results]) for name in RESULT_FIELDS]
        return BurstResult(results[0].first, *joined)

    def past_commit(
        self, row: int, tokens: list[int], steps: tuple[int, int], width: int, floor: float, check: bool = True
    ) -> tuple[list[Node], list[Node], list[Node]]:
        """A burst that goes on past a commit to a known node; what could be run then, best first, and what parts ran.

        At first it may fill slots for one more step, and those of nodes that died from the commit on.
        """
        request = self.requests[row]
        burst, seeds = self.burst(steps[0], width, floor)
        burst.rows.free_ends[burst.rows.rows == row] = (steps[0] + 1) * width
        path = (*request.tokens, *tokens)
        held = {node.tokens: node for node in request.nodes.values()}
        root = held.get(path) or next(node for node in seeds if node.tokens == path)
        kept = root.above()
        dead = [slot for slot, node in request.nodes.items() if root not in node.above() and node not in kept]
        reroots = Reroots(
            rows=np.array([burst.rows.rows.tolist().index(row)], np.int32),
            indices=np.array([-1 if root.slot >= 0 else seeds.index(root)], np.int32),
            slots=np.array([root.slot], np.int32),
            shifts=np.array([root.score], np.float32),
            free=[np.array(dead, np.int32)],
        )
        self._more_free[row] = dead
        pending = self.runner.launch(burst)
        more = pending.go_on(steps[1], reroots)
        assert more is not None
        pool = dict(enumerate(seeds))
        first = self.merge(burst, seeds, pending.wait(), check, pool)
        was_run = root.slot >= 0
        self.commit(row, tokens, move=False)
        if not was_run:  # the same burst runs it, wherever that puts it
            root.slot, request.forced = -1, []
        alive = [node for node in pool.values() if node.row != row or root in node.above()]
        ready = sorted((node for node in alive if node.score >= floor), key=lambda node: -node.score)
        pool = {index: node for index, node in pool.items() if node in alive}
        second = self.merge(burst, seeds, more.wait(), check, pool)
        self._more_free.clear()
        return ready, first, second

    def past_miss(self, row: int, tokens: list[int], steps: tuple[int, int], width: int) -> list[Node]:
        """A burst that goes on past a commit of tokens that nobody guessed; what the part behind it ran."""
        request, shape, count = self.requests[row], self.runner.shape, len(tokens)
        assert request.root is not None
        burst, seeds = self.burst(steps[0], width, -20.0, num_free=24)
        place = burst.rows.rows.tolist().index(row)
        slots = [slot for slot in range(shape.region) if slot not in request.nodes][: -count - 1 : -1]
        forced = seeds_of(
            rows=np.full(count, place, np.int32),
            parents=np.array([request.root.slot, *slots[:-1]], np.int32),
            tokens=np.array(tokens, np.int32),
            positions=np.arange(count, dtype=np.int32) + len(request.tokens),
            scores=np.full(count, FORCED, np.float32),
            slots=np.array(slots, np.int32),
            features=np.full(count, -1, np.int32),
        )
        nowhere, none = np.array([-1], np.int32), [np.empty(0, np.int32)]
        reroots = Reroots(
            np.array([place], np.int32), nowhere, nowhere, np.zeros(1, np.float32), none, forced, len(seeds)
        )
        pending = self.runner.launch(burst)
        more = pending.go_on(steps[1], reroots)
        assert more is not None
        pool = dict(enumerate(seeds))
        self.merge(burst, seeds, pending.wait(), pool=pool)
        self.commit(row, tokens, move=False)
        for node, slot in zip(request.forced, slots, strict=True):
            node.slot = slot
        pool = {index: node for index, node in pool.items() if node.row != row}
        pool |= {len(seeds) + index: node for index, node in enumerate(request.forced)}
        return self.merge(burst, seeds, more.wait(), pool=pool)

    def step(self, num_steps: int, width: int, check: bool = True, **options: object) -> list[Node]:
        """Launch, wait, merge."""
        burst, seeds = self.burst(num_steps, width, **options)  # type: ignore[arg-type]
        return self.merge(burst, seeds, self.runner.launch(burst).wait(), check)

    def commit(self, row: int, tokens: list[int], move: bool = True) -> None:
        """Re-root below committed tokens. What was run moves to the context; what was not is forced."""
        request = self.requests[row]
        assert request.root is not None
        path = [request.root]
        for token in tokens:
            wanted = (*path[-1].tokens, token)
            known = [node for node in (*request.nodes.values(), *request.waiting) if node.tokens == wanted]
            parent = path[-1]
            path.append(known[0] if known else Node(row, wanted, 0.0, parent, features=self._inherit(request, parent)))
        request.tokens += tokens
        self._reserve(row)
        root = path[-1]
        committed = [node for node in reversed(root.above()) if node is not root and node.slot >= 0]
        committed = [node for node in committed if request.nodes.get(node.slot) is node]
        if move:
            self.runner.move(row, [node.slot for node in committed], request.context_len)
            request.context_len += len(committed)
            kept: list[Node] = []
        else:
            kept = committed
        alive = [node for node in request.nodes.values() if root in node.above()]
        request.nodes = {node.slot: node for node in (*kept, *alive)}
        request.waiting = [node for node in request.waiting if root in node.above() and node is not root]
        above = 0.0 if root.slot < 0 else root.score
        for node in (*alive, *request.waiting):
            node.score -= above if node is not root else 0.0
        root.score = 0.0
        request.root = root
        missing = [node for node in path if node.slot < 0]
        taken = set(request.nodes)
        for node in missing:
            node.slot = next(slot for slot in range(self.runner.shape.region) if slot not in taken)
            taken.add(node.slot)
        request.forced = missing

    def _ran(self, burst: Burst, node: Node, slot: int) -> None:
        request = self.requests[node.row]
        state = next(state for state in row_list(burst.rows) if state.row == node.row)
        free = [*state.free, *self._more_free.get(node.row, ())]
        assert node.slot == slot or (node.slot < 0 and slot in free), "a slot that was not free"
        assert slot not in request.nodes or request.nodes[slot] is node, "a slot that is in use"
        node.slot = slot
        request.nodes[slot] = node
        if node.given < 0 and self.lag and node.parent is not None:
            assert node.parent.output is not None, "run before its parent"
            node.features = (*node.features[: node.position - 1], node.parent.output)
            if len(node.features) < node.position:
                node.features = (*node.parent.features, node.parent.output)
        node.logits, node.output = self.plain(node.tokens, node.features)

    def _check(self, node: Node, tokens: np.ndarray, scores: np.ndarray) -> None:  # type: ignore[type-arg]
        """The node's candidates are those of the model run over all its tokens, without any KV kept."""
        wanted_tokens, wanted_scores = self.expected(node, len(tokens))
        np.testing.assert_allclose(scores, wanted_scores, atol=self.tolerance, rtol=1e-3)
        close = np.abs(np.diff(wanted_scores)) < 4 * self.tolerance
        if not close.any():
            assert tokens.tolist() == wanted_tokens
        self.num_checked += 1

    def expected(self, node: Node, count: int) -> tuple[list[int], np.ndarray]:  # type: ignore[type-arg]
        assert node.logits is not None
        logits = node.logits.double().cpu()
        sampling = self.requests[node.row].sampling
        mapped = self.model.target_ids
        ids = np.arange(len(logits)) if mapped is None else mapped.cpu().numpy()
        scale, temperature = self.model.edge_scale, sampling.temperature
        noise = gumbel(sampling.seed, sampling.choice_index, node.position + 1, ids)
        logits = scale.log_q * logits + scale.noise * temperature * torch.from_numpy(noise)
        scores, order = logits.log_softmax(-1).sort(descending=True)
        return ids[order[:count].numpy()].tolist(), scores[:count].numpy()

    def _parent_slot(self, node: Node) -> int:
        parent = node.parent
        if parent is None:
            return -1
        request = self.requests[node.row]
        held = request.nodes.get(parent.slot) is parent or parent in request.forced
        # The feature of a token that has moved to the context stays in its slot until that is filled again.
        return parent.slot if held or self.lag else -1

    def _inherit(self, request: Request, parent: Node) -> tuple[Tensor, ...]:
        return parent.features if self.lag else ()

    def _reserve(self, row: int) -> None:
        request, size = self.requests[row], self.runner.shape.page_size
        while len(request.pages) * size < len(request.tokens) + 1:
            request.pages.append(self.free_pages.pop())
        self.runner.set_pages(row, request.pages)

    def _given(self, rows: Tensor) -> Tensor:
        """Features where the runner's `project` leaves them, in its dtype."""
        held = self.runner.memory.features
        assert held is not None
        return rows.to(held.device, held.dtype)

    def _true_feature(self) -> Tensor:
        made = torch.randn(self.runner.shape.feature_size, generator=self._generator)
        return made.to(self.model.device, self.model.dtype)
