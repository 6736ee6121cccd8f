"""Draft steps of a block head on a GPU: one that runs the blocks of new roots, and cheap ones that read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.frontier_state import StepTokens
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
        width, num_rows, burst = states.shape[0], bucket.rows, self.rows.head(bucket.rows)
        # Of each request the place of its root in the step, `width` where there is none.
        where = torch.where(is_root, step.rows, num_rows).long()
        order = torch.arange(width, device=states.device)
        roots = torch.full((num_rows + 1,), width, device=states.device).scatter_(0, where, order)[:num_rows]
        places, there = roots.clamp(max=width - 1), roots < width
        masks = step.mask[places].unsqueeze(-1) >> self._bits & 1
        seen = masks.flatten(1).bool() & self._injected[burst.table_rows.long()]
        at = BlockRoots(
            torch.where(there, step.token_ids[places], 0),
            torch.where(there, step.positions[places], 0),
            there,
            burst.table_rows,
            burst.context_len,
        )
        found = self.run_blocks(at, seen)
        return torch.cat((states, states[:1])).index_copy_(0, roots, found)[:width]

    def run_blocks(self, at: BlockRoots, seen: Tensor | None = None) -> Tensor:
        """The states [R, state_size] of the blocks of R requests; may be captured.

        `seen`: bool [R, region], tree slots with keys of features that the blocks see beside the context; none unless
        given.
        """
        head, plan, shape = self._head, self._memory.plan, self._shape
        num_rows, size, device = at.tokens.shape[0], head.block.size, at.tokens.device
        ids, positions = head.block_tokens(at.tokens, at.positions)
        allowed = (torch.arange(-(-size // _WORD) * _WORD, device=device) < size).expand(num_rows, -1)
        base = plan.region_base + shape.region
        if seen is not None:
            allowed, base = torch.cat((seen, allowed), 1), plan.region_base
        words = (allowed.reshape(num_rows, -1, _WORD).int() << self._bits).sum(-1, dtype=torch.int32)
        places = plan.region_base + shape.region + torch.arange(size, device=device)
        pages = plan.page_tables[at.table_rows.long()[:, None], places // plan.page_size]
        slots = pages * plan.page_size + (places % plan.page_size).int()
        heads = (head.num_heads, head.num_kv_heads)
        batch = PagedBatch(
            token_ids=ids,
            positions=positions,
            first=torch.arange(0, (num_rows + 1) * size, size, dtype=torch.int32, device=device),
            cached_len=at.context_len,
            table_rows=at.table_rows,
            page_tables=plan.page_tables,
            slots=torch.where(at.there[:, None], slots, -1).int().flatten(),
            page_size=plan.page_size,
            max_row_tokens=size,
            mask=words.repeat_interleave(size, 0),
            region_base=base,
            num_splits=choose_splits(num_rows * size, num_rows, size, *heads, self._num_processors),
        )
        return head.forward_blocks(batch, self._memory.kv, self._attention)
