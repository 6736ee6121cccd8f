"""Shapes of prefill: the few that small forwards are padded to and captured for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.attention.prompts import PromptShape, Words
from outrider.buckets import width_buckets

_TOKENS = (64, 128, 192, 256, 384, 512)
"""Steps that cost a forward of an 8B shape at most about 2 ms of padding, where launching it kernel by kernel takes the
host 10 ms. Larger forwards take the device longer than the host."""
_FEW_TOKENS = 128
_ROWS = (7, 15)
"""Of forwards up to _FEW_TOKENS, and of others. One below a power of two: attention is a kernel of its own for each of
those. An empty row may cost an empty tile, and more of them than processors would be in each other's way."""


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
        self.small: list[PromptShape] = []
        """Shapes that are worth a graph, the smallest first; the last one has the most rows, too."""
        if fixed:
            self.small = [PromptShape(chunk_size, 1)] if chunk_size <= _TOKENS[-1] else []
        elif padded:
            for tokens in width_buckets(_TOKENS, min(chunk_size, _TOKENS[-1])):
                rows = _ROWS[0] if tokens <= _FEW_TOKENS else _ROWS[1]
                self.small.append(PromptShape(tokens, min(rows, max_rows)))

    def fit(self, num_tokens: int, num_rows: int) -> PromptShape:
        """The shape for a forward of so many tokens and rows: the first small one that holds both, if there is one."""
        if self.fixed:
            return PromptShape(self._chunk_size, 1)
        for shape in self.small:
            if num_tokens <= shape.tokens and num_rows <= shape.rows:
                return shape
        if self._padded:
            # Tokens would take time, an empty row takes next to none.
            num_rows = next((rows for rows in self._rows if rows >= num_rows), num_rows)
        return PromptShape(num_tokens, num_rows)

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


def chunk_slots(pages: Sequence[int], page_size: int, start: int, end: int) -> Words:
    """KV slots of positions start .. end - 1 of a request with these pages."""
    first = start // page_size
    used = np.array(pages[first : (end - 1) // page_size + 1], np.int32)
    slots: Words = np.add.outer(used * page_size, np.arange(page_size, dtype=np.int32)).reshape(-1)
    begin = start - first * page_size
    return slots[begin : begin + end - start]
