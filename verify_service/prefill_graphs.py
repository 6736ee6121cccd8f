"""Shapes of prefill: the few that small forwards are padded to and captured for, and what a forward is told."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.attention.lengths import HostLengths
from outrider.attention.paged import PagedBatch
from outrider.buckets import width_buckets

_TOKENS = (64, 128, 192, 256, 384, 512)
"""Steps that cost a forward of an 8B shape at most about 2 ms of padding, where launching it kernel by kernel takes the
host 10 ms. Larger forwards take the device longer than the host."""
_FEW_TOKENS = 128
_ROWS = (7, 15)
"""Of forwards up to _FEW_TOKENS, and of others. One below a power of two: attention is a kernel of its own for each of
those. An empty row may cost an empty tile, and more of them than processors would be in each other's way."""
_ALIGNED = 16
"""int32 words between two places where fields may begin: kernels are compiled anew for pointers aligned otherwise."""

Words = NDArray[np.int32]


class PrefillShape(NamedTuple):
    """Token slots and rows of a forward."""

    tokens: int
    rows: int


class Chunk(NamedTuple):
    """Tokens of one request in a forward: as many as there are slots."""

    table_row: int
    token_ids: Sequence[int] | Words
    start: int
    """Position of the first one; those before have valid KV."""
    slots: Words
    """Where their KV goes; -1 for nowhere."""


class PrefillShapes:
    """Which shape a forward is padded to."""

    def __init__(self, chunk_size: int, max_rows: int, fixed: bool = False, padded: bool = True) -> None:
        """Forwards have `chunk_size` tokens at most, as a rule, and `max_rows` rows.

        `fixed`: every forward has that many token slots and one row, so that results do not depend on shapes. Not
        `padded`: forwards have the shape that they have.
        """
        self.fixed = fixed
        self._chunk_size = chunk_size
        self._padded = padded
        self._rows = sorted({min(rows, max_rows) for rows in (*_ROWS, max_rows)})
        self.small: list[PrefillShape] = []
        """Shapes that are worth a graph, the smallest first; the last one has the most rows, too."""
        if fixed:
            self.small = [PrefillShape(chunk_size, 1)] if chunk_size <= _TOKENS[-1] else []
        elif padded:
            for tokens in width_buckets(_TOKENS, min(chunk_size, _TOKENS[-1])):
                rows = _ROWS[0] if tokens <= _FEW_TOKENS else _ROWS[1]
                self.small.append(PrefillShape(tokens, min(rows, max_rows)))

    def fit(self, num_tokens: int, num_rows: int) -> PrefillShape:
        """The shape for a forward of so many tokens and rows: the first small one that holds both, if there is one."""
        if self.fixed:
            return PrefillShape(self._chunk_size, 1)
        for shape in self.small:
            if num_tokens <= shape.tokens and num_rows <= shape.rows:
                return shape
        if self._padded:
            # Tokens would take time, an empty row takes next to none.
            num_rows = next((rows for rows in self._rows if rows >= num_rows), num_rows)
        return PrefillShape(num_tokens, num_rows)

    def others(self, room: int) -> list[list[int]]:
        """Forwards, as tokens of each row, that together run all kernels of those that are not small.

        `room`: positions that a page table, and the cache, have.
        """
        largest = min(self._chunk_size, room)
        if self.fixed:
            return [] if self.small else [[largest]]
        if not self._padded:
            return [[largest], [min(48, room)]]
        found = [[largest]] if self._chunk_size > self.small[-1].tokens else []
        if self._rows[-1] > self.small[-1].rows:
            found.append([1] * self._rows[-1])
        return found


class PrefillLayout:
    """Where the int32 fields of `PagedBatch` lie in one piece of memory, for forwards up to some shape."""

    def __init__(self, largest: PrefillShape) -> None:
        tokens, rows = largest
        sizes = (tokens, tokens, tokens, rows + 1, rows, rows)
        starts = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
        self._spans = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self.size = starts[-1]
        """int32 words in all."""

    def describe(self, chunks: Sequence[Chunk], spare_row: int) -> Words:
        """A forward of these chunks; tokens and rows that it does not have are padding, whatever shape is cut out."""
        words = np.zeros(self.size, np.int32)
        token_ids, positions, slots, first, cached_len, table_rows = (words[span] for span in self._spans)
        slots[:] = -1
        ends = list(accumulate((len(chunk.slots) for chunk in chunks), initial=0))
        for chunk, (begin, end) in zip(chunks, pairwise(ends), strict=True):
            token_ids[begin:end] = chunk.token_ids
            positions[begin:end] = np.arange(chunk.start, chunk.start + end - begin, dtype=np.int32)
            slots[begin:end] = chunk.slots
        count = len(chunks)
        first[: count + 1] = ends
        first[count + 1 :] = ends[-1]
        cached_len[:count] = [chunk.start for chunk in chunks]
        table_rows[:count] = [chunk.table_row for chunk in chunks]
        table_rows[count:] = spare_row
        return words

    def lengths(self, words: Words) -> HostLengths:
        """What a description says of lengths."""
        return HostLengths(words[self._spans[3]], words[self._spans[4]])

    def batch(
        self,
        told: Tensor,
        shape: PrefillShape,
        page_tables: Tensor,
        page_size: int,
        lengths: HostLengths | None = None,
    ) -> PagedBatch:
        """A description on the device, [size] int32, as a batch of `shape`."""
        tokens, rows = shape
        starts = [span.start for span in self._spans]
        sizes = (tokens, tokens, tokens, rows + 1, rows, rows)
        token_ids, positions, slots, first, cached_len, table_rows = (
            told[start : start + size] for start, size in zip(starts, sizes, strict=True)
        )
        return PagedBatch(
            token_ids=token_ids,
            positions=positions,
            first=first,
            cached_len=cached_len,
            table_rows=table_rows,
            page_tables=page_tables,
            slots=slots,
            page_size=page_size,
            max_row_tokens=tokens,
            lengths=lengths,
        )


def chunk_slots(pages: Sequence[int], page_size: int, start: int, end: int) -> Words:
    """KV slots of positions start .. end - 1 of a request with these pages."""
    first = start // page_size
    used = np.array(pages[first : (end - 1) // page_size + 1], np.int32)
    slots: Words = np.add.outer(used * page_size, np.arange(page_size, dtype=np.int32)).reshape(-1)
    begin = start - first * page_size
    return slots[begin : begin + end - start]
