"""Torch reference of kernels.blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.frontier_state import BlockLayout, BlockRoots, BlockStore, RegionPlan, StepTokens

_WORD = 32


def find_roots(
    step: StepTokens, first_given: int, injected: Tensor, slots: Tensor, places: Tensor, positions: Tensor
) -> None:
    """Implement kernels.blocks.find_roots."""
    given = (step.sources >= first_given) & (step.rows >= 0)
    _mark(step, injected, given)
    slots.copy_(torch.where(given, step.kv_slots, -1))
    found = (given & (step.bases > -torch.inf)).nonzero()[:, 0]
    rows = step.rows[found].long()
    places.fill_(-1)[rows] = found.int()
    positions.zero_()[rows] = step.positions[found]


def forget_injected(step: StepTokens, injected: Tensor) -> None:
    """Implement kernels.blocks.forget_injected."""
    _mark(step, injected, torch.zeros_like(step.rows))


def _mark(step: StepTokens, injected: Tensor, values: Tensor) -> None:
    real = step.rows >= 0
    injected[step.table_rows[real].long(), step.slots[real].long()] = values[real].to(injected.dtype)


def lay_out_blocks(
    roots: BlockRoots, plan: RegionPlan, region: int, mask_token: int, seen: tuple[Tensor, Tensor] | None,
    out: BlockLayout,
) -> None:  # fmt: skip
    """Implement kernels.blocks.lay_out_blocks, writing to `out`."""
    num_rows = roots.positions.shape[0]
    size, device = out.token_ids.shape[0] // num_rows, roots.positions.device
    there, order = roots.there >= 0, torch.arange(size, device=device)
    places = torch.where(there, roots.places, 0).long()
    out.tokens.copy_(torch.where(there, roots.token_ids[places], 0))
    out.rows.copy_(torch.where(there, roots.table_rows, -1))
    ids = out.token_ids.view(num_rows, size).fill_(mask_token)
    ids[:, 0] = out.tokens
    out.positions.view(num_rows, size).copy_(roots.positions[:, None] + order)
    out.first.copy_(torch.arange(num_rows + 1, device=device) * size)
    scratch = plan.region_base + region + order
    pages = plan.page_tables[roots.table_rows.long()[:, None], scratch // plan.page_size]
    slots = pages * plan.page_size + scratch % plan.page_size
    out.slots.view(num_rows, size).copy_(torch.where(there[:, None], slots, -1))
    own = [(1 << min(size - first, _WORD)) - 1 for first in range(0, size, _WORD)]
    words = torch.tensor(own, device=device).int().repeat(num_rows, 1)
    if seen is not None:
        mask, injected = seen
        bits = injected[roots.table_rows.long()].view(num_rows, -1, _WORD).int() << torch.arange(_WORD, device=device)
        packed = torch.where(there[:, None], mask[places] & bits.sum(-1).int(), 0)
        words = torch.cat((packed, words), 1)
    out.mask.copy_(words.repeat_interleave(size, 0))


def keep_blocks(blocks: BlockStore, where: Tensor, positions: Tensor, rows: Tensor, logits: Tensor) -> None:
    """Implement kernels.blocks.keep_blocks."""
    guesses = rows.shape[0] // where.shape[0]
    where = _requests(blocks, where)
    places = (where[:, None] * guesses + torch.arange(guesses, device=where.device)).flatten()
    blocks.begins[where] = positions.int()
    blocks.rows.index_copy_(0, places, rows)
    blocks.logits.index_copy_(0, places, logits)


def read_logits(blocks: BlockStore, where: Tensor, positions: Tensor, added: Tensor | None, out: Tensor) -> None:
    """Implement kernels.blocks.read_logits, writing to `out`."""
    place, at, guesses = _places(blocks, where, positions)
    torch.index_select(blocks.logits, 0, at, out=out)
    if added is not None:
        out += added
    out.masked_fill_(((place < 0) | (place >= guesses)).unsqueeze(1), -torch.inf)


def read_inputs(
    blocks: BlockStore, where: Tensor, positions: Tensor, memory: Tensor, tokens: Tensor, embedding: Tensor, out: Tensor
) -> None:
    """Implement kernels.blocks.read_inputs, writing to `out`."""
    place, at, _ = _places(blocks, where, positions)
    memory = memory.masked_fill((place == 0).unsqueeze(1), 0.0)
    torch.cat((memory, embedding.index_select(0, tokens), blocks.rows.index_select(0, at)), 1, out=out)


def _requests(blocks: BlockStore, where: Tensor) -> Tensor:
    return torch.where(where < 0, blocks.begins.shape[0] - 1, where).long()


def _places(blocks: BlockStore, where: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the nodes' places within blocks, their rows of the store, and the guesses of a block."""
    guesses = blocks.logits.shape[0] // blocks.begins.shape[0]
    where = _requests(blocks, where)
    place = positions - blocks.begins[where]
    return place, where * guesses + place.clamp(0, guesses - 1), guesses
