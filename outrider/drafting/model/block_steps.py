"""Draft steps of a block head on a GPU: one that runs the blocks of new roots, and cheap ones that read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.block_state import BlockLayout, BlockRoots
from kernels.blocks import find_roots, forget_injected, lay_out_blocks
from kernels.frontier_state import StepTokens
from outrider.attention.base import TokenBatch
from outrider.attention.paged import PagedBatch, choose_splits
from outrider.drafting.model.burst import StepBucket
from outrider.drafting.model.cuda_forward import DraftSteps
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.block import BlockHead


class BlockSteps(DraftSteps):
    """See DraftSteps. A fresh step takes features that came: it writes keys and values of their positions, and runs the
    block of each root among its nodes, one of a request at most. Any other step reads what requests' last blocks say.

    Beside products, norms and attention a fresh step launches: roots found, features gathered, angles, keys written,
    blocks laid out and kept, and what is read; another one the first and the last of these.
    """

    def __init__(self, head: DraftModel, *rest: Any) -> None:
        """Raises TypeError for another model than a block head."""
        super().__init__(head, *rest)
        if not isinstance(head, BlockHead):
            raise TypeError(f"{type(head).__name__} is no block head")
        self._head, self._blocks = head, self._memory.room_for_blocks
        # 1 for tree slots with keys and values of the target's features.
        size = (self._shape.num_rows + 1, self._shape.region)
        self._injected = torch.zeros(size, dtype=torch.int8, device=head.device)

    def _propose(self, bucket: StepBucket, step: StepTokens, tokens: Tensor, scores: Tensor) -> None:
        head, memory = self._head, self._memory
        store, size, taken = memory.features, head.state_size, self._shape.feature_size
        if store is None:
            raise ValueError("a block head needs features")
        given = store[:, : max(size, taken if bucket.fresh else 0)].index_select(0, step.sources)
        if bucket.fresh:
            rows = self.rows.head(bucket.rows)
            slots, roots = find_roots(step, rows, memory.first_given, self._injected)
            batch = TokenBatch(step.token_ids, step.rotary)
            head.extend(batch, given[:, :taken], slots, memory.kv, self._attention)
            self.run_blocks(roots, step.mask)
        else:
            forget_injected(step, self._injected)
        logits, left = self.read(step.table_rows, step.token_ids, step.positions, given[:, :size])
        self._proposer(logits, step.table_rows, step.positions, tokens, scores)
        if size:
            store[:, :size].index_copy_(0, step.targets, left)

    def read(self, rows: Tensor, tokens: Tensor, positions: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """See BlockHead.read_blocks, of nodes of the table's `rows`."""
        return self._head.read_blocks(self._blocks, rows, tokens, positions, given)

    def run_blocks(self, roots: BlockRoots, seen: Tensor | None = None) -> BlockLayout:
        """Run the blocks of R requests, for `read`; may be captured.

        `seen`: int32 [M, region / 32], bits of tree slots that the tokens among which the roots are see; of these the
        blocks see what has keys of features, beside the context. None: they see the context alone.
        """
        head, plan, region = self._head, self._memory.plan, self._shape.region
        num_rows, size = roots.positions.shape[0], head.block.size
        both = None if seen is None else (seen, self._injected)
        layout = lay_out_blocks(roots, plan, region, size, head.block.mask_token, both)
        heads = (head.num_heads, head.num_kv_heads)
        batch = PagedBatch(
            token_ids=layout.token_ids,
            positions=layout.positions,
            first=layout.first,
            cached_len=roots.context_len,
            table_rows=roots.table_rows,
            page_tables=plan.page_tables,
            slots=layout.slots,
            page_size=plan.page_size,
            max_row_tokens=size,
            mask=layout.mask,
            region_base=plan.region_base + (region if seen is None else 0),
            num_splits=choose_splits(num_rows * size, num_rows, size, *heads, self._num_processors),
        )
        rows = head.forward_blocks(batch, self._memory.kv, self._attention)
        head.keep_blocks(self._blocks, layout.rows, roots.positions, rows)
        return layout
