"""What a layer of a small model costs on a GPU without its attention, launch by launch; microseconds.

Before: norm, product, rotation and writing one after the other. After: as layers run them, products over whole rows
with all that stands around them in one launch where that pays (`kernels.row_configs`). Each case is one CUDA graph over
all layers, each with weights of its own. How its work is best cut depends on all launches of a layer, see
draft_layer.py.

python benchmarks/kernels_layer.py --out benchmarks/results/kernels_layer.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from kernels_attention import graph_us
from report import Row, write_report
from torch import Tensor

from kernels.compiling import allow_threads
from kernels.gemm import stream_linear
from kernels.norm import rms_norm
from kernels.rope import rope_write
from kernels.row_configs import RowConfig, pays
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
        heads = stream_linear(rms_norm(self.stream, self.norms[layer], EPS), self.qkv[layer])
        heads = heads.view(len(heads), -1, self.shape.dim)
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

    def added_before(self, weights: list[Tensor], rows: Tensor, layer: int) -> Tensor:
        """An output projection by the kernel for large models."""
        return stream_linear(rows, weights[layer], residual=self.stream, out=self.stream)

    def added_after(self, weights: list[Tensor], rows: Tensor, layer: int, config: RowConfig | None = None) -> Tensor:
        """The same over whole rows, if that pays."""
        if config is None and not pays(len(rows), *weights[layer].shape, whole=False):
            return self.added_before(weights, rows, layer)
        return norm_linear(rows, weights[layer], residual=self.stream, out=self.stream, config=config)

    def before(self, layer: int) -> None:
        """A layer but for its attention."""
        self.heads_before(layer)
        self.added_before(self.out, self.attended, layer)
        self.added_before(self.down, self.gated_before(layer), layer)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """What stands for attention to a layer's cache, which is not run."""
        return self.attended

    def after(self, layer: int, cut: str = "", config: RowConfig | None = None) -> None:
        """The same as it is run, but for the product named `cut`."""

        def of(name: str) -> RowConfig | None:
            return config if name == cut else None

        count = len(self.stream)
        fast = cut == "heads" or pays(count, *self.qkv[layer].shape, whole=True)
        q = self.heads_after(layer, of("heads")) if fast else self.heads_before(layer)
        self.added_after(self.out, self.attend(layer, q), layer, of("output"))
        fast = cut == "gated" or pays(count, *self.gate_up[layer].shape, whole=True, gated=True)
        gated = self.gated_after(layer, of("gated")) if fast else self.gated_before(layer)
        self.added_after(self.down, gated, layer, of("down"))


def steps_of(layers: Layers) -> dict[str, Callable[[int], object]]:
    """What is measured."""
    middle = torch.randn(len(layers.stream), layers.shape.mlp, device="cuda", dtype=DTYPE)
    return {
        "layer before": layers.before,
        "layer after": layers.after,
        "heads before": layers.heads_before,
        "heads after": layers.heads_after,
        "gated before": layers.gated_before,
        "gated after": layers.gated_after,
        "output before": partial(layers.added_before, layers.out, layers.attended),
        "output after": partial(layers.added_after, layers.out, layers.attended),
        "down before": partial(layers.added_before, layers.down, middle),
        "down after": partial(layers.added_after, layers.down, middle),
    }


def measure(shape: Shape, count: int) -> list[Row]:
    """All cases of so many rows."""
    layers = Layers(shape, count)
    steps = steps_of(layers)
    allow_threads()
    with ThreadPoolExecutor(16) as pool:  # compiled all at the same time
        list(pool.map(lambda step: step(0), steps.values()))
    rows = []
    for name, step in steps.items():
        rows.append(Row(f"{shape.name} {name} m{count} bf16", "us_per_layer", graph_us(step, shape.layers), "us"))
        print(f"{rows[-1].case:68s}{rows[-1].value:8.2f} us", flush=True)
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
