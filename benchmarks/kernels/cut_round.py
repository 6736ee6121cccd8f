"""What a rank of a tensor-parallel target does in a round, part by part, at the shapes of a cut in N, on one GPU.

Llama's 70B shape by default. Products and attention are timed in CUDA graphs, over weights and caches that together
are larger than L2; `python -m benchmarks.results_page` adds them up with the exchange of benchmarks.kernels.exchange.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels.attention_backends import DEVICE, AttentionBench, graph_seconds, lengths
from kernels.compiling import allow_threads
from kernels.elementwise import rms_norm
from outrider.layers.linear import Linear
from outrider_tools.bench.report import Row, write_report

COPIES_BYTES = 200 << 20


def products(options: argparse.Namespace, ranks: int) -> dict[str, tuple[int, int, Callable[[Linear, Tensor], Tensor]]]:
    """By name: a rank's matrix [out, in], and what is done with it."""
    hidden, dim = options.hidden, options.head_dim
    kv_heads = max(1, options.kv_heads // ranks)
    return {
        "qkv": ((options.heads // ranks + 2 * kv_heads) * dim, hidden, Linear.__call__),
        "output": (hidden, options.heads // ranks * dim, Linear.__call__),
        "gate_up": (2 * options.mlp // ranks, hidden, Linear.gated),
        "down": (hidden, options.mlp // ranks, Linear.__call__),
        "head": (options.vocab // ranks, hidden, Linear.to_float32),
    }


class CutProduct:
    """A matrix of a rank, as copies that together are larger than L2."""

    def __init__(self, num_out: int, size: int, call: Callable[[Linear, Tensor], Tensor]) -> None:
        self.size, self._call = size, call
        self._copies = []
        for _ in range(max(2, -(-COPIES_BYTES // (2 * num_out * size)))):
            linear = Linear(size, num_out, False, torch.bfloat16, DEVICE)
            linear.weight.normal_(0, size**-0.5)
            linear.pack()
            self._copies.append(linear)

    def compile(self, count: int) -> None:
        """Launch it once for `count` rows."""
        self._call(self._copies[0], self._rows(count))

    def us(self, count: int) -> float:
        """Microseconds of a product with `count` rows."""
        rows = self._rows(count)

        def body() -> None:
            for linear in self._copies:
                self._call(linear, rows)

        return graph_seconds(body, 5) / len(self._copies) * 1e6

    def _rows(self, count: int) -> Tensor:
        return torch.ones(count, self.size, device=DEVICE, dtype=torch.bfloat16)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All parts."""
    allow_threads()
    for ranks in options.ranks:
        made = {name: CutProduct(*each) for name, each in products(options, ranks).items()}

        def compiled(case: tuple[str, int], made: dict[str, CutProduct] = made) -> None:
            with torch.inference_mode():
                made[case[0]].compile(case[1])

        # Compiling is what takes time, and threads may do that together.
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(compiled, itertools.product(made, options.rows)))
        torch.cuda.synchronize()
        for name, count in itertools.product(made, options.rows):
            yield Row(f"tp{ranks} m{count}", f"{name}_us", made[name].us(count), "us")
        del made, compiled
        shape = argparse.Namespace(
            heads=options.heads // ranks, kv_heads=max(1, options.kv_heads // ranks), head_dim=options.head_dim,
            page_size=16, layers=16, prompts=[1], tree=max(options.rows), contexts=options.contexts, repeats=5,
            flashinfer=False,
        )  # fmt: skip
        bench = AttentionBench(shape)
        for count in options.rows:
            for context in options.contexts:
                batch = bench.tree(count, context)
                _, us, _ = bench.measure("triton", batch, bench.heads(count), lengths(count, context))
                yield Row(f"tp{ranks} m{count} ctx{context // 1024}k", "attention_us", us, "us")
        del bench
        torch.cuda.empty_cache()
    weight = torch.ones(options.hidden, device=DEVICE).bfloat16()
    for count in options.rows:
        rows = torch.randn(count, options.hidden, device=DEVICE).bfloat16()

        def norms(rows: Tensor = rows) -> None:
            for _ in range(50):
                rms_norm(rows, weight, 1e-5)

        yield Row(f"m{count}", "norm_us", graph_seconds(norms, 5) / 50 * 1e6, "us")


def main() -> None:
    """Parse options, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--mlp", type=int, default=28672)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    rows = []
    with torch.inference_mode():
        for row in measure(options):
            rows.append(row)
            print(f"{row.case:18s}{row.metric:14s}{row.value:9.1f} {row.unit}", flush=True)
    if options.out:
        write_report(options.out, "cut_round", torch.cuda.get_device_name(DEVICE), rows, ("torch", "triton"))


if __name__ == "__main__":
    main()
