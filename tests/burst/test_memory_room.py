"""How much of a GPU a process may take, alone on it and beside others."""

from __future__ import annotations

from outrider.models.capacity import memory_room

GIB = 1 << 30


def test_alone_it_is_the_share_less_what_it_has() -> None:
    room = memory_room(free=137 * GIB, total=140 * GIB, own=2 * GIB, share=0.5)
    assert 67 * GIB < room < 68 * GIB


def test_what_others_hold_takes_nothing_from_the_share() -> None:
    alone = memory_room(free=139 * GIB, total=140 * GIB, own=GIB // 2, share=0.2)
    beside = memory_room(free=45 * GIB, total=140 * GIB, own=GIB // 2, share=0.2)
    assert beside == alone > 26 * GIB


def test_no_more_than_there_is() -> None:
    assert memory_room(free=10 * GIB, total=140 * GIB, own=GIB, share=0.5) < 10 * GIB
    assert memory_room(free=GIB, total=140 * GIB, own=GIB, share=0.9) < 0
