"""What a layer of a small model takes in a draft step on a GPU, attention to context and branches included.

Launches of a step overlap: those behind begin while one runs, and find what is left of the processors. So a kernel that
is faster alone can make a layer slower, and what counts is the layer. Each case is one CUDA graph over all layers, each
with weights and a cache of its own. Attention is one launch or two, as in a lone request's steps: see --long. With
--cuts the layer with one of its products in every cut of its work. With --shares all kernels ask for that share of the
L1 cache as shared memory, in percent (-1: the driver's choice).

python benchmarks/draft_layer.py --nodes 8 16 32 64 --contexts 256 1024 --shares -1 100 --out draft_layer.json
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import torch
from kernels_attention import graph_us
from kernels_draft import PAGE, REGION, branch_masks, ints
from kernels_layer import DTYPE, SHAPES, SLOTS, Layers, Shape
from report import Row, write_report
from torch import Tensor

from kernels.attention_tiles import choose_splits
from kernels.branches import branch_attention, list_branches, short_tokens
from kernels.carveout import ask_for
from kernels.compiling import allow_threads
from kernels.launch import num_processors
from kernels.row_configs import RowConfig
from outrider.drafting.model.burst import SHORT_WIDTH

MAX_CONTEXT = (SLOTS - REGION) // PAGE * PAGE


class Step(Layers):
    """A step of `count` nodes of one request behind `context` tokens, which may be `long` though they are short."""

    def __init__(self, shape: Shape, count: int, context: int, long: bool) -> None:
        super().__init__(shape, count)
        self.short = context <= short_tokens(shape.dim) and count <= SHORT_WIDTH and not long
        base = -(-context // PAGE) * PAGE
        self.tables = torch.randperm((base + REGION) // PAGE, device="cuda").int()[None]
        self.lengths = [ints(values) for values in ([0], [0, count], [context])]
        rows, first, _ = self.lengths
        self.branches = list_branches(branch_masks(count), first, rows, self.tables, base=base, page_size=PAGE)
        logical = base + torch.randperm(REGION, device="cuda")[:count]
        self.slots = (self.tables[0].long()[logical // PAGE] * PAGE + logical % PAGE).int()
        size = (shape.layers, SLOTS, shape.kv_heads, shape.dim)
        self.cache = [torch.randn(size, device="cuda", dtype=DTYPE) for _ in "kv"]
        self.splits = choose_splits(count, 1, count, shape.heads, shape.kv_heads, num_processors(self.slots))

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Of each node to the context and to its ancestors."""
        k, v = (cache[layer] for cache in self.cache)
        rows, first, cached = self.lengths
        how = {"page_size": PAGE, "max_row_tokens": len(q), "num_splits": self.splits, "short": self.short}
        where = (self.tables, rows, first, cached, self.branches)
        return branch_attention(q, k, v, *where, scale=self.shape.dim**-0.5, **how)


def cuts(step: Step) -> Iterator[tuple[str, partial[None]]]:
    """The layer with each product in every cut that a processor holds."""
    count, hidden, mlp = len(step.stream), step.shape.hidden, step.shape.mlp
    for tile, parts, block_m, warps, cut in product((16, 32, 64), (1, 2, 4), (16, 32), (4, 8), (0, 256, 512)):
        config = RowConfig(tile, parts, block_m, warps, cut)
        if parts > 1 and (tile == 64 or cut):
            continue
        for name, size in (("heads", hidden), ("gated", hidden), ("output", hidden), ("down", mlp)):
            if cut and name in ("heads", "gated"):
                continue
            if cut or config.holds(count, size):
                label = f"{name} tile {tile} parts {parts} rows {block_m} warps {warps} cut {cut}"
                yield label, partial(step.after, cut=name, config=config)


def share(percent: int) -> None:
    """Have all kernels that were launched ask for this share of the L1 cache from now on."""
    from triton.compiler import CompiledKernel

    for kernel in gc.get_objects():
        if isinstance(kernel, CompiledKernel) and kernel.function:
            ask_for(kernel.function, percent)


def measure(step: Step, name: str, options: argparse.Namespace) -> list[Row]:
    """All cases of a step."""
    work = {"layer": step.after} | (dict(cuts(step)) if options.cuts else {})
    with ThreadPoolExecutor(16) as pool:  # compiled all at the same time
        list(pool.map(lambda run: run(0), work.values()))
    rows = []
    for label, run in work.items():
        for percent in options.shares:
            share(percent)
            case = f"{name} {label} share {percent}"
            rows.append(Row(case, "us_per_layer", graph_us(run, step.shape.layers), "us"))
            print(f"{case:80s}{rows[-1].value:8.2f} us", flush=True)
    return rows


def main() -> None:
    """Parse options, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 32, 64])
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 1024], help=f"tokens, {MAX_CONTEXT} at most")
    parser.add_argument("--shares", nargs="+", type=int, default=[100])
    parser.add_argument("--long", action="store_true", help="attention as behind contexts that are not short")
    parser.add_argument("--cuts", action="store_true", help="every cut of every product")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    if max(options.contexts) > MAX_CONTEXT:
        parser.error(f"--contexts {max(options.contexts)}: the cache has room for {MAX_CONTEXT} tokens and a tree")
    torch.manual_seed(0)
    allow_threads()
    rows = []
    with torch.inference_mode():
        for shape, count, context in product(SHAPES, options.nodes, options.contexts):
            step, kind = Step(shape, count, context, options.long), " long" if options.long else ""
            rows += measure(step, f"{shape.name}{kind} m{count} ctx{context} bf16", options)
    if options.out:
        write_report(options.out, "draft_layer", torch.cuda.get_device_name(0), rows, ("torch", "triton"))


if __name__ == "__main__":
    main()
