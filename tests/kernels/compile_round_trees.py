"""Compiles the kernels of drafting inside the round. See compile_only.py."""

from __future__ import annotations

import torch

from kernels.frontier_state import (
    NUM_FIELDS,
    BurstRows,
    CandidatePool,
    CommittedTokens,
    GrownTrees,
    MergeLimits,
    NodePicker,
)
from kernels.sampling_state import RoundTokens

_REGION, _BRANCHING, _MOST_NODES = 256, 8, 256


def _ints(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32)


def _round(num_tokens: int, num_rows: int) -> RoundTokens:
    tokens = [_ints(num_tokens) for _ in range(4)]
    return RoundTokens(*tokens, _ints(num_rows + 1), *(_ints(num_rows) for _ in range(3)))


def main() -> None:
    """Call every launcher for a lone request and for many; each launch is a compilation."""
    from kernels.jit import round_trees

    for num_tokens, num_rows in ((32, 1), (64, 32)):
        base, out = _round(num_tokens, num_rows), _round(num_tokens, num_rows)
        at = CommittedTokens.new(num_tokens, num_rows, torch.device("cpu"))
        committed, pages = _ints(num_rows, 66), _ints(num_rows + 1, 64)
        drafts = _ints(num_rows)
        arguments = (base, committed[:, 0], committed[:, 2:34], drafts, pages, drafts, at)
        round_trees.lay_out_committed(*arguments, 16, 1, 1024)
        seeds = num_rows * _BRANCHING
        pool = CandidatePool(_ints(NUM_FIELDS, seeds + 8 * num_tokens * _BRANCHING), seeds)
        rows = BurstRows(*(_ints(num_rows) for _ in range(4)), _ints(num_rows, 8), _ints(num_rows, _REGION))
        tokens, scores = _ints(num_rows, _BRANCHING), torch.zeros(num_rows, _BRANCHING)
        round_trees.plant_roots(_ints(4), pool, rows, at, tokens, scores, -12.0, 1)
        grown = GrownTrees.new(_MOST_NODES, torch.device("cpu"))
        picker = NodePicker.new(grown, num_tokens // 2, 16, num_rows, -12.0)
        round_trees.reopen_pool(_ints(4), pool, num_tokens * _BRANCHING)
        round_trees.export_nodes(pool, drafts, picker.choice.order, grown)
        limits = MergeLimits(_ints(num_rows + 1), drafts, drafts, _ints(1))
        trees = GrownTrees(grown.order[:num_tokens], grown.pool)
        round_trees.merge_trees(base, trees, limits, out, torch.zeros(num_tokens))
