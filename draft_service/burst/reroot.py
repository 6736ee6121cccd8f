"""Re-rooting the trees of a forest along committed tokens, many at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from draft_service.burst.entries import DEAD, Entries, Ints
from draft_service.burst.forest import DraftForest

_NOBODY = -2
"""No entry's parent; roots have -1."""


@dataclass(slots=True)
class Step:
    """A tree is to follow newly committed tokens."""

    row: int
    tokens: Sequence[int]
    """At least one, in order."""
    node: int
    """Id of the new root in the author's tree."""
    restarted: bool
    """The author began a new epoch: no node is known to verify."""
    afresh: bool = False
    """Nothing below the new root is to be kept; the same for all steps at once."""


@dataclass(slots=True)
class Walked:
    """What came of a step."""

    slots: list[int]
    """Tree slots of the old root and of the committed tokens behind it whose nodes were found, the new root not
    included; -1 for one that was not run. Slots of committed nodes stay live; the caller frees them."""
    found: bool
    """Whether the new root was in the tree; else it is a new entry."""


def reroot(forest: DraftForest, steps: Sequence[Step]) -> list[Walked]:
    """Follow committed tokens in trees of different rows; what hangs off their paths is dead afterwards."""
    entries, count = forest.entries, forest.entries.count
    stepped = np.array([step.row for step in steps])
    committing = np.zeros(len(forest.roots), np.bool_)
    committing[stepped] = True
    touched = (committing[entries.rows[:count]] & (entries.scores[:count] > DEAD)).nonzero()[0]
    lengths = np.array([len(step.tokens) for step in steps])
    if len(steps) == 1:
        slots, last = _walk_one(forest, touched, steps[0])
    else:
        paths = _walk(forest, touched, steps, int(lengths.max()))[stepped]
        last = paths[np.arange(len(steps)), lengths]
        slots = _take_slots(entries, paths, lengths)
    found = last >= 0
    if steps[0].afresh:
        found[:] = False
    roots = last[found]
    alive = _below(entries, touched, roots)
    _bury(forest, touched[~alive])
    _keep(forest, touched[alive], roots, stepped, steps)
    was_found = found.tolist()
    fresh = [step for step, there in zip(steps, was_found, strict=True) if not there]
    if fresh:
        positions = (forest.root_positions[stepped] + lengths)[~found]
        forest.set_roots(stepped[~found], [step.tokens[-1] for step in fresh], positions, [step.node for step in fresh])
    return [Walked(*one) for one in zip(slots, was_found, strict=True)]


def reaches(forest: DraftForest, row: int, tokens: Sequence[int]) -> bool:
    """Whether the tree of a row holds the path along these tokens."""
    entries, count, above = forest.entries, forest.entries.count, int(forest.roots[row])
    for token in tokens:
        below = (entries.parents[:count] == above).nonzero()[0]
        below = below[(entries.tokens[below] == token) & (entries.scores[below] > DEAD)]
        if not len(below):
            return False
        above = int(below[0])
    return True


def _walk_one(forest: DraftForest, touched: Ints, step: Step) -> tuple[list[list[int]], Ints]:
    """`_walk` and `_take_slots` for a single step, and the entry at its end or -1: few calls, for few rows."""
    entries = forest.entries
    parents, tokens = entries.parents[touched], entries.tokens[touched]
    path = [int(forest.roots[step.row])]
    for token in step.tokens:
        hits = touched[(parents == path[-1]) & (tokens == token)]
        if not len(hits):
            break
        path.append(int(hits[0]))
    count = len(step.tokens)
    above = path[:count]
    slots = [entries.slots[above].tolist()]
    entries.slots[above] = -1
    return slots, np.array(path[count:] or [-1])


def _walk(forest: DraftForest, touched: Ints, steps: Sequence[Step], longest: int) -> Ints:
    """[R, longest + 1] entries along the tokens of each row's step, its root first; -1 where there are none."""
    entries, num_rows = forest.entries, len(forest.roots)
    parents, tokens, rows = entries.parents[touched], entries.tokens[touched], entries.rows[touched]
    wanted = np.full((longest, num_rows), -1, np.int32)
    for step in steps:
        wanted[: len(step.tokens), step.row] = step.tokens
    paths = np.full((num_rows, longest + 1), -1, np.intp)
    paths[:, 0] = forest.roots
    above = forest.roots.copy()
    for depth in range(longest):
        # Rows that are not walked any more have nobody's children, and look for those of no token.
        below = (parents == above[rows]).nonzero()[0]
        below = below[tokens[below] == wanted[depth, rows[below]]]
        if not len(below):
            break
        hits, where = touched[below], rows[below]
        paths[where, depth + 1] = hits
        above.fill(_NOBODY)
        above[where] = hits
    return paths


def _take_slots(entries: Entries, paths: Ints, lengths: Ints) -> list[list[int]]:
    """The tree slots of committed entries above the new roots, which stay live as committed tokens."""
    above = (paths >= 0) & (np.arange(paths.shape[1]) < lengths[:, None])
    flat = paths[above]
    slots = entries.slots[flat].tolist()
    entries.slots[flat] = -1
    ends = np.count_nonzero(above, axis=1).cumsum().tolist()
    return [slots[start:end] for start, end in pairwise([0, *ends])]


def _below(entries: Entries, touched: Ints, roots: Ints) -> NDArray[np.bool_]:
    """[T] which of the touched entries are these roots or hang below them."""
    count = entries.count
    kept = np.zeros(count + 1, np.bool_)
    kept[roots] = True
    # Of each the parent, then its grandparent, then that of four levels up, ...; `count` is nobody.
    ups = np.full(count + 1, count)
    ups[touched] = entries.parents[touched]
    ups[roots] = roots
    while True:
        further = ups[ups]
        if not np.count_nonzero(further != ups):
            alive: NDArray[np.bool_] = kept[ups[touched]]
            return alive
        ups = further


def _bury(forest: DraftForest, dead: Ints) -> None:
    entries = forest.entries
    entries.kill(dead)
    slots = entries.slots[dead]
    ran = slots >= 0
    if ran.any():
        forest.slots.free(entries.rows[dead[ran]], slots[ran])


def _keep(forest: DraftForest, alive: Ints, roots: Ints, stepped: Ints, steps: Sequence[Step]) -> None:
    """Count the survivors from their new roots."""
    entries = forest.entries
    rows = entries.rows[alive]
    base = np.zeros(len(forest.roots))
    restarted = np.zeros(len(forest.roots), np.bool_)
    base[entries.rows[roots]] = entries.scores[roots]
    restarted[stepped] = [step.restarted for step in steps]
    entries.scores[alive] -= base[rows]
    entries.ranks[alive] -= base[rows]
    entries.nodes[alive[restarted[rows]]] = -1
    forest.num_run[stepped] = 0
    forest.roots[stepped] = -1
    ran = rows[entries.slots[alive] >= 0]
    forest.num_run += np.bincount(ran, minlength=len(forest.roots))
    root_rows = entries.rows[roots]
    forest.roots[root_rows] = roots
    forest.root_positions[root_rows] = entries.positions[roots]
    forest.shifts[root_rows] += base[root_rows]
    entries.parents[roots] = -1
    entries.edges[roots] = 0.0
    entries.ranks[roots] = DEAD
    nodes = np.zeros(len(forest.roots), np.int64)
    nodes[stepped] = [step.node for step in steps]
    entries.nodes[roots] = nodes[root_rows]
