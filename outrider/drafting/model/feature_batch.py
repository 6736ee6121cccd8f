"""Features that came in one message for several requests: they are copied and projected once, for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.protocol.messages import Features

Read = Callable[[int, int], object]
"""Bytes in a ring: offset and size to a copy of them, as bytes or as a tensor of bytes."""


class JoinedRows:
    """Features of several pieces, one behind the other, and what runners made of them."""

    def __init__(self, rows: object, count: int) -> None:
        self.rows = rows
        """All of them, as `Features.rows` would be."""
        self.count = count
        """Positions."""
        self._made: dict[int, Any] = {}

    def made(self, maker: object, make: Callable[[], Any]) -> Any:
        """What `make` returns; it is called once for each maker, who must live as long as this."""
        found = self._made.get(id(maker))
        if found is None:
            found = self._made[id(maker)] = make()
        return found


@dataclass(frozen=True, slots=True)
class PartOfRows:
    """In place of `Features.rows`: positions of a message that others share. What came in it is in `data`, too."""

    joined: JoinedRows
    start: int
    """Positions before these."""


def with_rows(pieces: Sequence[Features], row_bytes: int, read: Read | None) -> list[Features]:
    """Pieces of a message with their rows: those that lie behind each other are read at once and stay together.

    `row_bytes`: of one position. `read` where there is a ring. Raises what it raises.
    """
    filled: list[Features] = []
    for run in _runs(pieces, row_bytes):
        first, count = run[0], sum(piece.count for piece in run)
        if first.ring_offset is None:
            if len(run) == 1:  # its bytes are in the message
                filled += run
                continue
            rows: object = b"".join(piece.data for piece in run)
        elif read is None:
            raise ValueError("features in a ring that is not mapped")
        else:
            rows = read(first.ring_offset, count * row_bytes)
        if len(run) == 1:
            filled.append(replace(first, rows=rows))
            continue
        joined, start = JoinedRows(rows, count), 0
        for piece in run:
            filled.append(replace(piece, rows=PartOfRows(joined, start)))
            start += piece.count
    return filled


def _runs(pieces: Sequence[Features], row_bytes: int) -> list[list[Features]]:
    """Pieces that follow each other in the ring, or are all in the message."""
    runs: list[list[Features]] = []
    end: int | None = None  # in the ring
    for piece in pieces:
        if not runs or piece.ring_offset != end:
            runs.append([])
        runs[-1].append(piece)
        end = None if piece.ring_offset is None else piece.ring_offset + piece.count * row_bytes
    return runs
