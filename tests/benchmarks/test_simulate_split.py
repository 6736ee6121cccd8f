"""The simulation of the split: time, its device and its language, and that messages are exact in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.simulate.language import ORIGIN, VOCAB, Language
from benchmarks.simulate.pool import BurstMemory, Pool
from benchmarks.simulate.split import Scene, Simulation, parse_costs, parse_language
from benchmarks.simulate.world import Costs, SimulatedWorld
from benchmarks.split.bursts import RowState, row_states, seeds_of
from kernels.frontier_state import NUM_FIELDS, RegionPlan, StepTokens
from kernels.frontier_state import CandidatePool as DevicePool
from kernels.reference import frontier
from outrider.drafting.model.burst import FORCED, Burst, BurstShape, Reroots, Seeds, StepBucket
from outrider.drafting.model.cuda_runner import BurstInput, RerootInput
from outrider.tree.author import TreeAuthor

LANGUAGE = Language()
REGION, WIDTH, SEEDS = 64, 8, 24
SHAPE = BurstShape(
    num_rows=4, region=REGION, branching=8, max_seeds=SEEDS, max_steps=6, max_width=WIDTH, page_size=16,
    num_pages=64, max_context=128, feature_size=0,
)  # fmt: skip


def test_nobody_sees_a_message_before_it_arrives_and_waits_end_with_it() -> None:
    world = SimulatedWorld(latency=0.5)
    seen: list[tuple[str, float]] = []

    def verify() -> None:
        world.draft.post(world.verify.now + 0.5, "one")
        world.verify.spend("work", 2000)
        assert world.verify.waiting(), "the answer came at 1.25"
        seen.append((world.verify.take()[0], world.verify.now))
        world.verify.wait(7.0)
        seen.append(("nothing", world.verify.now))

    def draft() -> None:
        while True:
            world.draft.wait(float("inf"))
            seen.append((world.draft.take()[0], world.draft.now))
            world.draft.spend("work", 250)
            world.verify.post(world.draft.now + 0.5, "two")

    world.run(verify, draft)
    assert seen == [("one", 0.5), ("two", 2.0), ("nothing", 7.0)]


def test_what_goes_wrong_in_the_draft_ends_the_world() -> None:
    world = SimulatedWorld(latency=0.5)

    def draft() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        world.run(lambda: world.verify.wait(9.0), draft)


def test_the_language_keeps_the_promise_of_its_chances() -> None:
    text = LANGUAGE.text([1, 2, 3], 3000)
    states = LANGUAGE.states(LANGUAGE.states(ORIGIN, [1, 2, 3])[-1:], text)
    tokens, chances = LANGUAGE.candidates(states[:-1], 8)
    hits = tokens == np.array(text[1:])[:, None]
    assert (np.diff(chances) <= 0).all() and (chances.sum(1) < 1).all()
    assert hits[:, 0].mean() == pytest.approx(0.73, abs=0.04)
    assert hits[:, :4].any(1).mean() == pytest.approx(0.94, abs=0.02)
    assert hits.mean(0) == pytest.approx(chances.mean(0), abs=0.02)


def test_scores_of_a_flatter_draft_promise_less_and_keep_their_order() -> None:
    _, chances = LANGUAGE.candidates(LANGUAGE.states(ORIGIN, range(500)), 8)
    assert (LANGUAGE.scores(chances) == np.log(chances)).all()
    flat = np.exp(Language(flatten=1.5).scores(chances))
    assert flat[:, 0].mean() < chances[:, 0].mean() - 0.1
    assert (np.diff(flat) <= 0).all() and (flat.sum(1) < 1).all()


class Reference:
    """The same burst on the kernels' reference."""

    def __init__(self, burst: Burst, memory: BurstMemory) -> None:
        device = torch.device("cpu")
        held = BurstInput(SHAPE, device)
        held.fill(0, burst)
        held.to_device(0, len(burst.rows))
        size = SEEDS + SHAPE.max_steps * WIDTH * SHAPE.branching
        self.header, self.rows = held.header, held.rows.head(len(burst.rows))
        self.pool = DevicePool(torch.zeros(NUM_FIELDS, size, dtype=torch.int32), SEEDS)
        masks = torch.from_numpy(memory.masks.view(np.int32).copy())
        pages = torch.arange(SHAPE.num_rows * 16, dtype=torch.int32).view(SHAPE.num_rows, 16)
        self.plan = RegionPlan(pages, masks, 16, 0, 0)
        self.step = StepTokens.new(WIDTH, len(burst.rows), REGION // 32, device)
        self.reroot_input = RerootInput(SHAPE, device)
        self.results = torch.zeros(SHAPE.max_steps, WIDTH * (2 + 2 * SHAPE.branching), dtype=torch.int32)
        frontier.begin_burst(self.header, held.seeds, self.pool, self.rows, self.plan)

    def choose(self) -> tuple[list[int], list[int]]:
        """Pool indices and slots that a step takes."""
        frontier.choose_entries(self.header, self.pool, self.rows, self.step, SHAPE.branching)
        frontier.place_entries(self.pool, self.rows, self.step, self.plan)
        return self.step.picked.tolist(), self.step.slots.tolist()

    def append(self, tokens: Any, edges: Any) -> None:
        """What a step's nodes propose."""
        tensors = (torch.from_numpy(tokens), torch.from_numpy(edges))
        frontier.append_candidates(self.header, self.pool, self.step, *tensors, self.results)

    def reroot(self, reroots: Reroots) -> None:
        """New roots, and forced seeds behind them."""
        self.reroot_input.to_device(reroots, len(self.rows.table_rows))
        rows, size = self.reroot_input.rows(len(self.rows.table_rows)), WIDTH * SHAPE.branching
        frontier.reroot_pool(self.header, self.pool, self.rows, self.plan, rows, size)
        frontier.add_seeds(self.pool, self.reroot_input.seeds)


def seeds(*chains: tuple[int, list[int], int]) -> Seeds:
    """Forced chains below context: row of the burst, tree slots, position of the first."""
    columns: dict[str, list[float]] = {name: [] for name in ("rows", "parents", "tokens", "positions", "slots")}
    for row, slots, position in chains:
        for place, slot in enumerate(slots):
            values = (row, slots[place - 1] if place else -1, 7 + place, position + place, slot)
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
    count = len(columns["rows"])
    arrays: Any = {name: np.array(values, np.int32) for name, values in columns.items()}
    return seeds_of(**arrays, features=np.full(count, -1, np.int32), scores=np.full(count, FORCED, np.float32))


def test_the_device_runs_what_the_kernels_reference_runs_past_hits_and_misses() -> None:
    memory = BurstMemory(SHAPE, LANGUAGE)
    for row in (1, 2, 3):
        memory.extend(row, range(row, row + 5), 0)
    live = np.zeros(REGION, np.bool_)
    states = [RowState(row, 5, live, list(range(20, 20 + count))) for row, count in ((2, 30), (1, 9), (3, 12))]
    burst = Burst(row_states(states, REGION), seeds((0, [3, 4], 5), (1, [9], 5), (2, [1], 5)), 2, WIDTH, -6.0)
    reference, pool = Reference(burst, memory), Pool(burst, StepBucket(WIDTH, 4, SHAPE.branching), SHAPE, memory)

    def step() -> tuple[list[int], list[int]]:
        wanted = reference.choose()
        picked, slots, tokens, edges = pool.run()
        assert (picked.tolist(), slots.tolist()) == wanted
        reference.append(tokens, edges)
        return wanted

    step()
    picked, slots = step()
    # A hit in row 0, whose root was run; a miss in row 1, with two tokens that nobody guessed.
    hit = next(place for place, slot in enumerate(slots) if slot >= 20 and picked[place] >= SEEDS)
    more = seeds((1, [10, 11], 6))
    free = [np.array([5, 6], np.int32), np.array([50, 51], np.int32)]
    indices, roots = np.array([picked[hit], -1], np.int32), np.array([-1, -1], np.int32)
    reroots = Reroots(np.array([0, 1], np.int32), indices, roots, np.array([-0.5, 0.0], np.float32), free, more, 4)
    reference.reroot(reroots)
    pool.reroot(reroots)
    assert any(index in (4, 5) for index in step()[0])
    for _ in range(3):
        step()


def simulate(**changes: Any) -> tuple[Simulation, dict[str, float]]:
    """A small scene."""
    simulation = Simulation(Scene(**{"batch": 2, "answers": 2, "tokens": 32} | changes))
    return simulation, simulation.run()


def test_texts_are_the_targets_whatever_is_drafted_and_drafts_make_them_faster() -> None:
    speeds = {}
    for speculate in (True, False):
        simulation = Simulation(Scene(2, 2, 32, speculate=speculate))
        requests: set[Any] = set()
        launch = simulation._device.launch

        def noting(entries: Any, *rest: Any, launch: Any = launch, requests: set[Any] = requests) -> Any:
            requests.update(entry.request for entry in entries)
            return launch(entries, *rest)

        simulation._device.launch = noting  # type: ignore[method-assign]
        speeds[speculate] = simulation.run()["tokens_per_second"]
        assert len(requests) == 4 and simulation.notes.tokens == 2 * 32
        for request in requests:
            prompt = request.tokens[: request.prompt_len]
            assert request.tokens[request.prompt_len :] == LANGUAGE.text(prompt, 32)
    assert speeds[True] > 1.2 * speeds[False]


def test_the_draft_says_what_the_language_holds_below_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    add, extend, known = TreeAuthor.add, TreeAuthor.extend, dict[tuple[int, ...], Any]()

    def state(tokens: tuple[int, ...]) -> Any:
        if tokens not in known:
            known[tokens] = LANGUAGE.states(state(tokens[:-1]), tokens[-1:]) if tokens else ORIGIN
        return known[tokens]

    def check(author: TreeAuthor, parent: int, token: int, score: float) -> None:
        if author.is_live(parent):
            path: list[int] = []
            while parent != author.root:
                path.append(author.node(parent).token)
                parent = author.node(parent).parent
            tokens, chances = LANGUAGE.candidates(state((*author.tokens, *path[::-1])), 16)
            place = tokens[0].tolist().index(token)
            assert score == pytest.approx(float(np.log(chances[0, place])), abs=1e-4)

    def check_one(author: TreeAuthor, parent: int, token: int, score: float, source: int) -> int | None:
        check(author, parent, token, score)
        return add(author, parent, token, score, source)

    def check_all(author: TreeAuthor, *columns: Any) -> int | None:
        first = extend(author, *columns)
        for node in zip(*columns[:3], strict=True):  # parents may be among them
            check(author, *node)
        return first

    monkeypatch.setattr(TreeAuthor, "add", check_one)
    monkeypatch.setattr(TreeAuthor, "extend", check_all)
    _, figures = simulate(tokens=48)
    assert figures["commits_hit_per_s"] > figures["commits_miss_per_s"] > 0


def test_a_run_is_repeatable_and_times_leave_no_trace() -> None:
    (first, figures), (_, again) = simulate(), simulate()
    assert figures == again and first.world.verify.now < 60
    import outrider.drafting.model.burst_grower as growth

    assert growth.perf_counter.__module__ == "time"


def test_a_draft_that_16_requests_gain_nothing_by_rests() -> None:
    """As EAGLE-3 was measured to be, where rounds with nodes had 0.88 times the speed of plain decoding."""
    changes = {
        "language": parse_language(["fluent=0", "shares=0.03,0.3"], 1.2),
        "costs": parse_costs(["step=0.55", "line=1.2", "gap_trees=0.9", "host=2"]),
        "batch": 16, "answers": 16, "tokens": 160,
    }  # fmt: skip
    figures, plain = (simulate(speculate=speculate, **changes)[1] for speculate in (True, False))
    assert figures["tokens_per_second"] > 0.97 * plain["tokens_per_second"]


def test_the_language_is_changed_by_name_and_unknown_figures_are_refused() -> None:
    language = parse_language(["fluent=0", "shares=0.03,0.3"], 1.2)
    assert (language.fluent, language.shares, language.flatten, language.low) == (0, (0.03, 0.3), 1.2, LANGUAGE.low)
    with pytest.raises(SystemExit, match="no such"):
        parse_language(["no such=1"], 1.0)


def test_costs_are_changed_by_name_and_unknown_ones_refused() -> None:
    assert parse_costs(["host=2", "line=0.5"]).line == 0.5
    usual, faster = Costs(), parse_costs(["step=0.5"])
    assert faster.of_step(32, 1) == pytest.approx(usual.of_step(32, 1) / 2) and faster.round == usual.round
    with pytest.raises(SystemExit, match="no such"):
        parse_costs(["no such=1"])
    assert 0 <= LANGUAGE.choose(ORIGIN)[0] < VOCAB
