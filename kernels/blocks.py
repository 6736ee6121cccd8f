"""Blocks of a block head on a device: find their roots, lay them out, and store and read their guesses."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.frontier_state import BlockLayout, BlockRoots, BlockStore, BurstRows, RegionPlan, StepTokens
from kernels.launch import backend


def find_roots(step: StepTokens, rows: BurstRows, first_given: int, injected: Tensor) -> tuple[Tensor, BlockRoots]:
    """Find the tokens of a step that take a feature of the target, and the roots of blocks among them. One launch.

    Args:
        step: M places; at most one of each row has both a given feature and a base: the row's root.
        rows: the burst's, B.
        first_given: `step.sources` from this on are given features, which the target computed.
        injected: int8 [T, R], contiguous, written at the tree slots of the step: 1 where the slot gets keys of a given
            feature, otherwise 0.

    Returns:
        int32 [M], KV slots of the tokens with a given feature, -1 for others; and the roots.
    """
    _check_injected(injected)
    width, num_rows = step.rows.shape[0], rows.table_rows.shape[0]
    slots, places, positions = (step.rows.new_empty(size) for size in (width, num_rows, num_rows))
    backend(injected, "blocks").find_roots(step, first_given, injected, slots, places, positions)
    return slots, BlockRoots(step.token_ids, places, places, positions, rows.table_rows, rows.context_len)


def forget_injected(step: StepTokens, injected: Tensor) -> None:
    """Clear `injected` at the tree slots of a step, which hold no keys of features. One launch. See `find_roots`."""
    _check_injected(injected)
    backend(injected, "blocks").forget_injected(step, injected)


def lay_out_blocks(
    roots: BlockRoots, plan: RegionPlan, region: int, size: int, mask_token: int, seen: tuple[Tensor, Tensor] | None
) -> BlockLayout:
    """Lay out blocks in new tensors. One launch.

    Args:
        roots: of R requests.
        plan: where tree slots lie; scratch slots for a row's block follow its `region` tree slots.
        region: a multiple of 32.
        size: places of a block, S.
        mask_token: token id of all places but the first.
        seen: int32 [M, region / 32], the tree slots that each of `roots.token_ids` sees, and `injected` of
            `find_roots`: blocks see the tree slots that are in both. None: they see no tree slot.
    """
    words = 0 if seen is None else region // 32
    if seen is not None:
        mask, injected = seen
        _check_injected(injected)
        if mask.shape != (roots.token_ids.shape[0], words) or injected.shape[1] != region or not mask.is_contiguous():
            raise ValueError(f"a mask of {list(mask.shape)} and {list(injected.shape)} slots for regions of {region}")
    if plan.page_tables.stride(1) != 1:
        raise ValueError("the rows of the page tables must be contiguous")
    num_rows = roots.positions.shape[0]
    places = num_rows * size

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=roots.positions.device)

    out = BlockLayout(
        ints(num_rows), ints(num_rows), ints(places), ints(places), ints(num_rows + 1), ints(places),
        ints(places, words + -(-size // 32)),
    )  # fmt: skip
    backend(roots.positions, "blocks").lay_out_blocks(roots, plan, region, mask_token, seen, out)
    return out


def keep_blocks(blocks: BlockStore, where: Tensor, positions: Tensor, rows: Tensor, logits: Tensor) -> None:
    """Store the guesses of R blocks. One launch.

    Args:
        blocks: written; G guesses a request.
        where: int [R], the blocks' requests; negative for padding.
        positions: int [R], of the roots.
        rows: [R * G, hidden], contiguous.
        logits: float32 [R * G, vocab_size], contiguous.
    """
    guesses = blocks.logits.shape[0] // blocks.begins.shape[0]
    count = where.shape[0] * guesses
    for kept, new in ((blocks.rows, rows), (blocks.logits, logits)):
        if new.shape != (count, kept.shape[1]) or new.dtype != kept.dtype or not new.is_contiguous():
            raise ValueError(f"{list(new.shape)} {new.dtype} for {count} guesses of {kept.shape[1]} {kept.dtype}")
    backend(logits, "blocks").keep_blocks(blocks, where, positions, rows, logits)


def read_logits(blocks: BlockStore, where: Tensor, positions: Tensor, added: Tensor | None = None) -> Tensor:
    """Return the logits at the nodes' places, float32 [M, vocab_size]; -inf outside the block. One launch.

    Args:
        where: int [M], the nodes' requests; negative for padding.
        positions: int [M], of the nodes.
        added: float32 [M, vocab_size], contiguous, added to the logits.
    """
    shape = (where.shape[0], blocks.logits.shape[1])
    if added is not None and (added.shape != shape or added.dtype != torch.float32 or not added.is_contiguous()):
        raise ValueError(f"{list(added.shape)} {added.dtype} added to logits of {list(shape)}")
    out = torch.empty(shape, dtype=torch.float32, device=where.device)
    backend(out, "blocks").read_logits(blocks, where, positions, added, out)
    return out


def read_inputs(
    blocks: BlockStore, where: Tensor, positions: Tensor, memory: Tensor, tokens: Tensor, embedding: Tensor
) -> Tensor:
    """Return the inputs of a sequential part for nodes: memory, embedding and row, side by side. One launch.

    Args:
        memory: [M, state_size] of the rows' dtype, rows may be strided; zeros replace it where the node is the block's
            root.
        tokens: int [M], token ids of the nodes.
        embedding: [ids, rank] of the rows' dtype, contiguous.

    For the rest see `read_logits`. Outside the block the row of the nearest place is taken.

    Returns:
        [M, state_size + rank + hidden].
    """
    if not memory.dtype == embedding.dtype == blocks.rows.dtype or not embedding.is_contiguous():
        raise ValueError(f"memory {memory.dtype} and embedding {embedding.dtype} for rows {blocks.rows.dtype}")
    size = memory.shape[1] + embedding.shape[1] + blocks.rows.shape[1]
    out = torch.empty(where.shape[0], size, dtype=blocks.rows.dtype, device=where.device)
    backend(out, "blocks").read_inputs(blocks, where, positions, memory, tokens, embedding, out)
    return out


def _check_injected(injected: Tensor) -> None:
    if injected.dtype != torch.int8 or not injected.is_contiguous():
        raise ValueError(f"injected slots must be contiguous int8, not {injected.dtype}")
