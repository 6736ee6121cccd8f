"""Re-rooting the trees of a forest along committed tokens, many at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.model.entries import DEAD, Entries, Ints
from outrider.drafting.model.forest import DraftForest

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
    entries, touched = forest.entries, _touch(forest, steps)
    parents = entries.parents[touched]
    # Entries that others may hang below.
    inner = entries.slots[touched] >= 0
    if forest.may_know:
        inner |= entries.parental[touched]
    if len(steps) == 1:
        slots, last = _walk_one(forest, touched, parents, steps[0])
    else:
        slots, last = _walk_many(forest, touched, parents, steps)
    found = [place >= 0 and not step.afresh for place, step in zip(last, steps, strict=True)]
    dead = _beside(touched, parents, inner, [place for place, there in zip(last, found, strict=True) if there])
    _bury(forest, touched[dead], steps)
    _keep(forest, touched[~dead], steps, touched[last].tolist(), found)
    fresh = [step for step, there in zip(steps, found, strict=True) if not there]
    if fresh:
        rows = np.array([step.row for step in fresh])
        positions = forest.root_positions[rows] + np.array([len(step.tokens) for step in fresh])
        forest.set_roots(rows, [step.tokens[-1] for step in fresh], positions, [step.node for step in fresh])
    return [Walked(*one) for one in zip(slots, found, strict=True)]


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


def _touch(forest: DraftForest, steps: Sequence[Step]) -> Ints:
    """[T] entries of the trees that are to follow, ascending."""
    entries, count = forest.entries, forest.entries.count
    alive = entries.scores[:count] > DEAD
    if len(steps) < len(forest.open):
        committing = np.zeros(len(forest.roots), np.bool_)
        committing[[step.row for step in steps]] = True
        alive &= committing[entries.rows[:count]]
    return alive.nonzero()[0]


def _walk_one(forest: DraftForest, touched: Ints, parents: Ints, step: Step) -> tuple[list[list[int]], list[int]]:
    """`_walk_many` for a single step: few calls, for few rows."""
    entries, last = forest.entries, -1
    path = [int(forest.roots[step.row])]
    for token in step.tokens:
        places = (parents == path[-1]).nonzero()[0]
        below = touched[places]
        tokens = entries.tokens[below].tolist()
        if token not in tokens:
            last = -1
            break
        child = tokens.index(token)
        last = int(places[child])
        path.append(int(below[child]))
    above = path[: len(step.tokens)]
    slots = entries.slots[above].tolist()
    entries.slots[above] = -1
    return [slots], [last]


def _walk_many(
    forest: DraftForest, touched: Ints, parents: Ints, steps: Sequence[Step]
) -> tuple[list[list[int]], list[int]]:
    """Of each step the tree slots of `Walked`, which stay live as committed tokens, and the new root's place or -1.

    Places are those among the touched entries.
    """
    stepped = np.array([step.row for step in steps])
    lengths = np.array([len(step.tokens) for step in steps])
    paths = _walk(forest, touched, parents, steps, int(lengths.max()))[stepped]
    roots = paths[np.arange(len(steps)), lengths]
    last = np.where(roots < 0, -1, touched.searchsorted(roots))
    return _take_slots(forest.entries, paths, lengths), last.tolist()


def _walk(forest: DraftForest, touched: Ints, parents: Ints, steps: Sequence[Step], longest: int) -> Ints:
    """[R, longest + 1] entries along the tokens of each row's step, its root first; -1 where there are none."""
    entries, num_rows = forest.entries, len(forest.roots)
    tokens, rows = entries.tokens[touched], entries.rows[touched]
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


def _beside(touched: Ints, parents: Ints, inner: NDArray[np.bool_], where: list[int]) -> NDArray[np.bool_]:
    """[T] which of the touched entries are neither new roots, which lie in these places, nor hang below one.

    `inner`: those that others may hang below, which are few: the others go with their parents.
    """
    if not where:
        return np.ones(len(touched), np.bool_)
    inner[where] = True
    those = touched[inner]
    count = len(those)
    places = np.empty(int(touched[-1]) + 2, np.intp)  # of inner entries among each other; the last is nobody's
    places[-1] = count
    places[those] = np.arange(count)
    # Of each the parent, then its grandparent, then that of four levels up, ...; `count`, more than levels, is nobody.
    above = places[parents]
    ups = np.empty(count + 1, np.intp)
    ups[:count], ups[count] = above[inner], count
    tops = places[touched[where]]
    ups[tops] = tops  # here all ways end that do not lead to nobody
    for _ in range(count.bit_length()):
        ups = ups[ups]
    dead: NDArray[np.bool_] = ups[above] == count
    dead[where] = False
    return dead


def _bury(forest: DraftForest, dead: Ints, steps: Sequence[Step]) -> None:
    """Entries of their trees that were alive are not any more, and their slots are free."""
    entries = forest.entries
    entries.kill(dead)
    slots = entries.slots[dead]
    ran = (slots >= 0).nonzero()[0]
    if len(steps) == 1:
        forest.slots.free_of(steps[0].row, slots[ran])
    else:
        forest.slots.free(entries.rows[dead[ran]], slots[ran])


def _keep(forest: DraftForest, alive: Ints, steps: Sequence[Step], roots: list[int], found: list[bool]) -> None:
    """Count the survivors from their new roots, as far as these were `found`."""
    entries, num_rows = forest.entries, len(forest.roots)
    bases = [float(entries.scores[root]) if there else 0.0 for root, there in zip(roots, found, strict=True)]
    ran = entries.slots[alive] >= 0
    if len(steps) == 1:
        shifts: NDArray[np.float64] | float = bases[0]
        counts = [int(np.count_nonzero(ran))]
    else:
        stepped, rows, base = [step.row for step in steps], entries.rows[alive], np.zeros(num_rows)
        base[stepped] = bases
        shifts = base[rows]
        counts = np.bincount(rows[ran], minlength=num_rows)[stepped].tolist()
    entries.scores[alive] -= shifts
    entries.ranks[alive] -= shifts
    for step, root, there, shift, count in zip(steps, roots, found, bases, counts, strict=True):
        row = step.row
        if step.restarted:
            entries.nodes[alive[entries.rows[alive] == row]] = -1
        forest.num_run[row], forest.roots[row] = count, root if there else -1
        if there:
            forest.root_positions[row] = entries.positions[root]
            forest.shifts[row] += shift
            entries.parents[root], entries.edges[root] = -1, 0.0
            entries.ranks[root], entries.nodes[root] = DEAD, step.node
