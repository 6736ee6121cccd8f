"""All products of a model's round on a CPU: bfloat16, four bits as served, and torch's products for int8 weights.

python -m benchmarks.kernels.cpu_products --out benchmarks/results/cpu_products.json

Weights are random and have the shapes of all layers and of the output matrix, so that they do not fit a cache.
The variants take turns. The report has the load average at the beginning and at the end, because torch's workers wait
for each other after each product.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpu.layout import GROUP
from kernels.cpu.products import packed_four, tile_product
from outrider.layers.cpu_weight import CpuWeight
from outrider.layers.linear import Linear
from outrider.models.config import ModelConfig
from outrider.models.store import DEFAULT_MODEL, resolve_model
from outrider_tools.bench.report import Row, cpu_name, write_report

Product = Callable[[Tensor], Tensor]


def shapes_of(config: ModelConfig) -> list[tuple[int, int]]:
    """Return [out, in] of each product of a forward with logits."""
    hidden, inner, wide = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    qkv = wide + 2 * config.num_kv_heads * config.head_dim
    layer = [(qkv, hidden), (hidden, wide), (2 * inner, hidden), (hidden, inner)]
    return [*layer * config.num_layers, (config.vocab_size, hidden)]


def bfloat16(weight: Tensor) -> Product:
    """Return the product that serves any number of rows."""
    linear = Linear(weight.shape[1], weight.shape[0], False, torch.bfloat16, torch.device("cpu"))
    linear.weight.copy_(weight)
    linear.pack()
    return linear


def four_bits(weight: Tensor) -> Product:
    """Return the product that serves few rows if the weights are stored in four bits."""
    num_groups = weight.shape[1] // GROUP
    codes, scales = torch.randint(0, 16, weight.shape, dtype=torch.int32), torch.full((len(weight), num_groups), 0.01)
    packed = packed_four(codes, scales, torch.zeros_like(scales))
    return lambda rows: tile_product(rows, packed)


def onednn(weight: Tensor) -> Product:
    """Return the product that serves bfloat16 weights without AMX."""
    return partial(CpuWeight(torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), None)).product, bias=None)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 weights [out, in] and the scale of each row, float32 [out]."""
    scale = weight.abs().amax(1) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def weight_only(weight: Tensor) -> Product:
    """Return a product of int8 weights and bfloat16 rows."""
    codes, scale = rounded(weight)
    narrow = scale.bfloat16()
    return lambda rows: torch.ops.aten._weight_int8pack_mm(rows, codes, narrow)


def _integer(weight: Tensor) -> Product:
    """Return oneDNN's product of int8 rows [M, in]: int32 sums, exact and so the same in any batch, times scales."""
    codes, scale = rounded(weight)
    packed, zeros = torch.ops.onednn.qlinear_prepack(codes, None), torch.zeros(len(codes), dtype=torch.int64)
    linear = torch.ops.onednn.qlinear_pointwise
    return lambda rows: linear(rows, 1.0, 0, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], "")


def integer(weight: Tensor) -> Product:
    """Return a product whose rows are int8 already. It takes fixed int8 rows in place of the given ones."""
    product, rows8 = _integer(weight), torch.randint(-127, 128, (64, weight.shape[1]), dtype=torch.int8)
    return lambda rows: product(rows8[: len(rows)])


def row_by_row(weight: Tensor) -> Product:
    """Return the int8 product with its surroundings: each row's scale, rounding, and conversion back to bfloat16."""
    product = _integer(weight)

    def run(rows: Tensor) -> Tensor:
        scale = torch.linalg.vector_norm(rows, float("inf"), -1, True, dtype=torch.float32).div_(127)
        sums = product((rows / scale).round_().to(torch.int8))
        return torch.mul(sums, scale, out=torch.empty(sums.shape, dtype=torch.bfloat16))

    return run


WAYS: dict[str, Callable[[Tensor], Product]] = {
    "bfloat16": bfloat16,
    "bfloat16 by oneDNN": onednn,
    "four bits": four_bits,
    "int8 weight-only": weight_only,
    "int8 product alone": integer,
    "int8 by row": row_by_row,
}


@torch.inference_mode()
def main() -> None:
    """Parse options, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8, 16], help="rows of each product, 64 at most")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    weights = [torch.randn(shape) * 0.02 for shape in shapes_of(ModelConfig.from_folder(resolve_model(options.model)))]
    products = {name: [(weight.shape[1], make(weight)) for weight in weights] for name, make in WAYS.items()}
    rows = [Row("all", "load_average_before", os.getloadavg()[0], "processes")]
    for count in options.tokens:
        inputs = {size: torch.randn(count, size).bfloat16() for size in {weight.shape[1] for weight in weights}}
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(options.repeats):
            for name, taken in times.items():
                start = time.perf_counter()
                for size, product in products[name]:
                    product(inputs[size])
                taken.append(time.perf_counter() - start)
        for name, taken in times.items():
            median, least = statistics.median(taken) * 1e3, min(taken) * 1e3
            ratio = statistics.median(base / own for base, own in zip(times["bfloat16"], taken, strict=True))
            print(
                f"{count:3d} rows  {name:20s}{median:8.1f} ms, least {least:6.1f}; over bfloat16 {ratio:.2f}",
                flush=True,
            )
            case = f"{name} m{count}"
            rows += [Row(case, "median_ms", median, "ms"), Row(case, "least_ms", least, "ms")]
            rows.append(Row(case, "speedup_over_bfloat16", ratio, "ratio"))
    rows.append(Row("all", "load_average_after", os.getloadavg()[0], "processes"))
    if options.out:
        write_report(options.out, "cpu_products", f"{cpu_name()}, {options.threads} threads", rows, ("torch",))


if __name__ == "__main__":
    main()
