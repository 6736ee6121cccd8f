"""Draft steps of a block head on a GPU: one that runs the blocks of new roots, and cheap ones that read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.frontier_state import BurstRows, StepTokens
from outrider.attention.base import TokenBatch
from outrider.attention.paged import PagedBatch, choose_splits
from outrider.drafting.model.burst import StepBucket
from outrider.drafting.model.cuda_forward import DraftSteps
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.block import BlockHead

_WORD = 32


class BlockSteps(DraftSteps):
    """See DraftSteps. A fresh step takes features that came: it writes keys and values of their positions, and runs the
    block of each root among its nodes, one of a request at most. Any other step reads the states of its nodes' parents.
    """

    def __init__(self, head: DraftModel, *rest: Any) -> None:
        """Raises TypeError for another model than a block head."""
        super().__init__(head, *rest)
        if not isinstance(head, BlockHead):
            raise TypeError(f"{type(head).__name__} is no block head")
        self._head = head
        shape, device = self._shape, head.device
        # Tree slots with keys and values of the target's features; the last row is for padding.
        self._injected = torch.zeros(shape.num_rows + 1, shape.region, dtype=torch.bool, device=device)
        self._bits = torch.arange(_WORD, dtype=torch.int32, device=device)

    def _propose(self, bucket: StepBucket, step: StepTokens, tokens: Tensor, scores: Tensor) -> None:
        """See DraftSteps."""
        head, memory = self._head, self._memory
        store = memory.features
        if store is None:
            raise ValueError("a block head needs features")
        states = store.index_select(0, step.sources)
        rows = torch.where(step.table_rows < 0, self._shape.num_rows, step.table_rows).long()
        places = (rows, step.slots.clamp(min=0).long())
        fresh = step.sources >= memory.first_given
        if bucket.fresh:
            self._injected.index_put_(places, fresh)
            slots = torch.where(fresh, step.kv_slots, -1)
            batch = TokenBatch(step.token_ids, step.rotary)
            head.extend(batch, states[:, : self._shape.feature_size], slots, memory.kv, self._attention)
            states = self._with_blocks(bucket, step, states, fresh & (step.bases > -torch.inf))
        else:
            self._injected.index_put_(places, torch.zeros_like(fresh))
        hidden, left = head.advance(step.token_ids, states)
        self._proposer(head.logits(hidden), step.table_rows, step.positions, tokens, scores)
        scores.masked_fill_(head.is_over(hidden).unsqueeze(1), -torch.inf)
        store.index_copy_(0, step.targets, left)

    def _with_blocks(self, bucket: StepBucket, step: StepTokens, states: Tensor, is_root: Tensor) -> Tensor:
        """The states with those of blocks in the place of roots."""
        width, num_rows = states.shape[0], bucket.rows
        # Of each request the place of its root in the step, `width` where there is none.
        where = torch.where(is_root, step.rows, num_rows).long()
        order = torch.arange(width, device=states.device)
        roots = torch.full((num_rows + 1,), width, device=states.device).scatter_(0, where, order)[:num_rows]
        batch = self._block_batch(self.rows.head(num_rows), step, roots.clamp(max=width - 1), roots < width)
        found = self._head.forward_blocks(batch, self._memory.kv, self._attention)
        return torch.cat((states, states[:1])).index_copy_(0, roots, found)[:width]

    def _block_batch(self, rows: BurstRows, step: StepTokens, roots: Tensor, there: Tensor) -> PagedBatch:
        """The blocks of R requests: `roots` [R] are places in the step, bool `there` [R] whether they are such."""
        head, plan, shape = self._head, self._memory.plan, self._shape
        num_rows, size = roots.shape[0], head.block.size
        ids, positions = head.block_tokens(
            torch.where(there, step.token_ids[roots], 0), torch.where(there, step.positions[roots], 0)
        )
        tables = rows.table_rows.long()
        masks = step.mask[roots].unsqueeze(-1) >> self._bits & 1
        seen = masks.flatten(1).bool() & self._injected[tables]
        scratch = torch.arange(-(-size // _WORD) * _WORD, device=roots.device) < size
        allowed = torch.cat((seen, scratch.expand(num_rows, -1)), 1).view(num_rows, -1, _WORD)
        words = (allowed.int() << self._bits).sum(-1, dtype=torch.int32)
        places = plan.region_base + shape.region + torch.arange(size, device=roots.device)
        pages = plan.page_tables[tables[:, None], places // plan.page_size]
        slots = pages * plan.page_size + (places % plan.page_size).int()
        heads = (head.num_heads, head.num_kv_heads)
        return PagedBatch(
            token_ids=ids,
            positions=positions,
            first=torch.arange(0, (num_rows + 1) * size, size, dtype=torch.int32, device=roots.device),
            cached_len=rows.context_len,
            table_rows=rows.table_rows,
            page_tables=plan.page_tables,
            slots=torch.where(there[:, None], slots, -1).int().flatten(),
            page_size=plan.page_size,
            max_row_tokens=size,
            mask=words.repeat_interleave(size, 0),
            region_base=plan.region_base,
            num_splits=choose_splits(num_rows * size, num_rows, size, *heads, self._num_processors),
        )
