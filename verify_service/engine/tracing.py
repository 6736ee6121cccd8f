"""What a traced request is told of its rounds: the tree that was verified, and what became of it. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.protocol.tokens import RoundTree
from outrider.tree.mirror import TreeMirror


class Marks(NamedTuple):
    """Of the nodes that a round takes of a tree: who found them, and how likely the drafter thought them."""

    drafters: Sequence[int]
    scores: Sequence[float]
    drafter_names: Sequence[str]


def mark(mirror: TreeMirror, slots: Sequence[int], sources: Sequence[str]) -> Marks:
    """Marks of the nodes in these slots of a mirror. `sources` are the draft's names of its drafters."""
    found = [mirror.sources[slot] for slot in slots]
    used = sorted(set(found))
    # A draft may have said fewer names than it uses; what it says is not believed elsewhere either.
    names = [sources[source] if source < len(sources) else f"source {source}" for source in used]
    places = {source: place for place, source in enumerate(used)}
    return Marks([places[source] for source in found], [mirror.scores[slot] for slot in slots], names)


def follow(parents: Sequence[int], token_ids: Sequence[int], committed: Sequence[int]) -> list[int]:
    """Indices of the nodes along committed tokens, from the root on, as far as there are any."""
    children = {pair: index for index, pair in enumerate(zip(parents, token_ids, strict=True))}
    path: list[int] = []
    for token in committed:
        node = children.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path


def round_tree(
    position: int, parents: Sequence[int], token_ids: Sequence[int], marks: Marks | None, committed: Sequence[int]
) -> RoundTree:
    """The tree of a round that committed tokens from `position` on. Without marks it held no nodes."""
    if marks is None:
        return RoundTree(position, len(committed))
    return RoundTree(
        position,
        len(committed),
        parents,
        token_ids,
        marks.drafters,
        marks.scores,
        follow(parents, token_ids, committed),
        marks.drafter_names,
    )
