"""Trees laid out so that every subtree is a slice."""

from __future__ import annotations

from collections.abc import Sequence


def preorder(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Rows of nodes when each is followed by everything below it, siblings in their given order.

    `parents[i] < i` is node i's parent, node 0 the root, whose parent is ignored. Returns the row of each node, and for
    each row one past the last row below it.
    """
    count = len(parents)
    sizes = [1] * count
    for node in range(count - 1, 0, -1):
        sizes[parents[node]] += sizes[node]
    rows = [0] * count
    ends = [count] * count
    next_row = [1] * count
    for node in range(1, count):
        parent = parents[node]
        row = rows[node] = next_row[parent]
        next_row[parent] = ends[row] = row + sizes[node]
        next_row[node] = row + 1
    return rows, ends
