"""Draft steps of a block head on a GPU: one that runs the blocks of new roots, and cheap ones that read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.frontier_state import RegionPlan, StepTokens
from outrider.attention.base import TokenBatch
from outrider.attention.paged import PagedBatch, choose_splits
from outrider.drafting.model.burst import StepBucket
from outrider.drafting.model.cuda_forward import DraftSteps
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.block import BlockHead

_WORD = 32


class BlockRoots(NamedTuple):
    """The roots of the blocks of R requests. Tensors [R] on the device, int32 but for `there`."""

    tokens: Tensor
    """Token ids; 0 where there is no root."""
    positions: Tensor
    """Positions in the sequence; likewise."""
    there: Tensor
    """bool, whether there is a root."""
    table_rows: Tensor
    context_len: Tensor
    """Positions of the context that the block sees, from the first on."""


class BlockLayout(NamedTuple):
    """What is the same in all forwards of R requests' blocks of S places. Tensors int32 on the device."""

    ids: Tensor
    """[R, S], masks but for the first of each, which is the root's."""
    order: Tensor
    """[S], 0, 1, ..."""
    first: Tensor
    """[R + 1], where blocks begin."""
    pages: Tensor
    """int64 [S], columns of the page table in which the places' scratch slots are."""
    offsets: Tensor
    """[S], and where in these pages."""
    own: Tensor
    """[R, W], of each place the bits of the block's own, which all see all."""

    @classmethod
    def new(cls, num_rows: int, size: int, mask_token: int, plan: RegionPlan, region: int) -> BlockLayout:
        """Of scratch slots behind `region` tree slots."""
        int32, device = torch.int32, plan.page_tables.device
        order = torch.arange(size, dtype=int32, device=device)
        places = plan.region_base + region + order
        own = [(1 << min(size - first, _WORD)) - 1 for first in range(0, size, _WORD)]
        return cls(
            torch.full((num_rows, size), mask_token, dtype=int32, device=device),
            order,
            torch.arange(0, (num_rows + 1) * size, size, dtype=int32, device=device),
            (places // plan.page_size).long(),
            places % plan.page_size,
            torch.tensor(own, dtype=torch.int64, device=device).int().repeat(num_rows, 1),
        )


class BlockSteps(DraftSteps):
    """See DraftSteps. A fresh step takes features that came: it writes keys and values of their positions, and runs the
    block of each root among its nodes, one of a request at most. Any other step reads what requests' last blocks say.
    """

    def __init__(self, head: DraftModel, *rest: Any) -> None:
        """Raises TypeError for another model than a block head."""
        super().__init__(head, *rest)
        if not isinstance(head, BlockHead):
            raise TypeError(f"{type(head).__name__} is no block head")
        self._head, self._blocks = head, self._memory.room_for_blocks
        shape, device = self._shape, head.device
        # Tree slots with keys and values of the target's features; the last row is for padding.
        self._injected = torch.zeros(shape.num_rows + 1, shape.region, dtype=torch.bool, device=device)
        self._bits = torch.arange(_WORD, dtype=torch.int32, device=device)
        self._layouts: dict[int, BlockLayout] = {}

    def _propose(self, bucket: StepBucket, step: StepTokens, tokens: Tensor, scores: Tensor) -> None:
        """See DraftSteps."""
        head, memory = self._head, self._memory
        store = memory.features
        if store is None:
            raise ValueError("a block head needs features")
        given = store.index_select(0, step.sources)
        rows = torch.where(step.table_rows < 0, self._shape.num_rows, step.table_rows).long()
        places = (rows, step.slots.clamp(min=0).long())
        fresh = step.sources >= memory.first_given
        if bucket.fresh:
            self._injected.index_put_(places, fresh)
            slots = torch.where(fresh, step.kv_slots, -1)
            batch = TokenBatch(step.token_ids, step.rotary)
            head.extend(batch, given[:, : self._shape.feature_size], slots, memory.kv, self._attention)
            self._run_roots(bucket, step, fresh & (step.bases > -torch.inf))
        else:
            self._injected.index_put_(places, torch.zeros_like(fresh))
        size = head.state_size
        logits, left, is_over = self.read(rows, step.token_ids, step.positions, given[:, :size])
        self._proposer(logits, step.table_rows, step.positions, tokens, scores)
        scores.masked_fill_(is_over.unsqueeze(1), -torch.inf)
        if size:
            store[:, :size].index_copy_(0, step.targets, left)

    def read(self, rows: Tensor, tokens: Tensor, positions: Tensor, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See BlockHead.read_blocks, of nodes of the table's `rows`."""
        return self._head.read_blocks(self._blocks, rows, tokens, positions, given)

    def _run_roots(self, bucket: StepBucket, step: StepTokens, is_root: Tensor) -> None:
        """Run the blocks of a step's roots."""
        width, num_rows, burst = is_root.shape[0], bucket.rows, self.rows.head(bucket.rows)
        # Of each request the place of its root in the step, `width` where there is none.
        where = torch.where(is_root, step.rows, num_rows).long()
        order = torch.arange(width, device=is_root.device)
        roots = torch.full((num_rows + 1,), width, device=is_root.device).scatter_(0, where, order)[:num_rows]
        places, there = roots.clamp(max=width - 1), roots < width
        injected = self._injected[burst.table_rows.long()].view(num_rows, -1, _WORD).int() << self._bits
        seen = step.mask[places] & injected.sum(-1, dtype=torch.int32)
        at = BlockRoots(
            torch.where(there, step.token_ids[places], 0),
            torch.where(there, step.positions[places], 0),
            there,
            burst.table_rows,
            burst.context_len,
        )
        self.run_blocks(at, seen)

    def run_blocks(self, at: BlockRoots, seen: Tensor | None = None) -> Tensor:
        """Run the blocks of R requests, for `read`; may be captured.

        Returns their table rows, int64 [R], and that of padding where there is no root.

        `seen`: int32 [R, region / 32], bits of tree slots with keys of features that the blocks see beside the context;
        none unless given.
        """
        head, plan, shape = self._head, self._memory.plan, self._shape
        num_rows, size = at.tokens.shape[0], head.block.size
        layout = self._layout_of(num_rows)
        layout.ids[:, 0].copy_(at.tokens)
        words, base = layout.own, plan.region_base + shape.region
        if seen is not None:
            words, base = torch.cat((seen, words), 1), plan.region_base
        pages = plan.page_tables[at.table_rows.long()[:, None], layout.pages]
        slots = torch.where(at.there[:, None], pages * plan.page_size + layout.offsets, -1)
        heads = (head.num_heads, head.num_kv_heads)
        batch = PagedBatch(
            token_ids=layout.ids.flatten(),
            positions=(at.positions[:, None] + layout.order).flatten(),
            first=layout.first,
            cached_len=at.context_len,
            table_rows=at.table_rows,
            page_tables=plan.page_tables,
            slots=slots.flatten(),
            page_size=plan.page_size,
            max_row_tokens=size,
            mask=words.repeat_interleave(size, 0),
            region_base=base,
            num_splits=choose_splits(num_rows * size, num_rows, size, *heads, self._num_processors),
        )
        where = torch.where(at.there, at.table_rows, shape.num_rows).long()
        rows = head.forward_blocks(batch, self._memory.kv, self._attention)
        head.keep_blocks(self._blocks, where, at.positions, rows)
        return where

    def _layout_of(self, num_rows: int) -> BlockLayout:
        found = self._layouts.get(num_rows)
        if found is None:
            block, plan = self._head.block, self._memory.plan
            made = BlockLayout.new(num_rows, block.size, block.mask_token, plan, self._shape.region)
            # Another thread may compile a step of the same sizes.
            found = self._layouts.setdefault(num_rows, made)
        return found
