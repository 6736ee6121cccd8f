"""Batches of prompt chunks, described on the host as one array of int32 words, copied to the device at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.attention.base import HostLengths
from outrider.attention.paged import PagedBatch

_ALIGNMENT = 16
"""int32 words between two places where fields may begin: kernels are compiled anew for pointers aligned otherwise."""

Words = NDArray[np.int32]


class PromptShape(NamedTuple):
    """Token slots and rows of a forward."""

    tokens: int
    rows: int


class PromptChunk(NamedTuple):
    """Consecutive tokens of one request in a forward: as many as there are slots."""

    table_row: int
    token_ids: Sequence[int] | Words
    start: int
    """Position of the first one; those before have valid KV."""
    slots: Words
    """Where their KV goes; -1 for nowhere."""
    offset: int = 0
    """How far their rotary positions lie behind their positions."""


class PromptLayout:
    """Offsets of the int32 fields of a `PagedBatch` in one array, for forwards up to the shape `largest`."""

    def __init__(self, largest: PromptShape) -> None:
        tokens, rows = largest
        sizes = (tokens, tokens, tokens, rows + 1, rows, rows)
        starts = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        self._spans = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self.size = starts[-1]
        """int32 words in all."""

    def describe(self, chunks: Sequence[PromptChunk], spare_row: int) -> Words:
        """A forward of these chunks; tokens and rows that it does not have are padding, whatever shape is cut out."""
        words = np.zeros(self.size, np.int32)
        token_ids, positions, slots, first, cached_len, table_rows = (words[span] for span in self._spans)
        slots[:] = -1
        ends = list(accumulate((len(chunk.slots) for chunk in chunks), initial=0))
        for chunk, (begin, end) in zip(chunks, pairwise(ends), strict=True):
            token_ids[begin:end] = chunk.token_ids
            rotary = chunk.start + chunk.offset
            positions[begin:end] = np.arange(rotary, rotary + end - begin, dtype=np.int32)
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
        self, words: Tensor, shape: PromptShape, page_tables: Tensor, page_size: int, lengths: HostLengths | None = None
    ) -> PagedBatch:
        """The batch of `shape` that `words` int32 [size] on the device describe, see `describe`."""
        tokens, rows = shape
        starts = [span.start for span in self._spans]
        sizes = (tokens, tokens, tokens, rows + 1, rows, rows)
        token_ids, positions, slots, first, cached_len, table_rows = (
            words[start : start + size] for start, size in zip(starts, sizes, strict=True)
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
