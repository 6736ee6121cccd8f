"""Attention of one layer with our kernels and with FlashInfer, on one GPU in one run: prompts and trees.

Times include rotation and the writing of k and v, which both backends share. Layers take turns, so that no KV is in the
L2 cache. A backend's work once a round, for all layers, is reported separately.

python -m benchmarks.kernels.attention_backends --out benchmarks/results/attention_backends.json
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.engine.timing import median_ms
from outrider.attention.base import AttentionBackend, HostLengths
from outrider.attention.flashinfer_backend import FlashInferAttention, FlashInferShape
from outrider.attention.paged import PagedBatch, RoundTokens, TreeBuffers, choose_splits
from outrider.attention.triton_backend import TritonAttention
from outrider.cache.kv import KVCache
from outrider.device import num_processors
from outrider.layers.rotary import Rotary
from outrider.models.parts import RopeConfig
from outrider_tools.bench.report import Row, write_report

DEVICE = torch.device("cuda")


class AttentionBench:
    """Shapes, caches and inputs of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.shape = FlashInferShape(
            options.heads, options.kv_heads, options.head_dim, options.page_size, torch.bfloat16
        )
        self.repeats = options.repeats
        self.most = max(max(options.prompts), max(options.contexts) + options.tree)
        pages = -(-self.most // options.page_size)
        self.kv = KVCache(
            options.layers, pages * options.page_size, options.kv_heads, options.head_dim, torch.bfloat16, DEVICE
        )
        self.kv.k.normal_()
        self.kv.v.normal_()
        self.tables = torch.randperm(pages, device=DEVICE).to(torch.int32)[None]
        self.rotary = Rotary(RopeConfig(), options.head_dim, DEVICE)
        flashinfer = FlashInferAttention(self.shape, DEVICE)
        self.backends: dict[str, AttentionBackend] = {"triton": TritonAttention(), "flashinfer": flashinfer}

    def heads(self, num_tokens: int) -> Tensor:
        """Return random query, key and value heads."""
        width = self.shape.num_heads + 2 * self.shape.num_kv_heads
        return torch.randn(num_tokens, width, self.shape.head_dim, device=DEVICE, dtype=torch.bfloat16)

    def prompt(self, num_tokens: int, context: int) -> PagedBatch:
        """Return a chunk of a prompt."""
        place = torch.arange(context, context + num_tokens, device=DEVICE)
        page_size = self.shape.page_size
        return PagedBatch(
            token_ids=ints([0] * num_tokens),
            positions=place.to(torch.int32),
            first=ints([0, num_tokens]),
            cached_len=ints([context]),
            table_rows=ints([0]),
            page_tables=self.tables,
            slots=self.tables[0, place // page_size] * page_size + (place % page_size).to(torch.int32),
            page_size=page_size,
            max_row_tokens=num_tokens,
            lengths=lengths(num_tokens, context),
        )

    def tree(self, num_tokens: int, context: int) -> PagedBatch:
        """Return a round of one request with a random tree."""
        generator = torch.Generator().manual_seed(0)
        parents, positions = [-1], [context]
        for index in range(1, num_tokens):
            parents.append(int(torch.randint(max(index - 6, 0), index, (), generator=generator)))
            positions.append(positions[parents[-1]] + 1)
        tokens = RoundTokens(
            token_ids=ints([0] * num_tokens),
            positions=ints(positions),
            parents=ints(parents),
            rows=ints([0] * num_tokens),
            first=ints([0, num_tokens]),
            cached_len=ints([context]),
            root=ints([0]),
            table_rows=ints([0]),
        )
        heads = (self.shape.num_heads, self.shape.num_kv_heads)
        splits = choose_splits(num_tokens, 1, num_tokens, *heads, num_processors(DEVICE))
        buffers = TreeBuffers(num_tokens, 64, DEVICE)
        return buffers.batch(tokens, self.tables, self.shape.page_size, num_tokens, splits, by_path=False)

    def measure(
        self, name: str, batch: PagedBatch, heads: Tensor, host_lengths: HostLengths
    ) -> tuple[Tensor, float, float]:
        """Return the first layer's output, device microseconds a layer, and host milliseconds of planning."""
        backend, num_layers = self.backends[name], len(self.kv.k_layers)
        planning = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            if batch.mask is not None:
                backend.prepare(len(batch.token_ids), host_lengths, self.tables)
            plan = backend.plan(batch, self.kv, self.shape.num_heads, self.rotary)
            planning.append(time.perf_counter() - start)
        first = plan.attend(0, heads, None)

        def layers() -> None:
            for layer in range(num_layers):
                plan.attend(layer, heads, None)

        return first, median_ms(layers, DEVICE, self.repeats) / num_layers * 1e3, min(planning) * 1e3


def ints(values: list[int]) -> Tensor:
    """Return int32 values on the GPU."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def lengths(num_tokens: int, context: int) -> HostLengths:
    """Return the host's lengths of one row."""
    return HostLengths(np.array([0, num_tokens], np.int32), np.array([context], np.int32))


def run(options: argparse.Namespace) -> list[Row]:
    """Run all cases. Return their rows."""
    bench = AttentionBench(options)
    cases = [("prefill", count, 0, bench.prompt(count, 0)) for count in options.prompts]
    cases += [("tree", options.tree, context, bench.tree(options.tree, context)) for context in options.contexts]
    rows: list[Row] = []
    print("case                     backend      us a layer  host ms a round")
    for kind, count, context, batch in cases:
        heads, outputs, times = bench.heads(count), [], []
        for name in bench.backends:
            output, micros, planning = bench.measure(name, batch, heads, lengths(count, context))
            outputs.append(output.float())
            times.append(micros)
            case = f"{name} {kind} b1 m{count} ctx{context / 1024:g}k bf16"
            rows += [Row(case, "attention_us_per_layer", micros, "us"), Row(case, "attention_plan_ms", planning, "ms")]
            print(f"{kind:8s}m{count:<6d}ctx{context:<8d}{name:12s}{micros:11.1f}{planning:17.2f}")
        # The same inputs must give the same outputs, or the times mean nothing.
        difference = float((outputs[0] - outputs[1]).norm() / outputs[1].norm())
        print(f"{'':33s}relative difference {difference:.4f}, flashinfer / triton {times[1] / times[0]:.2f}")
        if difference > 0.02:
            raise SystemExit("the backends disagree")
    return rows


def main() -> None:
    """Parse options, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=16, help="distinct caches that the timed layers read")
    parser.add_argument("--prompts", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--tree", type=int, default=32, help="tokens of the tree")
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 16384], help="cached tokens below the tree")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    with torch.inference_mode():
        rows = run(options)
    if options.out:
        device = torch.cuda.get_device_name(DEVICE)
        write_report(options.out, "attention_backends", device, rows, ("torch", "triton", "flashinfer-python", "numpy"))


if __name__ == "__main__":
    main()
