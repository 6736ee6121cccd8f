"""Triton kernels of kernels.blocks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.frontier_state import BlockLayout, BlockRoots, BlockStore, RegionPlan, StepTokens
from kernels.launch import power_of_two

_NEVER: tl.constexpr = tl.constexpr(float("-inf"))
_COLUMNS = 2048
"""Columns that a program copies."""


@triton.jit(do_not_specialize=["num_nodes", "first_given"])
def _find_roots(
    rows, table_rows, tree_slots, sources, kv_slots, bases, node_positions, injected, slots, places, positions,
    num_nodes, first_given, REGION: tl.constexpr, NODES: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """One program for each row of the burst, whose lanes are all nodes of the step; the first also handles padding."""
    row = tl.program_id(0)
    node = tl.arange(0, NODES)
    inside = node < num_nodes
    of_row = tl.load(rows + node, mask=inside, other=-1)
    real = of_row == row
    table = tl.load(table_rows + node, mask=real, other=0).to(tl.int64)
    slot = tl.load(tree_slots + node, mask=real, other=0)
    given = real & FRESH
    if FRESH:
        given = given & (tl.load(sources + node, mask=real, other=0) >= first_given)
        kv_slot = tl.load(kv_slots + node, mask=given, other=-1)
        tl.store(slots + node, kv_slot, mask=real | (inside & (of_row < 0) & (row == 0)))
        base = tl.load(bases + node, mask=given, other=_NEVER)
        place = tl.max(tl.where(given & (base > _NEVER), node, -1), 0)
        tl.store(places + row, place)
        tl.store(positions + row, tl.load(node_positions + place, mask=place >= 0, other=0))
    tl.store(injected + table * REGION + slot, given.to(tl.int8), mask=real)


def find_roots(
    step: StepTokens, first_given: int, injected: Tensor, slots: Tensor, places: Tensor, positions: Tensor,
    fresh: bool = True,
) -> None:  # fmt: skip
    """Implement kernels.blocks.find_roots. Unless `fresh`, no token has a given feature and there are no roots."""
    width = step.rows.shape[0]
    _find_roots[(step.first.shape[0] - 1,)](
        step.rows, step.table_rows, step.slots, step.sources, step.kv_slots, step.bases, step.positions,
        injected, slots, places, positions, width, first_given,
        REGION=injected.shape[1], NODES=power_of_two(width), FRESH=fresh, num_warps=4 if width > 64 else 1,
    )  # fmt: skip


def forget_injected(step: StepTokens, injected: Tensor) -> None:
    """Implement kernels.blocks.forget_injected."""
    find_roots(step, 0, injected, step.slots, step.slots, step.slots, fresh=False)


@triton.jit(do_not_specialize=["mask_token", "table_stride"])
def _lay_out_blocks(
    node_ids, places, is_there, root_positions, table_rows, page_tables, node_mask, injected,
    tokens, rows, token_ids, positions, first, slots, mask, mask_token, table_stride,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, SEEN: tl.constexpr, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr,
    SCRATCH: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One program a root. SEEN: words of the mask for tree slots. SCRATCH: logical position of the block's places."""
    row = tl.program_id(0)
    there = tl.load(is_there + row) >= 0
    place = tl.load(places + row, mask=there, other=0).to(tl.int64)
    token = tl.load(node_ids + place, mask=there, other=0)
    table = tl.load(table_rows + row)
    tl.store(tokens + row, token)
    tl.store(rows + row, tl.where(there, table, -1))
    tl.store(first + row, row * SIZE)
    # The last program also stores the end of all blocks.
    tl.store(first + row + 1, (row + 1) * SIZE, mask=row + 1 == tl.num_programs(0))

    order = tl.arange(0, SIZE_PAD)
    inside = order < SIZE
    at = row * SIZE + order
    tl.store(token_ids + at, tl.where(order == 0, token, mask_token), mask=inside)
    tl.store(positions + at, tl.load(root_positions + row) + order, mask=inside)
    logical = SCRATCH + order
    pages = page_tables + table.to(tl.int64) * table_stride
    page = tl.load(pages + logical // PAGE, mask=inside & there, other=0)
    tl.store(slots + at, tl.where(there, page * PAGE + logical % PAGE, -1), mask=inside)

    word = tl.arange(0, WORDS_PAD)
    count = tl.minimum(SIZE - (word - SEEN) * 32, 32)
    # A shift by all 32 bits is undefined.
    bits = tl.where(count == 32, -1, (tl.full([WORDS_PAD], 1, tl.int32) << tl.minimum(tl.maximum(count, 0), 31)) - 1)
    if SEEN > 0:
        of_tree = (word < SEEN) & there
        bit = tl.arange(0, 32)
        slot = injected + table.to(tl.int64) * (SEEN * 32) + word[:, None] * 32 + bit[None, :]
        has_key = tl.load(slot, mask=of_tree[:, None], other=0).to(tl.int32)
        seen = tl.load(node_mask + place * SEEN + word, mask=of_tree, other=0)
        bits = tl.where(word < SEEN, seen & tl.sum(has_key << bit[None, :], 1).to(tl.int32), bits)
    target = mask + at[:, None] * WORDS + word[None, :]
    all_bits = tl.broadcast_to(bits[None, :], [SIZE_PAD, WORDS_PAD])
    tl.store(target, all_bits, mask=inside[:, None] & (word < WORDS)[None, :])


def lay_out_blocks(
    roots: BlockRoots, plan: RegionPlan, region: int, mask_token: int, seen: tuple[Tensor, Tensor] | None,
    out: BlockLayout,
) -> None:  # fmt: skip
    """Implement kernels.blocks.lay_out_blocks, writing to `out`."""
    num_rows = roots.positions.shape[0]
    size, words = out.token_ids.shape[0] // num_rows, out.mask.shape[1]
    node_mask, injected = (out.mask, out.mask) if seen is None else seen
    _lay_out_blocks[(num_rows,)](
        roots.token_ids, roots.places, roots.there, roots.positions, roots.table_rows, plan.page_tables,
        node_mask, injected, *out, mask_token, plan.page_tables.stride(0),
        SIZE=size, SIZE_PAD=power_of_two(size), SEEN=0 if seen is None else region // 32,
        WORDS=words, WORDS_PAD=power_of_two(words), SCRATCH=plan.region_base + region, PAGE=plan.page_size,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _request(where, index, num_requests):
    """Return a node's request; the last one for padding."""
    request = tl.load(where + index)
    return tl.where(request < 0, num_requests - 1, request).to(tl.int64)


@triton.jit(do_not_specialize=["num_requests"])
def _keep_blocks(
    begins, kept_rows, kept_logits, where, positions, rows, logits, num_requests,
    GUESSES: tl.constexpr, HIDDEN: tl.constexpr, VOCAB: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (guesses of all blocks, parts of their rows and logits)."""
    source = tl.program_id(0).to(tl.int64)
    block, guess = source // GUESSES, source % GUESSES
    request = _request(where, block, num_requests)
    target = request * GUESSES + guess
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(logits + source * VOCAB + column, mask=column < VOCAB)
    tl.store(kept_logits + target * VOCAB + column, value, mask=column < VOCAB)
    if tl.program_id(1) * COLUMNS < HIDDEN:
        element = tl.load(rows + source * HIDDEN + column, mask=column < HIDDEN)
        tl.store(kept_rows + target * HIDDEN + column, element, mask=column < HIDDEN)
    if (tl.program_id(1) == 0) & (guess == 0):
        tl.store(begins + request, tl.load(positions + block).to(tl.int32))


def keep_blocks(blocks: BlockStore, where: Tensor, positions: Tensor, rows: Tensor, logits: Tensor) -> None:
    """Implement kernels.blocks.keep_blocks."""
    (count, hidden), vocab = rows.shape, logits.shape[1]
    _keep_blocks[(count, triton.cdiv(max(hidden, vocab), _COLUMNS))](
        *blocks, where, positions, rows, logits, blocks.begins.shape[0],
        GUESSES=count // where.shape[0], HIDDEN=hidden, VOCAB=vocab, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _place(begins, where, positions, node, num_requests, GUESSES: tl.constexpr):
    """Return a node's place in its request's latest block, and the store's row of the nearest place in it."""
    request = _request(where, node, num_requests)
    place = tl.load(positions + node).to(tl.int32) - tl.load(begins + request)
    return place, request * GUESSES + tl.minimum(tl.maximum(place, 0), GUESSES - 1)


@triton.jit(do_not_specialize=["num_requests"])
def _read_logits(
    begins, logits, where, positions, added, out, num_requests,
    GUESSES: tl.constexpr, VOCAB: tl.constexpr, COLUMNS: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Grid (nodes, parts of their logits)."""
    node = tl.program_id(0).to(tl.int64)
    place, at = _place(begins, where, positions, node, num_requests, GUESSES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(logits + at * VOCAB + column, mask=column < VOCAB)
    if ADDED:
        value += tl.load(added + node * VOCAB + column, mask=column < VOCAB)
    guessed = (place >= 0) & (place < GUESSES)
    tl.store(out + node * VOCAB + column, tl.where(guessed, value, _NEVER), mask=column < VOCAB)


def read_logits(blocks: BlockStore, where: Tensor, positions: Tensor, added: Tensor | None, out: Tensor) -> None:
    """Implement kernels.blocks.read_logits, writing to `out`."""
    count, vocab = out.shape
    num_requests = blocks.begins.shape[0]
    _read_logits[(count, triton.cdiv(vocab, _COLUMNS))](
        blocks.begins, blocks.logits, where, positions, out if added is None else added, out, num_requests,
        GUESSES=blocks.logits.shape[0] // num_requests, VOCAB=vocab, COLUMNS=_COLUMNS, ADDED=added is not None,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_requests", "memory_stride"])
def _read_inputs(
    begins, kept_rows, where, positions, memory, tokens, embedding, out, num_requests, memory_stride,
    GUESSES: tl.constexpr, HIDDEN: tl.constexpr, RANK: tl.constexpr, STATE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (nodes, parts of the widest input)."""
    node = tl.program_id(0).to(tl.int64)
    place, at = _place(begins, where, positions, node, num_requests, GUESSES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    target = out + node * (STATE + RANK + HIDDEN) + column
    if STATE > 0:
        value = tl.load(memory + node * memory_stride + column, mask=(column < STATE) & (place != 0), other=0.0)
        tl.store(target, value, mask=column < STATE)
    token = tl.load(tokens + node).to(tl.int64)
    embedded = tl.load(embedding + token * RANK + column, mask=column < RANK)
    tl.store(target + STATE, embedded, mask=column < RANK)
    element = tl.load(kept_rows + at * HIDDEN + column, mask=column < HIDDEN)
    tl.store(target + STATE + RANK, element, mask=column < HIDDEN)


def read_inputs(
    blocks: BlockStore, where: Tensor, positions: Tensor, memory: Tensor, tokens: Tensor, embedding: Tensor, out: Tensor
) -> None:
    """Implement kernels.blocks.read_inputs, writing to `out`."""
    hidden, rank, state_size = blocks.rows.shape[1], embedding.shape[1], memory.shape[1]
    num_requests = blocks.begins.shape[0]
    _read_inputs[(out.shape[0], triton.cdiv(max(hidden, rank, state_size), _COLUMNS))](
        blocks.begins, blocks.rows, where, positions, memory, tokens, embedding, out, num_requests, memory.stride(0),
        GUESSES=blocks.rows.shape[0] // num_requests, HIDDEN=hidden, RANK=rank, STATE=state_size, COLUMNS=_COLUMNS,
        num_warps=4,
    )  # fmt: skip
