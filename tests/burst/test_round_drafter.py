"""Trees that grow behind a round are those of best-first growth by the model run over each node's whole text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from tiny_drafts import FEATURE_SIZE, Plain, seen_positions
from torch import Tensor

from kernels.frontier_state import BASE, PARENT, POSITION, ROW, SLOT, TOKEN
from kernels.sampling_state import RoundTokens
from outrider.attention.paged import PromptChunk
from outrider.attention.triton_backend import TritonAttention
from outrider.drafting.model.burst import BurstShape
from outrider.drafting.model.context import WHOLE, ContextCut
from outrider.drafting.model.round_drafter import RoundDrafter, RoundResults, RoundShape
from outrider.models.drafters.base import DraftModel
from outrider.sampling.noise import gumbel
from outrider.sampling.params import SamplingParams

PAGE, NUM_PAGES, ROWS = 4, 64, 4
FLOOR = -6.0


class Target:
    """What a verify service would have on the device: pages, features, and what a round committed."""

    def __init__(self, model: DraftModel, seed: int, feature_size: int = FEATURE_SIZE) -> None:
        self.source = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.lag = 1 if model.feature_size else 0
        self.device = model.device
        self.features = torch.randn(NUM_PAGES * PAGE + 1, feature_size, generator=generator).to(model.device)
        self.free = list(range(NUM_PAGES))
        self.source.shuffle(self.free)
        self.texts: dict[int, list[int]] = {}
        self.pages: dict[int, list[int]] = {}
        self._results: RoundResults | None = None

    def rows(self, slots: Tensor) -> Tensor:
        return self.features.index_select(0, slots)

    def results(self, shape: RoundShape) -> RoundResults:
        assert self._results is not None
        return self._results

    def note_drafted(self) -> None:
        return

    def slot(self, row: int, position: int) -> int:
        return self.pages[row][position // PAGE] * PAGE + position % PAGE

    def feature(self, row: int, position: int) -> Tensor:
        return self.features[self.slot(row, position)]

    def open(self, row: int, length: int, vocab: int) -> None:
        self.texts[row] = [self.source.randrange(vocab) for _ in range(length)]
        self.pages[row] = [self.free.pop() for _ in range(12)]

    def commit(self, counts: dict[int, int], vocab: int, shape: RoundShape, drafts: set[int]) -> None:
        """A round whose rows are the rows of `counts`, in this order."""
        with self.device:
            self._commit(counts, vocab, shape, drafts)

    def _commit(self, counts: dict[int, int], vocab: int, shape: RoundShape, drafts: set[int]) -> None:
        output = torch.zeros(shape.rows, 10, dtype=torch.int32)
        flags = torch.zeros(shape.rows, dtype=torch.int32)
        positions, root, tables = torch.zeros(shape.tokens, dtype=torch.int32), [], []
        for place, (row, count) in enumerate(counts.items()):
            new = [self.source.randrange(vocab) for _ in range(count)]
            positions[place] = len(self.texts[row]) - 1
            self.texts[row] += new
            output[place, 0] = count
            output[place, 2 : 2 + count] = torch.tensor(new, dtype=torch.int32)
            flags[place] = row in drafts
            root.append(place)
            tables.append(row)
        rest = shape.rows - len(root)
        zeros = torch.zeros(shape.tokens, dtype=torch.int32)
        tokens = RoundTokens(
            token_ids=zeros,
            positions=positions,
            parents=zeros,
            rows=zeros,
            first=zeros,
            root=torch.tensor(root + [-1] * rest, dtype=torch.int32),
            table_rows=torch.tensor(tables + [ROWS] * rest, dtype=torch.int32),
            cached_len=zeros,
        )
        self._results = RoundResults(tokens, output[:, 0], output[:, 2:], flags)


def make(model: DraftModel, seed: int, target: Target | None = None) -> tuple[Target, RoundDrafter]:
    target = target or Target(model, seed)
    shape = BurstShape(
        num_rows=ROWS,
        region=64,
        branching=3,
        lone_branching=5,
        max_seeds=1,
        max_steps=4,
        max_width=8,
        page_size=PAGE,
        num_pages=NUM_PAGES,
        max_context=48,
        feature_size=model.feature_size,
        sink_pages=2,
    )
    drafter = RoundDrafter(
        model,
        shape,
        TritonAttention(),
        target,
        target.rows if model.feature_size else None,
        max_round_tokens=16,
        vocab_limit=10_000,
        floor=FLOOR,
    )
    return target, drafter


def admit(target: Target, drafter: RoundDrafter, row: int, sampling: SamplingParams, cut: ContextCut = WHOLE) -> None:
    """The drafter computes all that is committed and not left out, in two parts. It gets some pages later."""
    drafter.admit(row, sampling)
    pages, memory = target.pages[row], drafter.memory
    memory.enter_pages(row, 0, pages[:-2])
    memory.cut(row, cut.gap // PAGE, pages[:-2])
    memory.enter_pages(row, len(pages) - 2, pages[-2:-1])
    late = [(row, len(pages) - 1, pages[-1]), (row, 1, pages[1]), (-1, 0, 0)]
    memory.update_pages(torch.tensor(late, dtype=torch.int32, device=target.device))
    text, lag = target.texts[row], target.lag
    length = len(text) - lag - cut.gap
    for first, end in ((0, length // 2), (length // 2, length)):
        positions = seen_positions(cut, end)[first:]
        slots = [target.slot(row, position) for position in positions]
        own = [memory.sink_start(row) + position if position < cut.sinks else -1 for position in positions]
        into = np.array([there if there >= 0 else slot for there, slot in zip(own, slots, strict=True)], np.int32)
        tokens = [text[position + lag] for position in positions]
        if tokens:
            drafter.compute_context([PromptChunk(row, tokens, first, into, cut.gap)], slots)


Node = tuple[int, tuple[int, ...], float]
"""Row, tokens below the root, path score."""


def grown(
    rows: Iterable[int],
    found: list[Node],
    expand: Callable[[int, tuple[int, ...], float], None],
    num_steps: int,
    width: int,
) -> list[Node]:
    """All nodes of trees, best first. `expand` of a row, a path and its score adds the path's children to `found`."""
    for row in rows:
        expand(row, (), 0.0)
    run: set[tuple[int, tuple[int, ...]]] = set()
    for _ in range(num_steps - 1):
        waiting = [node for node in found if node[:2] not in run and node[2] >= FLOOR]
        for row, path, score in sorted(waiting, key=lambda node: -node[2])[:width]:
            run.add((row, path))
            expand(row, path, score)
    return sorted((node for node in found if node[2] >= FLOOR), key=lambda node: -node[2])


def expected_trees(
    target: Target, model: DraftModel, rows: list[int], params: dict[int, SamplingParams], num_steps: int,
    width: int, branching: int, num_nodes: int, cut: ContextCut = WHOLE,
) -> list[Node]:  # fmt: skip
    """The best nodes, grown one by one, as if there were nothing of what is left out."""
    plain = Plain(model)
    found: list[Node] = []
    handed: dict[tuple[int, tuple[int, ...]], list[Tensor]] = {}

    def expand(row: int, path: tuple[int, ...], score: float) -> None:
        text = target.texts[row]
        seen = seen_positions(cut, len(text) - target.lag - cut.gap)
        given = [target.feature(row, position) for position in seen] if target.lag else []
        own = handed.get((row, path[:-1]), []) if path else []
        tokens = [*text[: target.lag], *[text[position + target.lag] for position in seen]]
        logits, feature = plain([*tokens, *path], [*given, *own])
        if feature is not None:
            handed[row, path] = [*own, feature]
        scale = model.edge_scale
        divisor, tau, noisy = scale.columns(params[row].temperature, True)
        ids = torch.arange(len(logits)) if model.target_ids is None else model.target_ids
        ranks = logits.double() / divisor
        if noisy:
            position = len(text) + len(path)
            noise = gumbel(params[row].seed, params[row].choice_index, position, vocab_size=int(ids.max()) + 1)
            ranks = (ranks + torch.from_numpy(noise.copy())[ids.long()].double()) / tau
        edges = ranks.log_softmax(0)
        for index in edges.topk(branching).indices.tolist():
            found.append((row, (*path, int(ids[index])), score + float(edges[index])))

    return grown(rows, found, expand, num_steps, width)[:num_nodes]


def chosen(drafter: RoundDrafter) -> list[Node]:
    """The same of what the drafter has chosen."""
    entries = drafter.grown.pool.entries
    paths: dict[tuple[int, int], tuple[int, ...]] = {}
    nodes = []
    for index in drafter.grown.order.tolist():
        if index < 0:
            break
        row, parent, slot = (int(entries[field, index]) for field in (ROW, PARENT, SLOT))
        path = (*(paths[row, parent] if parent >= 0 else ()), int(entries[TOKEN, index]))
        if slot >= 0:
            paths[row, slot] = path
        nodes.append((row, path, float(entries[BASE].view(torch.float32)[index])))
        assert len(path) >= 1 and int(entries[POSITION, index]) > 0
    return nodes


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("lone", [True, False])
def test_trees_of_several_rounds_are_those_of_the_model(model: DraftModel, lone: bool, temperature: float) -> None:
    target, drafter = make(model, seed=3)
    vocab = model.target_vocab_size
    rows = [2] if lone else [2, 0, 3]
    params = {row: SamplingParams(temperature=temperature, seed=11 + row) for row in rows}
    for row in rows:
        target.open(row, 5 + 3 * row, vocab)
        admit(target, drafter, row, params[row])
    shape = RoundShape(8, 1) if lone else RoundShape(16, 4)
    branching, width = (5 if lone else 3), 8
    for number, (num_steps, num_nodes) in enumerate([(3, 8), (1, 4), (4, 10)]):
        counts = {row: 1 + (row + number) % 3 for row in rows}
        target.commit(counts, vocab, shape, set(rows))
        drafter.grow(shape, num_steps, num_nodes)
        wanted = expected_trees(target, model, rows, params, num_steps, width, branching, num_nodes)
        found = chosen(drafter)
        assert [node[:2] for node in found] == [node[:2] for node in wanted]
        assert [node[2] for node in found] == pytest.approx([node[2] for node in wanted], abs=2e-4)


def test_what_a_row_leaves_out_counts_for_nothing(model: DraftModel) -> None:
    """The tree is that of the first tokens and the last ones, side by side, for noise at their true positions."""
    target, drafter = make(model, seed=6)
    vocab, cut = model.target_vocab_size, ContextCut(2 * PAGE, 3 * PAGE)
    params = {row: SamplingParams(temperature=0.8, seed=row) for row in (1, 3)}
    target.open(1, 33, vocab)
    admit(target, drafter, 1, params[1], cut)
    target.open(3, 31, vocab)
    admit(target, drafter, 3, params[3])
    for row_cut, row in ((cut, 1), (WHOLE, 3), (cut, 1)):
        target.commit({1: 2, 3: 1}, vocab, RoundShape(16, 4), {1, 3})
        drafter.grow(RoundShape(16, 4), 4, 20)
        wanted = expected_trees(target, model, [row], params, 4, 8, 3, 99, row_cut)
        found = [node for node in chosen(drafter) if node[0] == row]
        assert found and [node[:2] for node in found] == [node[:2] for node in wanted][: len(found)]
        assert [node[2] for node in found] == pytest.approx([node[2] for node in wanted][: len(found)], abs=2e-4)


def test_a_row_that_left_out_pages_is_whole_for_the_next_request(model: DraftModel) -> None:
    target, drafter = make(model, seed=7)
    target.open(1, 33, model.target_vocab_size)
    admit(target, drafter, 1, SamplingParams(), ContextCut(2 * PAGE, 3 * PAGE))
    admit(target, drafter, 1, SamplingParams())
    pages = target.pages[1]
    assert drafter.memory.plan.page_tables[1, : len(pages)].tolist() == pages
    assert not drafter.memory.shifts.any()


def test_rows_that_are_not_drafted_get_no_nodes(model: DraftModel) -> None:
    target, drafter = make(model, seed=4)
    vocab = model.target_vocab_size
    for row in (1, 2):
        target.open(row, 6, vocab)
        admit(target, drafter, row, SamplingParams(temperature=0.0))
    target.commit({1: 2, 2: 1}, vocab, RoundShape(16, 4), {2})
    drafter.grow(RoundShape(16, 4), 3, 6)
    assert {row for row, _, _ in chosen(drafter)} == {2}
    target.commit({1: 2, 2: 1}, vocab, RoundShape(16, 4), set())
    drafter.grow(RoundShape(16, 4), 3, 6)
    assert chosen(drafter) == []


def test_a_cleared_pool_is_not_run_by_steps_of_any_shape(model: DraftModel) -> None:
    """As captures do: steps of all shapes run on what the others left in the pool."""
    _, drafter = make(model, seed=5)
    steps = drafter._steps
    steps.clear()
    for _ in range(2):
        for rows in (4, 1, 2):
            steps.run(drafter.step_shape(rows))
    for rows in (4, 1, 2):
        entries = steps.pool(drafter.step_shape(rows)).entries
        assert not (entries[SLOT] >= 0).logical_and(entries[BASE].view(torch.float32) > -torch.inf).any()
