"""Batches whose lengths lie in device memory, so that one CUDA graph serves every round of a shape.

Batches of prompts are described on the host, as one array of int32 words that is copied in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention_tiles import PATH_SPLITS, choose_splits
from kernels.kv_cache import update_pages
from kernels.sampling_state import RoundTokens
from kernels.tree import MAX_PATH, expand_tree
from outrider.attention.base import HostLengths, TokenBatch

__all__ = ["MAX_PATH", "PATH_SPLITS", "PagedBatch", "RoundTokens", "TreeBuffers", "choose_splits", "update_pages"]


@dataclass(slots=True)
class PagedBatch(TokenBatch):
    """M token slots over B rows, one row for each request; the tokens of a row are adjacent. All tensors are int32.

    A row's logical positions:

        [ cached_len positions with valid KV ][ its own tokens, written in this forward ]

    Token i of row b lies at logical position cached_len[b] + i - first[b] of the row's page table. Slot of logical
    position p: page_tables[table_rows[b], p // page_size] * page_size + p % page_size.

    Attributes:
        first: [B + 1], where each row's tokens begin; tokens behind first[B] are padding, padding rows are empty.
        cached_len: [B].
        table_rows: [B], a row's place in `page_tables`.
        page_tables: [R, P] page numbers.
        slots: [M], the KV slot of each token; -1 for padding.
        page_size: tokens in a page.
        max_row_tokens: no row has more tokens of its own than this.
        mask: [M, ceil(max_row_tokens / 32)] bits; bit j of a token says whether it sees token j of its own row. None
            means causal.
        path: [M, D], for each token the places within its row of its ancestors and itself, by position from
            cached_len on; -1 behind itself. Given if results must not depend on the shape of the tree.
        region_base: if given, the row's own keys are its tree slots instead of its tokens: bit j of `mask` stands for
            the slot at logical position region_base + j, and `slots` are tree slots. Needs a mask, and no `path`.
        num_splits: programs that share the keys of one tile of queries.
        short: attend to keys in a region in one launch, as fits contexts of at most `short_tokens`; slower with
            longer ones.
        lengths: `first` and `cached_len` in host memory, if the host made the batch.
    """

    first: Tensor
    cached_len: Tensor
    table_rows: Tensor
    page_tables: Tensor
    slots: Tensor
    page_size: int
    max_row_tokens: int
    mask: Tensor | None = None
    path: Tensor | None = None
    region_base: int | None = None
    num_splits: int = 1
    short: bool = False
    lengths: HostLengths | None = None


class TreeBuffers:
    """Device memory for KV slots, ancestor masks and paths of a round's trees; all replays of a graph share it."""

    def __init__(self, max_tokens: int, max_path: int, device: torch.device) -> None:
        # Zeros, because a pass without launches (kernels.compiling.compile_ahead) still writes to these slots.
        self._slots = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._mask = torch.zeros(max_tokens * -(-max_tokens // 32), dtype=torch.int32, device=device)
        self._path = torch.zeros(max_tokens, max_path, dtype=torch.int32, device=device)

    def batch(
        self,
        tokens: RoundTokens,
        page_tables: Tensor,
        page_size: int,
        max_row_tokens: int,
        num_splits: int,
        by_path: bool,
        int_params: Tensor | None = None,
    ) -> PagedBatch:
        """Expand the trees into a batch, on the device.

        `by_path`: attend so that results do not depend on a tree's shape. `int_params`: see `expand_tree`.
        """
        num_tokens = tokens.token_ids.shape[0]
        words = -(-max_row_tokens // 32)
        slots, path = self._slots[:num_tokens], self._path[:num_tokens]
        mask = self._mask[: num_tokens * words].view(num_tokens, words)
        expand_tree(tokens, page_tables, page_size, max_row_tokens, slots, mask, path, int_params)
        return PagedBatch(
            token_ids=tokens.token_ids,
            positions=tokens.positions,
            first=tokens.first,
            cached_len=tokens.cached_len,
            table_rows=tokens.table_rows,
            page_tables=page_tables,
            slots=slots,
            page_size=page_size,
            max_row_tokens=max_row_tokens,
            mask=mask,
            path=path if by_path else None,
            num_splits=num_splits,
        )


_ALIGNMENT = 16
"""Fields begin at multiples of this many int32 words: for other alignments kernels would be compiled again."""

Words = NDArray[np.int32]


class PromptShape(NamedTuple):
    """Token slots and rows of a forward."""

    tokens: int
    rows: int


class PromptChunk(NamedTuple):
    """Consecutive tokens of one request in a forward, one for each slot."""

    table_row: int
    token_ids: Sequence[int] | Words
    start: int
    """Position of the first token; all tokens before it have valid KV."""
    slots: Words
    """KV slots of the tokens; -1 for none."""
    offset: int = 0
    """What is added to positions to get rotary positions."""


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
        """Describe a forward of these chunks. Unused tokens and rows are padding in any shape cut out of it."""
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
        """Return the lengths in a description."""
        return HostLengths(words[self._spans[3]], words[self._spans[4]])

    def batch(
        self, words: Tensor, shape: PromptShape, page_tables: Tensor, page_size: int, lengths: HostLengths | None = None
    ) -> PagedBatch:
        """Return the batch of `shape` that `words`, int32 [size] on the device, describe; see `describe`."""
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
