from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch
from examples import examples
from frontier_burst import BRANCHING, Burst, Entry, make_burst
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.frontier import append_candidates, place_entries
from kernels.frontier_state import BASE, NOT_HERE, POSITION, SCORE, SLOT, TOKEN
from kernels.launch import triton_on_cpu
from kernels.reference import frontier as reference

FORCED = 1e30
CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter; the other tests run on the GPU")


def check_same(ours: Burst, theirs: Burst) -> None:
    for name, actual, expected in ours.compare(theirs):
        assert torch.equal(actual, expected), f"{name}: {actual.tolist()} instead of {expected.tolist()}"


def run_both(ours: Burst, theirs: Burst, num_steps: int, seed: int = 0) -> None:
    """The same burst by the functions under test and by the reference."""
    ours.begin()
    theirs.begin(reference)
    check_same(ours, theirs)
    generator, source = torch.Generator().manual_seed(seed), random.Random(seed)
    for _ in range(num_steps):
        reroots = theirs.random_reroot_input(source)
        ours.reroot(reroots.to(ours.header.device))
        theirs.reroot(reroots, reference)
        check_same(ours, theirs)
        more = theirs.random_more(source)
        ours.add(more)
        theirs.add(more, reference)
        check_same(ours, theirs)
        candidates = ours.candidates(generator)
        ours.run_step(*candidates)
        theirs.run_step(*candidates, reference)
        check_same(ours, theirs)


def test_best_first_grouped_by_row(device: str) -> None:
    burst = make_burst(
        [
            Entry(row=1, token=10, score=-1.0, position=7, parent=0),
            Entry(row=0, token=11, score=-0.5, position=5, parent=2),
            Entry(row=1, token=12, score=-3.0, position=8, parent=1),
            Entry(row=0, token=13, score=-1.0, position=5, parent=0),
        ],
        free=[[7, 3], [9, 4]],
        width=4,
        floor=-2.0,
        device=device,
    )
    burst.begin()
    burst.choose()
    assert burst.step.order.tolist() == [1, 0, 3, -1]
    burst.place()
    step = burst.step
    assert step.picked.tolist() == [1, 3, 0, -1]
    assert step.slots.tolist() == [7, 3, 9, -1]
    assert step.first.tolist() == [0, 2, 3]
    assert step.token_ids.tolist() == [11, 13, 10, 0]
    assert step.rows.tolist() == [0, 0, 1, -1]
    assert step.order.tolist() == [-1] * 4
    assert burst.rows.next_free.tolist() == [2, 1]
    # Slots 7 and 9 see their parents' masks and themselves.
    assert burst.seen(0) == burst.stored(0, 2) | {7}
    assert burst.seen(2) == burst.stored(1, 0) | {9}
    assert burst.seen(3) == set()


def test_forced_chain_runs_first_and_sees_itself(device: str) -> None:
    """Committed tokens below tree slot 5, the last of which is the root: only that one proposes."""
    chain = [
        Entry(row=0, token=t, score=FORCED, position=20 + t, parent=[5, 1, 33][t], slot=[1, 33, 2][t]) for t in range(3)
    ]
    chain[2].base = 0.0
    child = Entry(row=0, token=8, score=-0.1, position=23, parent=2)
    burst = make_burst([*chain, child], free=[[6]], width=4, region=64, device=device)
    burst.clear_masks()
    burst.store(0, 5, {4, 5})
    burst.set_live(0, {4, 5})
    burst.begin()
    burst.choose()
    burst.place()
    assert burst.step.slots.tolist() == [1, 33, 2, 6]
    assert [burst.seen(place) for place in range(4)] == [
        {4, 5, 1},
        {4, 5, 1, 33},
        {4, 5, 1, 33, 2},
        {4, 5, 1, 33, 2, 6},
    ]
    assert burst.stored(0, 2) == {4, 5, 1, 33, 2}
    tokens = torch.full((4, BRANCHING), 3, dtype=torch.int32, device=device)
    burst.append(tokens, torch.full((4, BRANCHING), -0.25, device=device))
    scores = burst.pool.entries[SCORE].view(torch.float32)[burst.pool.max_seeds :][: 4 * BRANCHING]
    never = float("-inf")
    assert scores[::BRANCHING].tolist() == pytest.approx([never, never, -0.25, -0.35])


def test_an_ancestor_that_is_context_now_is_forgotten(device: str) -> None:
    burst = make_burst([Entry(row=0, token=1, score=-1.0, position=9, parent=3)], free=[[5]], width=1, device=device)
    burst.clear_masks()
    burst.store(0, 3, {0, 5, 3})
    burst.set_live(0, {3})
    burst.begin()
    burst.choose()
    burst.place()
    # Slot 5 was an ancestor's before it was committed; now it is the node's own, not visible to slot 3.
    assert burst.seen(0) == {3, 5}
    assert burst.stored(0, 3) == {3}


def test_a_token_waits_for_its_parents_feature(device: str) -> None:
    """With features, a chain without given ones takes a step for each of its tokens."""
    chain = [
        Entry(row=0, token=t, score=FORCED, position=4 + t, parent=t - 1, slot=t, feature=[0, -1, 1][t])
        for t in range(3)
    ]
    burst = make_burst(chain, free=[[]], width=4, lag=1, device=device)
    zero_row = burst.plan.slot_masks.shape[0] * burst.plan.slot_masks.shape[1]
    table_row = int(burst.rows.table_rows[0])
    expected = [
        ([0], [zero_row + 1]),
        ([1, 2], [table_row * burst.region + 0, zero_row + 2]),
    ]
    burst.begin()
    for slots, sources in expected:
        burst.choose()
        burst.place()
        assert burst.step.slots.tolist()[: len(slots) + 1] == [*slots, -1]
        assert burst.step.sources.tolist()[: len(slots)] == sources
        assert burst.step.rotary.tolist()[: len(slots)] == [3 + slot for slot in slots]
        burst.append(*burst.candidates(torch.Generator().manual_seed(0)))


def test_a_row_without_free_slots_makes_room_for_others(device: str) -> None:
    crowd = [Entry(row=0, token=i, score=-0.1, position=3, parent=0) for i in range(6)]
    burst = make_burst([*crowd, Entry(row=1, token=9, score=-5.0, position=3, parent=0)], free=[[8], [8, 9]], width=4,
                       device=device)  # fmt: skip
    burst.begin()
    ran = []
    for _ in range(2):
        burst.choose()
        burst.place()
        ran.append(burst.step.picked.tolist())
        burst.append(*burst.candidates(torch.Generator().manual_seed(0), low=-40.0, high=-30.0))
    assert ran == [[0, -1, -1, -1], [6, -1, -1, -1]]


def test_a_new_root_keeps_what_hangs_below_it(device: str) -> None:
    """The others leave the pool, of that row alone; scores count from the new root, and slots that died are filled."""
    seeds = [
        Entry(row=0, token=1, score=-1.5, position=9, parent=4),  # below slot 3, which is the new root
        Entry(row=0, token=2, score=-1.0, position=8, parent=3),
        Entry(row=0, token=3, score=-0.5, position=8, parent=2),
        Entry(row=1, token=4, score=-2.0, position=7, parent=3),
        Entry(row=0, token=5, score=-0.9999, position=9, parent=3),
    ]
    burst = make_burst(seeds, free=[[], [20]], width=4, floor=-1.6, device=device)
    burst.clear_masks()
    for row, slot, seen in ((0, 2, {1, 2}), (0, 3, {1, 3}), (0, 4, {1, 3, 4}), (1, 3, {3})):
        burst.store(row, slot, seen)
    burst.rows.live.fill_(-1)
    burst.begin()
    burst.reroot(burst.reroot_input({0: (-1, 3, -1.0)}, {0: [2, 9]}))
    scores = burst.pool.entries[SCORE].view(torch.float32)[:5]
    assert scores.tolist() == pytest.approx([-0.5, 0.0, float("-inf"), -2.0, 0.0])
    assert burst.pool.entries[BASE].view(torch.float32)[[0, 1, 3, 4]].tolist() == pytest.approx([-0.5, 0.0, -2.0, 0.0])
    burst.choose()
    burst.place()
    assert burst.step.picked.tolist() == [1, 4, -1, -1] and burst.step.slots.tolist() == [2, 9, -1, -1]
    assert burst.seen(0) == {1, 2, 3}
    burst.reroot(burst.reroot_input({}, {0: [7]}))
    assert burst.rows.num_free.tolist() == [3, 1] and burst.rows.next_free.tolist() == [2, 0]


@pytest.mark.parametrize("was_run", [False, True])
def test_a_new_root_may_be_an_entry_of_the_pool(device: str, was_run: bool) -> None:
    """The device knows whether it was run, and where; if not, it is what is left."""
    seeds = [Entry(0, token, score, 8, parent=1) for token, score in ((1, -0.5), (2, -1.0))]
    burst = make_burst(seeds, free=[[6, 7, 8, 9]], width=2, device=device)
    burst.clear_masks()
    burst.begin()
    if was_run:
        tokens = torch.tensor([[21, 22, -1], [30, 31, 32]], dtype=torch.int32, device=device)
        burst.run_step(tokens, torch.tensor([[-0.1, -1.0, -2.0], [-0.25, -0.5, -3.0]], device=device))
        assert burst.pool.entries[SLOT, :2].tolist() == [6, 7]
    burst.reroot(burst.reroot_input({0: (1, -1, -1.0)}, {}))
    burst.choose()
    first = burst.pool.max_seeds + BRANCHING
    assert burst.step.order.tolist() == ([first, first + 1] if was_run else [1, -1])
    scores = burst.pool.entries[SCORE].view(torch.float32)
    assert scores[burst.step.order[0]] == (-0.25 if was_run else 0.0)


def test_nothing_stays_of_a_row_whose_new_root_nobody_guessed(device: str) -> None:
    """Further seeds stand behind the others, and are run first if they are forced."""
    seeds = [Entry(0, 1, -0.5, 8, parent=1), Entry(1, 2, -0.1, 8, parent=1), Entry(0, 3, -0.5, 8, parent=-1)]
    burst = make_burst(seeds, free=[[6, 7], [6]], width=4, device=device)
    burst.clear_masks()
    burst.store(0, 1, {1})
    burst.begin()
    burst.reroot(burst.reroot_input({0: (-1, NOT_HERE, 0.0)}, {}))
    scores = burst.pool.entries[SCORE].view(torch.float32)
    assert scores[:3].tolist() == pytest.approx([float("-inf"), -0.1, float("-inf")])
    burst.add([Entry(0, 30, FORCED, 8, parent=1, slot=9), Entry(0, 31, FORCED, 9, parent=9, slot=3, base=0.0)])
    burst.choose()
    burst.place()
    assert burst.step.picked.tolist() == [3, 4, 1, -1] and burst.step.slots.tolist() == [9, 3, 6, -1]
    assert burst.step.bases[:2].tolist() == [float("-inf"), 0.0]
    assert burst.stored(0, 3) == {1, 3, 9}
    before = burst.pool.entries.clone()
    burst.add([])
    assert torch.equal(burst.pool.entries, before)


def test_slots_that_were_given_later_lie_behind_those_before(device: str) -> None:
    crowd = [Entry(row=0, token=i, score=-0.1 * (i + 1), position=3) for i in range(6)]
    burst = make_burst(crowd, free=[list(range(30))], width=2, device=device)
    burst.clear_masks()
    burst.rows.next_free[0] = 29
    burst.begin()
    burst.reroot(burst.reroot_input({}, {0: [3, 4, 5, 6]}))
    assert burst.rows.num_free.tolist() == [34]
    found = []
    for _ in range(3):
        burst.choose()
        burst.place()
        found += burst.step.slots.tolist()
    assert found == [29, 3, 4, 5, 6, -1]


def test_candidates_join_the_pool(device: str) -> None:
    burst = make_burst([Entry(row=0, token=5, score=-0.5, position=6, parent=0)], free=[[4, 5, 6]], width=2,
                       device=device)  # fmt: skip
    burst.begin()
    burst.choose()
    burst.place()
    tokens = torch.tensor([[21, 22, -1], [30, 31, 32]], dtype=torch.int32, device=device)
    edges = torch.tensor([[-0.1, -1.0, -2.0], [-0.1, -0.2, -0.3]], device=device)
    burst.append(tokens, edges)
    first, never = burst.pool.max_seeds, float("-inf")
    entries = burst.pool.entries[:, first : first + 6]
    assert entries[SCORE].contiguous().view(torch.float32).tolist() == pytest.approx([-0.6, -1.5, *[never] * 4])
    assert entries[TOKEN, :2].tolist() == [21, 22] and entries[POSITION, :2].tolist() == [7, 7]
    assert entries[SLOT].tolist() == [-1] * 6
    assert burst.pool.entries[SLOT, 0] == 4
    result = burst.results[0]
    assert result[:4].tolist() == [0, -1, 4, -1]
    assert result[4:10].tolist() == [21, 22, -1, -1, -1, -1]
    assert result[10:].view(torch.float32).tolist() == pytest.approx([-0.1, -1.0, *[never] * 4])
    burst.choose()
    assert burst.step.order.tolist() == [first, first + 1]
    assert burst.header[0] == 1


@settings(max_examples=examples(6))
@given(
    seed=st.integers(0, 10_000),
    num_rows=st.integers(1, 4),
    width=st.sampled_from([1, 3, 8]),
    lag=st.integers(0, 1),
    region=st.sampled_from([32, 64]),
    num_free=st.integers(0, 12),
    forced=st.integers(0, 5),
)
@CPU_ONLY
def test_random_bursts(seed: int, num_rows: int, width: int, lag: int, region: int, num_free: int, forced: int) -> None:
    made = [
        Burst.random(seed, num_rows, width, lag=lag, region=region, num_free=num_free, forced=forced, device="cpu")
        for _ in range(2)
    ]
    with triton_on_cpu():
        run_both(*made, num_steps=3, seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8, 64, 128])
def test_large_bursts(width: int) -> None:
    made = [
        Burst.random(3, 16, width, lag=1, region=256, num_free=60, forced=4, device=device, num_seeds=500)
        for device in ("cuda", "cpu")
    ]
    run_both(*made, num_steps=6)


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    burst = make_burst([], free=[[]], width=2, device=device)
    tokens = torch.zeros(2, BRANCHING, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="do not fit the step"):
        append_candidates(burst.header, burst.pool, burst.step, tokens[:1], tokens[:1].float(), burst.results)
    with pytest.raises(ValueError, match="cannot hold"):
        deep = torch.zeros(99, burst.results.shape[1], dtype=torch.int32, device=device)
        append_candidates(burst.header, burst.pool, burst.step, tokens, tokens.float(), deep)
    with pytest.raises(ValueError, match="new roots"):
        burst.reroot(burst.reroot_input({}, {})[:, 1:])
    step = type(burst.step).new(2, 1, 7, torch.device(device))
    with pytest.raises(ValueError, match="regions"):
        place_entries(burst.pool, burst.rows, step, burst.plan)
    assert {field.name for field in fields(burst.step)} >= {"picked", "slots"}
