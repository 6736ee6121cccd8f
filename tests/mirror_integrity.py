"""Whether what verify's mirror of a tree keeps of its nodes agrees."""

from __future__ import annotations

from outrider.tree.mirror import TreeMirror


def check_mirror(mirror: TreeMirror) -> None:
    count = len(mirror.ids)
    columns = (mirror.token_ids, mirror.parents, mirror.depths, mirror.scores, mirror.sources, mirror.below)
    assert all(len(column) == count for column in (*columns, mirror._alive)), "a column is short"
    assert mirror.root < count <= mirror._num_slots
    assert mirror._slots == {node_id: slot for slot, node_id in enumerate(mirror.ids)}, "an id is not that of its slot"
    for slot, parent in enumerate(mirror.parents[1:], 1):
        assert 0 <= parent < slot and mirror.depths[slot] == mirror.depths[parent] + 1, f"{slot} hangs elsewhere"
        assert mirror.child(parent, mirror.token_ids[slot]) == slot
        assert (mirror._costs[slot], slot) in mirror.below[parent]
        assert mirror._costs[slot] >= mirror._costs[parent], f"node {slot} is likelier than its parent"
    assert sum(map(len, mirror.below)) == count - 1
    assert all(below == sorted(below) for below in mirror.below), "children are not in order"
