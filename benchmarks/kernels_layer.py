"""What a layer of a small model costs on a GPU without its attention, launch by launch; microseconds.

Before: norm, product, rotation and writing one after the other. After: norm, product, rotation and writing in one
launch, norm and gated product in another. The other two products are the same. Each case is one CUDA graph over all
layers, each with weights of its own.

python benchmarks/kernels_layer.py --out benchmarks/results/kernels_layer.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from kernels_attention import graph_us
from report import Row, write_report
from torch import Tensor

from kernels.gemm import stream_linear
from kernels.norm import rms_norm
from kernels.rope import rope_write
from kernels.row_configs import RowConfig
from kernels.row_linear import norm_linear, norm_qkv

DTYPE, EPS, SLOTS = torch.bfloat16, 1e-5, 4096


@dataclass(frozen=True)
class Shape:
    """A model's layers."""

    name: str
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    dim: int = 64


SHAPES = [Shape("smollm2-135m", 30, 576, 1536, 9, 3), Shape("smollm2-360m", 32, 960, 2560, 15, 5)]


class Layers:
    """All layers of a shape, and a step of `count` rows."""

    def __init__(self, shape: Shape, count: int) -> None:
        self.shape, hidden, dim = shape, shape.hidden, shape.dim

        def weight(*size: int) -> list[Tensor]:
            return [torch.randn(*size, device="cuda", dtype=DTYPE) / size[-1] ** 0.5 for _ in range(shape.layers)]

        self.qkv = weight((shape.heads + 2 * shape.kv_heads) * dim, hidden)
        self.out = weight(hidden, shape.heads * dim)
        self.gate_up, self.down = weight(2 * shape.mlp, hidden), weight(hidden, shape.mlp)
        self.norms = [torch.ones(hidden, device="cuda", dtype=DTYPE) for _ in range(shape.layers)]
        self.stream = torch.randn(count, hidden, device="cuda", dtype=DTYPE)
        self.attended = torch.randn(count, shape.heads * dim, device="cuda", dtype=DTYPE)
        self.cache = [torch.zeros(shape.layers, SLOTS, shape.kv_heads, dim, device="cuda", dtype=DTYPE) for _ in "kv"]
        self.angles = torch.rand(2, count, dim // 2, device="cuda")
        self.slots = torch.randperm(SLOTS, device="cuda")[:count].int()

    def where(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Angles, slots and caches."""
        return (self.angles[0], self.angles[1], self.slots, self.cache[0][layer], self.cache[1][layer])

    def heads_before(self, layer: int) -> Tensor:
        """Three launches."""
        product = stream_linear(rms_norm(self.stream, self.norms[layer], EPS), self.qkv[layer])
        heads = product.view(len(product), -1, self.shape.dim)
        return rope_write(heads, *self.where(layer), self.shape.heads)

    def heads_after(self, layer: int, config: RowConfig | None = None) -> Tensor:
        """One launch."""
        where, norm = self.where(layer), self.norms[layer]
        return norm_qkv(self.stream, self.qkv[layer], *where, self.shape.heads, norm=norm, eps=EPS, config=config)

    def gated_before(self, layer: int) -> Tensor:
        """Two launches."""
        return stream_linear(rms_norm(self.stream, self.norms[layer], EPS), self.gate_up[layer], gated=True)

    def gated_after(self, layer: int, config: RowConfig | None = None) -> Tensor:
        """One launch."""
        norm = self.norms[layer]
        return norm_linear(self.stream, self.gate_up[layer], norm=norm, eps=EPS, gated=True, config=config)

    def output_before(self, layer: int) -> Tensor:
        """The output projection as it is."""
        return stream_linear(self.attended, self.out[layer], residual=self.stream, out=self.stream)

    def output_after(self, layer: int) -> Tensor:
        """The output projection over whole rows: not used."""
        return norm_linear(self.attended, self.out[layer], residual=self.stream, out=self.stream)

    def whole(self, heads: Callable[[int], Tensor], gated: Callable[[int], Tensor], layer: int) -> None:
        """A layer but for its attention."""
        heads(layer)
        self.output_before(layer)
        stream_linear(gated(layer), self.down[layer], residual=self.stream, out=self.stream)


def measure(shape: Shape, count: int) -> list[Row]:
    """All cases of so many rows."""
    layers = Layers(shape, count)
    few = RowConfig(warps=4)
    steps: dict[str, Callable[[int], object]] = {
        "layer before": lambda layer: layers.whole(layers.heads_before, layers.gated_before, layer),
        "layer after": lambda layer: layers.whole(layers.heads_after, layers.gated_after, layer),
        "heads before": layers.heads_before,
        "heads after": layers.heads_after,
        "heads after, 4 warps": lambda layer: layers.heads_after(layer, few),
        "gated before": layers.gated_before,
        "gated after": layers.gated_after,
        "gated after, 4 warps": lambda layer: layers.gated_after(layer, few),
        "output before": layers.output_before,
        "output after": layers.output_after,
    }
    with ThreadPoolExecutor(len(steps)) as pool:  # compiled all at the same time
        list(pool.map(lambda step: step(0), steps.values()))
    rows = []
    for name, step in steps.items():
        rows.append(Row(f"{shape.name} {name} m{count} bf16", "us_per_layer", graph_us(step, shape.layers), "us"))
        print(f"{rows[-1].case:58s}{rows[-1].value:8.2f} us", flush=True)
    before, after = rows[0].value, rows[1].value
    rows.append(Row(f"{shape.name} layer m{count} bf16", "after_over_before", after / before, "ratio"))
    return rows


def main() -> None:
    """Parse options, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 32, 64])
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        rows = [row for shape in SHAPES for count in options.rows for row in measure(shape, count)]
    if options.out:
        write_report(options.out, "kernels_layer", torch.cuda.get_device_name(0), rows, ("torch", "triton"))


if __name__ == "__main__":
    main()
