"""A device that counts in float32 may find a node worth running that float64 finds just short of it."""

from __future__ import annotations

import math

import numpy as np
from growth_rig import shape
from integrity import check_forest

from outrider.drafting.model.burst import BurstResult
from outrider.drafting.model.entries import BurstCollector
from outrider.drafting.model.forest import DraftForest

FLOOR = math.log(0.001)


def test_a_node_that_rounding_lifts_over_the_floor_stays_in_its_tree() -> None:
    forest = DraftForest(shape(region=256, num_rows=4), FLOOR, 4096)
    for row, token in ((1, 5), (2, 6)):
        forest.set_root(row, token, 3, 0)
    forest.quotas[:] = 50
    rows = np.array([1, 2])
    starts, ends = forest.slots.lease(rows, np.array([20, 20]))
    first, second = forest.slots.stacks[1, starts[0] : ends[0]].tolist()[:2]
    collector = BurstCollector(np.array([forest.roots[1]]), 72)
    below = np.nextafter(np.float32(FLOOR), np.float32(-np.inf))

    def part(at: int, entry: int, slot: int, edges: list[np.float32]) -> BurstResult:
        """A step of one node and two candidates."""
        picked, slots = np.array([[entry, -1]], np.int32), np.array([[slot, -1]], np.int32)
        tokens = np.array([[[11, 12], [-1, -1]]], np.int32)
        return BurstResult(at, picked, slots, tokens, np.array([[edges, [-np.inf, -np.inf]]], np.float32))

    forest.merge(collector, part(64, 0, first, [np.float32(-0.1), below]))
    # The second candidate, run after a commit that the device was told of.
    forest.merge(collector, part(68, 65, second, [np.float32(-0.1), np.float32(-0.2)]))
    forest.slots.end_leases(rows)
    check_forest(forest)
    assert (forest.entries.rows[: forest.entries.count] > 0).all()
