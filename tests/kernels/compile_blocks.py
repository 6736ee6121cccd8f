"""Compiles the kernels around a block head's blocks. See compile_only.py."""

from __future__ import annotations

import torch

from kernels.frontier_state import BlockLayout, BlockRoots, BlockStore, RegionPlan, StepTokens

_REGION = 256


def _ints(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32)


def _of_step(width: int, num_rows: int, size: int) -> None:
    from kernels.jit import blocks

    step = StepTokens.new(width, num_rows, _REGION // 32, torch.device("cpu"))
    injected = torch.zeros(num_rows + 1, _REGION, dtype=torch.int8)
    per_row = _ints(num_rows)
    blocks.find_roots(step, 4096, injected, _ints(width), per_row, per_row)
    blocks.forget_injected(step, injected)
    plan = RegionPlan(_ints(num_rows + 1, 64), torch.empty(0), 16, 512, 1)
    for places, seen in ((per_row, (step.mask, injected)), (per_row.long(), None)):
        roots = BlockRoots(step.token_ids, places, per_row, per_row, per_row, per_row)
        words = -(-size // 32) + (0 if seen is None else _REGION // 32)
        all_places = num_rows * size
        out = BlockLayout(
            per_row, per_row, _ints(all_places), _ints(all_places), _ints(num_rows + 1), _ints(all_places),
            _ints(all_places, words),
        )  # fmt: skip
        blocks.lay_out_blocks(roots, plan, _REGION, 1, seen, out)


def _of_store(width: int, num_rows: int, guesses: int, state_size: int) -> None:
    from kernels.jit import blocks

    hidden, vocab, dtype = 4096, 32000, torch.bfloat16
    store = BlockStore(_ints(num_rows + 1), torch.zeros(guesses * (num_rows + 1), hidden, dtype=dtype), torch.zeros(
        guesses * (num_rows + 1), vocab
    ))  # fmt: skip
    new = torch.zeros(guesses * num_rows, hidden, dtype=dtype), torch.zeros(guesses * num_rows, vocab)
    blocks.keep_blocks(store, _ints(num_rows), _ints(num_rows), *new)
    logits, memory = torch.zeros(width, vocab), torch.zeros(width, hidden, dtype=dtype)[:, :state_size]
    for added in (None, logits):
        blocks.read_logits(store, _ints(width), _ints(width), added, logits)
    embedding, inputs = torch.zeros(90, 256, dtype=dtype), torch.zeros(width, state_size + 256 + hidden, dtype=dtype)
    blocks.read_inputs(store, _ints(width), _ints(width), memory, _ints(width), embedding, inputs)


def main() -> None:
    """Call every launcher once; each launch is a compilation."""
    from kernels.jit import elementwise

    _of_step(8, 1, 8)
    _of_step(64, 8, 40)
    _of_store(8, 1, 8, 0)
    _of_store(64, 8, 7, 256)
    heads, angles = torch.zeros(8, 2, 16, 128, dtype=torch.bfloat16), torch.zeros(8, 64)
    cache, norm = torch.zeros(2, 640, 8, 128, dtype=torch.bfloat16), torch.zeros(2, 8, 128, dtype=torch.bfloat16)
    for k_norm in (None, norm):
        elementwise.write_keys(heads, angles, angles, _ints(8), cache, cache, k_norm, 1e-6)
    gates, memory = torch.zeros(8, 768, dtype=torch.bfloat16), torch.zeros(8, 4608, dtype=torch.bfloat16)[:, :256]
    elementwise.recur(gates, memory)
