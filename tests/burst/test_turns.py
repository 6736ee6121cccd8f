"""On a CPU a draft model grows one tree after each commit, and ends early where more is not worth a wait."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.config.draft import DraftOptions
from outrider.drafting.base import Needs
from outrider.drafting.model.build import build_runner
from outrider.drafting.model.burst import FORCED, NUM_SEED_FIELDS, Burst, BurstShape, RowStates, Seeds
from outrider.drafting.model.drafter import GrowthOptions, ModelDrafter
from outrider.drafting.model.torch_runner import HostFrontier, step_pays
from outrider.drafting.requests import introduce
from outrider.models.drafters.base import DraftModel

REGION = 32


def frontier(floor: float = -20.0) -> HostFrontier:
    """One request whose root must be run; two nodes a step, two candidates a node."""
    live = np.zeros((1, REGION), np.bool_)
    free = np.arange(REGION, dtype=np.int32)[None]
    row, length, first, end = (np.array([value], np.int32) for value in (0, 5, 1, REGION))
    fields = np.zeros((NUM_SEED_FIELDS, 1), np.int32)
    fields[:6, 0] = (0, -1, 7, 6, 0, -1)
    fields[6:].view(np.float32)[:, 0] = (FORCED, 0.0)
    burst = Burst(RowStates(row, length, live, free, first, end), Seeds(fields), 4, 2, floor)
    return HostFrontier(burst, 2, [[0] * REGION], (8, 2), 0)


def grow(pool: HostFrontier, place: int, chances: list[list[float]]) -> list[int]:
    """Take a step; its nodes get children of these chances. Returns the tokens that were run."""
    nodes = pool.take()
    edges = [[math.log(chance) for chance in row] for row in chances[: len(nodes)]]
    pool.add(nodes, place, [[10 * node.token, 10 * node.token + 1] for node in nodes], edges)
    return [node.token for node in nodes]


def test_the_chances_of_the_next_step_say_whether_it_is_worth_taking() -> None:
    pool = frontier()
    assert pool.chances == [math.inf], "what must be run is worth everything"
    assert grow(pool, 0, [[0.5, 0.25]]) == [7]
    assert sum(pool.chances) == pytest.approx(0.75)
    assert grow(pool, 2, [[0.2, 0.1], [0.4, 0.1]]) == [70, 71]
    assert sum(pool.chances) == pytest.approx(0.5 * 0.2 + 0.25 * 0.4)


def test_a_node_sees_its_ancestors_and_nothing_below_the_floor_is_run() -> None:
    pool = frontier(floor=math.log(0.2))
    grow(pool, 0, [[0.5, 0.1]])
    (child,) = pool.take()
    assert child.token == 70 and child.position == 7
    assert pool.sees([child], REGION)[0].nonzero()[0].tolist() == sorted({0, child.slot})
    assert not pool.take()


@pytest.mark.parametrize(
    ("region", "ahead", "has_blocks", "in_turns"),
    [
        (64, "auto", False, True),
        (256, "auto", False, False),
        (256, "auto", True, False),
        (64, "always", False, False),
        (256, "always", True, False),
        (256, "never", True, True),
        (256, "never", False, True),
    ],
)
def test_a_draft_grows_ahead_where_it_has_cores_of_its_own(
    region: int, ahead: str, has_blocks: bool, in_turns: bool
) -> None:
    shape = BurstShape(
        num_rows=1,
        region=region,
        branching=4,
        max_seeds=8,
        max_steps=8,
        max_width=8,
        page_size=16,
        num_pages=4,
        max_context=64,
        feature_size=4 if has_blocks else 0,
        has_blocks=has_blocks,
    )
    options = GrowthOptions.choose(DraftOptions(draft_ahead=ahead), shape, Needs(max_positions=64))
    assert (options.lockstep_steps > 0) == (options.min_chance > 0) == in_turns
    assert (options.lone_nodes > 0) == (has_blocks and ahead == "auto")
    assert not options.withholds


@pytest.mark.parametrize(("ahead", "in_turns"), [("auto", True), ("always", False)])
def test_verify_is_told_whether_a_model_grows_one_tree_at_a_time(
    plain_model: DraftModel, ahead: str, in_turns: bool
) -> None:
    options = DraftOptions(speculative_algorithm=("STANDALONE", "NGRAM"), draft_ahead=ahead)
    drafter = ModelDrafter(build_runner(plain_model, options), ("standalone",), Needs())
    assert introduce(drafter, options).drafts_on_demand == in_turns


@pytest.mark.parametrize(
    ("chances", "pays"),
    [([0.95, 0.02], True), ([0.5, 0.2, 0.1, 0.05], False), ([0.1, 0.05], False), ([math.inf], True)],
    ids=["a text that is copied", "guesses", "hardly a guess", "must be run"],
)
def test_a_step_pays_where_what_it_expands_is_sure(chances: list[float], pays: bool) -> None:
    assert step_pays(chances, 0.2, 0.6) == pays
