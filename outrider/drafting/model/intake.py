"""Takes into a forest what other growers appended to the authors' trees."""

from __future__ import annotations

import numpy as np

from outrider.drafting.model.context import DraftContext
from outrider.drafting.model.entries import DEAD, Entries
from outrider.drafting.model.forest import DraftForest
from outrider.tree.author import TreeAuthor


def take_in(forest: DraftForest, context: DraftContext) -> None:
    """Nodes of the author that other growers appended become entries, as far as there is room for them."""
    author, entries, row = context.tree.author, forest.entries, context.row
    first, context.seen = context.seen, author.next_id
    if first >= author.next_id or not forest.make_room(author.num_live):
        return
    forest.may_know = True
    here = np.flatnonzero((entries.rows[: entries.count] == row) & (entries.scores[: entries.count] > DEAD))
    known = dict(zip(entries.nodes[here].tolist(), here.tolist(), strict=True))
    parents, tokens = entries.parents[here].tolist(), entries.tokens[here].tolist()
    edges = dict(zip(zip(parents, tokens, strict=True), here.tolist(), strict=True))
    for node_id in range(first, author.next_id):
        if node_id not in known and author.is_live(node_id):
            _take_one(entries, author, node_id, known, edges)


def _take_one(
    entries: Entries, author: TreeAuthor, node_id: int, known: dict[int, int], edges: dict[tuple[int, int], int]
) -> None:
    node = author.node(node_id)
    parent = known.get(node.parent)
    if parent is None:
        return
    entry = edges.get((parent, node.token))
    if entry is None:
        entry = entries.append(parent, node.token, node.score, node_id)
    else:
        entries.nodes[entry] = node_id
    known[node_id] = entry
