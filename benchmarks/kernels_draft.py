"""What a draft step costs on a GPU beside its products: attention of branches, proposals, moves; microseconds.

Attention of M tokens with 12 ancestors each in a region stands beside that of a round of M tokens over the same
context. Every case is one CUDA graph; attention goes over as many layers as the L2 cache cannot hold, or 30.

python benchmarks/kernels_draft.py --out benchmarks/results/kernels_draft.json
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from kernels_attention import COLD_BYTES, graph_us
from report import Row, write_report
from torch import Tensor

from kernels.attention import tree_attention
from kernels.attention_tiles import choose_splits
from kernels.branches import branch_attention, list_branches
from kernels.move import move
from kernels.propose import propose
from kernels.propose_state import RANK_BY_NOISE, ProposeBuffers, ProposeTables

PAGE, REGION, ANCESTORS, MAX_LAYERS = 16, 768, 12, 30
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Heads:
    """A draft model's attention shape."""

    query: int
    kv: int
    dim: int

    def name(self) -> str:
        """As the rows of the report name it."""
        return f"heads{self.query}-{self.kv}x{self.dim} standalone"


@dataclass(frozen=True)
class Attention:
    """`tokens` tree tokens, spread evenly over `num_rows` requests of `context` cached tokens each."""

    heads: Heads
    num_rows: int
    tokens: int
    context: int

    def name(self) -> str:
        """As the rows of the report name it."""
        return f"{self.heads.name()} b{self.num_rows} m{self.tokens} ctx{self.context / 1024:g}k bf16"


SMALL, LARGE = Heads(9, 3, 64), Heads(32, 8, 128)
SHAPES = [(1, 8), (1, 32), (1, 64), (16, 32)]
CASES = [
    Attention(heads, rows, tokens, context)
    for heads in (SMALL, LARGE)
    for rows, tokens in SHAPES
    for context in ((256, 1024, 8192) if rows == 1 else (1024,))
]
# Nodes, vocabulary, candidates, whether the draft vocabulary is a part of the target's.
PROPOSALS = [
    (8, 49152, 4, False),
    (32, 49152, 4, False),
    (32, 49152, 8, False),
    (32, 49152, 16, False),
    (32, 32000, 8, False),
    (32, 32000, 8, True),
    (32, 128256, 8, False),
]


def ints(values: list[int]) -> Tensor:
    """On the GPU."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def branch_masks(count: int) -> Tensor:
    """Bits of ANCESTORS tree slots for each token, int32 [count, REGION / 32]. Which ones they are costs nothing."""
    seen = torch.rand(count, REGION, device="cuda").argsort(1)[:, :ANCESTORS]
    bits = torch.zeros(count, REGION, dtype=torch.int64, device="cuda").scatter_(1, seen, 1)
    words = (bits.view(count, -1, 32) << torch.arange(32, device="cuda")).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).int()


class Step:
    """A case's tensors, and one layer's attention of branches, or of a round."""

    def __init__(self, case: Attention) -> None:
        self.case = case
        heads, rows = case.heads, case.num_rows
        pages = (case.context + REGION) // PAGE
        kv_bytes = rows * pages * PAGE * heads.kv * heads.dim * DTYPE.itemsize * 2
        self.layers = min(max(4, -(-COLD_BYTES // kv_bytes)), MAX_LAYERS)
        shape = (self.layers, rows * pages * PAGE, heads.kv, heads.dim)
        self.k, self.v = (torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2))
        self.q = torch.randn(case.tokens, heads.query, heads.dim, dtype=DTYPE, device="cuda")
        self.out = torch.empty(case.tokens, heads.query * heads.dim, dtype=DTYPE, device="cuda")
        each = case.tokens // rows
        self.lengths = (
            torch.randperm(rows * pages, device="cuda").int().view(rows, pages),
            ints(list(range(rows))),
            ints([each * row for row in range(rows + 1)]),
            ints([case.context] * rows),
        )
        # What is seen costs no more than what is not.
        self.round_mask = torch.randint(-(2**31), 2**31 - 1, (case.tokens, -(-case.tokens // 32)), device="cuda").int()
        tables, table_rows, first, _ = self.lengths
        masks = branch_masks(case.tokens)
        self.branches = list_branches(masks, first, table_rows, tables, base=case.context, page_size=PAGE)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        self.splits = choose_splits(case.tokens, rows, case.tokens, heads.query, heads.kv, processors)
        torch.cuda.synchronize()

    def attend(self, layer: int, in_region: bool) -> None:
        """One layer."""
        where = (self.q, self.k[layer], self.v[layer], *self.lengths)
        shape = {"page_size": PAGE, "max_row_tokens": self.case.tokens, "num_splits": self.splits}
        scale = self.case.heads.dim**-0.5
        if in_region:
            branch_attention(*where, self.branches, scale=scale, out=self.out, **shape)
        else:
            tree_attention(*where, self.round_mask, scale=scale, out=self.out, **shape)


def measure_attention(case: Attention) -> list[Row]:
    """A case with branches, that of a round, and the ratio."""
    step = Step(case)
    inside = graph_us(lambda layer: step.attend(layer, True), step.layers)
    beside = graph_us(lambda layer: step.attend(layer, False), step.layers)
    print(f"{case.name():58s}{inside:8.2f} us with branches {beside:8.2f} without  splits {step.splits}", flush=True)
    return [
        Row(case.name(), "branch_attention_us_per_layer", inside, "us"),
        Row(case.name(), "attention_us_per_layer", beside, "us"),
        Row(case.name(), "branches_over_round", inside / beside, "ratio"),
    ]


def measure_propose(tokens: int, vocab_size: int, branching: int, mapped: bool) -> list[Row]:
    """With the noise and without."""
    logits = torch.randn(tokens, vocab_size, device="cuda") * 3
    rows, positions = ints([0] * tokens), ints(list(range(tokens)))
    tables, buffers = ProposeTables.new(1, "cuda"), ProposeBuffers.new(tokens, vocab_size, "cuda")
    outputs = (torch.empty(tokens, branching, dtype=torch.int32, device="cuda"), torch.empty(tokens, branching).cuda())
    target_ids = torch.arange(0, 4 * vocab_size, 4, dtype=torch.int32, device="cuda") if mapped else None
    name = f"vocab{vocab_size}{' mapped' if mapped else ''} m{tokens} k{branching} fp32"
    found = []
    for decoding, temperature in (("greedy", 0.0), ("t0.8", 0.8)):
        tables.floats.copy_(torch.tensor([[temperature, 0.8]]))
        tables.ints[0, 3] = RANK_BY_NOISE

        def step(_: int) -> None:
            where = (logits, rows, positions, tables, buffers, *outputs)
            propose(*where, vocab_limit=4 * vocab_size, target_ids=target_ids)

        found.append(Row(f"{name} {decoding}", "propose_us", graph_us(step, 1), "us"))
        print(f"{found[-1].case:58s}{found[-1].value:8.2f} us", flush=True)
    return found


def measure_move(heads: Heads, layers: int) -> list[Row]:
    """A commit of five tokens, and a buffer that is full."""
    k, v = (torch.randn(layers, 4096, heads.kv, heads.dim, device="cuda").to(DTYPE) for _ in range(2))
    rows = []
    for used in (5, 64):
        moves = torch.full((64, 2), -1, dtype=torch.int32, device="cuda")
        moves[:used] = ints([number for place in range(used) for number in (2048 + 7 * place, 3 * place)]).view(-1, 2)
        taken = graph_us(lambda _, m=moves: move(k, v, m), 1)
        rows.append(Row(f"{heads.name()} layers{layers} moves{used} bf16", "move_us", taken, "us"))
        print(f"{rows[-1].case:58s}{taken:8.2f} us", flush=True)
    return rows


def compile_one(case: Attention) -> None:
    """Fill Triton's cache on disk."""
    step = Step(replace(case, context=64))
    for in_region in (False, True):
        step.attend(0, in_region)
    torch.cuda.synchronize()


def compile_all() -> None:
    """Compile attention in processes: each is bound to one core for seconds. The context changes no kernel."""
    shapes = dict.fromkeys(replace(case, context=64) for case in CASES)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton"])
    with ProcessPoolExecutor(min(len(os.sched_getaffinity(0)), len(shapes)), context) as pool:
        list(pool.map(compile_one, shapes))


def main() -> None:
    """Parse options, compile, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    compile_all()
    rows: list[Row] = []
    for proposal in PROPOSALS:
        rows += measure_propose(*proposal)
    rows += measure_move(SMALL, 30) + measure_move(LARGE, 32)
    for case in CASES:
        rows += measure_attention(case)
    if options.out:
        write_report(options.out, "kernels_draft", torch.cuda.get_device_name(0), rows, ("torch", "triton"))


if __name__ == "__main__":
    main()
