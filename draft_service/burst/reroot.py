"""Re-rooting the trees of a forest along committed tokens, many at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draft_service.burst.entries import DEAD, Entries, Ints
from draft_service.burst.forest import DraftForest


@dataclass(frozen=True, slots=True)
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
    """Nothing below the new root is to be kept."""


@dataclass(frozen=True, slots=True)
class Walked:
    """What came of a step."""

    slots: list[int]
    """Tree slots of the old root and of the committed tokens behind it whose nodes were found, the new root not
    included; -1 for one that was not run. Slots of committed nodes stay live; the caller frees them."""
    found: bool
    """Whether the new root was in the tree; else it is a new entry."""


def reroot(forest: DraftForest, steps: Sequence[Step]) -> list[Walked]:
    """Follow committed tokens in trees of different rows; what hangs off their paths is dead afterwards."""
    entries = forest.entries
    committing = np.zeros(len(forest.roots), np.bool_)
    committing[[step.row for step in steps]] = True
    rows = entries.rows[: entries.count]
    touched = np.flatnonzero(committing[rows] & (entries.scores[: entries.count] > DEAD))
    paths = _walk(forest, touched, steps)
    results: list[Walked] = []
    roots: list[int] = []
    for step, path in zip(steps, paths, strict=True):
        found = len(path) > len(step.tokens) and not step.afresh
        above = path[: len(step.tokens)]
        results.append(Walked(entries.slots[above].tolist(), found))
        entries.slots[above] = -1  # they stay live as committed tokens
        if found:
            roots.append(path[-1])
    alive = _below(entries, touched, roots)
    _bury(forest, touched[~alive])
    _keep(forest, touched[alive], roots, steps)
    for step, walked in zip(steps, results, strict=True):
        if not walked.found:
            position = int(forest.root_positions[step.row]) + len(step.tokens)
            forest.set_root(step.row, step.tokens[-1], position, step.node)
    return results


def _walk(forest: DraftForest, touched: Ints, steps: Sequence[Step]) -> list[list[int]]:
    """Entries along the tokens of each step, its root first, as far as they are there."""
    entries = forest.entries
    parents, tokens, rows = entries.parents[touched], entries.tokens[touched], entries.rows[touched]
    wanted_parent = np.full(len(forest.roots), -2, np.intp)
    wanted_token = np.full(len(forest.roots), -1, np.int32)
    paths = {step.row: [int(forest.roots[step.row])] for step in steps}
    walking = list(steps)
    depth = 0
    while walking:
        wanted_parent[:] = -2
        for step in walking:
            wanted_parent[step.row] = paths[step.row][-1]
            wanted_token[step.row] = step.tokens[depth]
        hits = touched[(parents == wanted_parent[rows]) & (tokens == wanted_token[rows])]
        depth += 1
        for entry in hits.tolist():
            paths[int(entries.rows[entry])].append(entry)
        walking = [step for step in walking if len(paths[step.row]) == depth + 1 and len(step.tokens) > depth]
    return [paths[step.row] for step in steps]


def _below(entries: Entries, touched: Ints, roots: list[int]) -> NDArray[np.bool_]:
    """[T] which of the touched entries are these roots or hang below them."""
    alive = np.zeros(entries.count + 1, np.bool_)
    alive[roots] = True
    parents = entries.parents[touched]
    number = len(roots)
    while number:
        alive[touched] |= alive[parents]
        before, number = number, int(np.count_nonzero(alive))
        if number == before:
            break
    return alive[touched]


def _bury(forest: DraftForest, dead: Ints) -> None:
    entries = forest.entries
    entries.kill(dead)
    slots = entries.slots[dead]
    ran = slots >= 0
    if ran.any():
        forest.slots.free(entries.rows[dead[ran]], slots[ran])


def _keep(forest: DraftForest, alive: Ints, roots: list[int], steps: Sequence[Step]) -> None:
    """Count the survivors from their new roots."""
    entries = forest.entries
    rows = entries.rows[alive]
    base = np.zeros(len(forest.roots))
    restarted = np.zeros(len(forest.roots), np.bool_)
    base[entries.rows[roots]] = entries.scores[roots]
    restarted[[step.row for step in steps if step.restarted]] = True
    entries.scores[alive] -= base[rows]
    entries.ranks[alive] -= base[rows]
    entries.nodes[alive[restarted[rows]]] = -1
    for step in steps:
        forest.num_run[step.row] = 0
        forest.roots[step.row] = -1
    ran = rows[entries.slots[alive] >= 0]
    forest.num_run += np.bincount(ran, minlength=len(forest.roots))
    root_rows = entries.rows[roots]
    forest.roots[root_rows] = roots
    forest.root_positions[root_rows] = entries.positions[roots]
    entries.parents[roots] = -1
    entries.edges[roots] = 0.0
    entries.ranks[roots] = DEAD
    nodes = {step.row: step.node for step in steps}
    entries.nodes[roots] = [nodes[row] for row in root_rows.tolist()]
