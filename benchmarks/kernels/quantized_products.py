"""Products with quantized weights at a llama-8b's shapes: check them first, then time them against libraries.

Times are those of a launch within a CUDA graph over copies of the weight that together are larger than L2.
`chosen` is our product for few rows, `wide` dequantizes the weight first, `fp8` is the product of rows in two fp8
parts, `rounded` that of rows rounded to fp8, and `scaled_mm` the library's for rows that were rounded before. For other
cuts of ours, see benchmarks.kernels.product_chains.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.elementwise import gate_mul
from kernels.linear import dequantize, fits_fp8_linear, fp8_linear, stream_linear
from kernels.linear_configs import MAX_QUANTIZED_ROWS
from kernels.quant_weight import QuantWeight, packed, piece_of
from outrider_tools.bench.report import Row, write_report

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
KINDS = {"fp8": ("fp8", 0), "block": ("fp8", 128), "int4": ("int4", 128), "mxfp4": ("mxfp4", 32)}
COPIES_BYTES = 160 << 20
Product = Callable[[int], object]


def exact_product(rows: Tensor, weight: Tensor, gated: bool) -> Tensor:
    """Return rows @ weight^T in float32, or silu(gate) * up of it."""
    exact = rows.float() @ weight.float().T
    if gated:
        gate, up = exact.chunk(2, 1)
        exact = torch.nn.functional.silu(gate) * up
    return exact


@dataclass(frozen=True)
class Case:
    """Copies of a weight, and the rows to multiply them with."""

    kind: str
    shape: str
    rows: Tensor
    weights: Sequence[QuantWeight]

    @property
    def gated(self) -> bool:
        """Whether the halves of the product are gate and up."""
        return self.shape == "gate_up"

    def ours(self, copy: int) -> Tensor:
        """Run our product in the engine's cut."""
        return stream_linear(self.rows, self.weights[copy], gated=self.gated)

    def wide(self, copy: int) -> object:
        """Run cuBLAS's product with the dequantized weight."""
        product = self.rows @ dequantize(self.weights[copy], torch.bfloat16).T
        return gate_mul(product) if self.gated else product

    def fp8(self, copy: int) -> Tensor:
        """Run the product of rows in two fp8 parts."""
        return fp8_linear(self.rows, self.weights[copy], gated=self.gated)

    def rounded(self, copy: int) -> Tensor:
        """Run the product of rows rounded to fp8, with the rounding."""
        return fp8_linear(self.rows, self.weights[copy], gated=self.gated, rounds_rows=True)

    @cached_property
    def exact(self) -> Tensor:
        """The product with the first weight, dequantized, in float32."""
        return exact_product(self.rows, self.weights[0].dequantized(torch.float32), self.gated)

    def error(self) -> float:
        """Return the largest difference of three runs to the dequantized matrix's product, over the largest value."""
        worst = 0.0
        for _ in range(3):
            found = stream_linear(self.rows, self.weights[0], gated=self.gated, out_dtype=torch.float32)
            worst = max(worst, self.off(found))
        return worst

    def off(self, found: Tensor) -> float:
        """Return the relative difference of one product with the first weight."""
        return float((found - self.exact).abs().max() / self.exact.abs().max())


def random_weights(kind: str, num_out: int, size: int) -> QuantWeight:
    """Return a weight of random codes and scales on the GPU."""
    name, group = KINDS[kind]
    span = 128 if kind == "block" else 1
    group = group or size
    scales = (torch.rand(size // group, num_out // span, device="cuda") + 0.5) / size**0.5
    piece = piece_of(name, size, group)
    if name == "fp8":
        codes = torch.randn(num_out, size, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
        return QuantWeight(name, packed(codes, name, piece), scales, group, piece, span)
    codes = torch.randint(16, (num_out, size), dtype=torch.uint8, device="cuda")
    scales = (scales / 4).log2().round().exp2().bfloat16()
    return QuantWeight(name, packed(codes, name, piece), scales, group, piece).for_streaming()


def graph_us(product: Product, copies: int) -> float:
    """Return the microseconds of a call in a graph, the best of three replays."""
    calls = [number % copies for number in range(max(copies, 24))]
    for copy in calls[:2]:
        product(copy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in calls:
            product(copy)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best * 1000 / len(calls)


def humming(case: Case) -> Product:
    """Return the humming library's product, with weights of the same kind."""
    from humming.layer import HummingLayer

    weight = case.weights[0]
    config: dict[str, Any] = {
        "fp8": {"dtype": "float8e4m3"},
        "block": {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128},
        "int4": {"dtype": "int4", "group_size": 128},
        "mxfp4": {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
    }[case.kind]
    layers = []
    for _ in case.weights:
        layer = HummingLayer(
            shape_n=weight.num_out, shape_k=weight.size, weight_config=dict(config), torch_dtype=torch.bfloat16
        ).cuda()
        layer.load_from_unquantized(weight.dequantized(torch.bfloat16))
        layer.transform()
        layers.append(layer)
    return lambda copy: layers[copy](case.rows)


def scaled_mm(case: Case) -> Product:
    """Return cuBLAS's or CUTLASS's product in fp8. The rows are quantized beforehand, outside of the measured time."""
    if case.kind != "fp8":
        raise ValueError("for fp8 alone")
    scale = case.rows.abs().amax(1, keepdim=True).float() / 448
    rows = (case.rows / scale).to(torch.float8_e4m3fn)

    def product(copy: int) -> object:
        weight = case.weights[copy]
        return torch._scaled_mm(
            rows, weight.codes.view(torch.float8_e4m3fn).T, scale_a=scale, scale_b=weight.scales,
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip

    return product


def own_times(case: Case, copies: int) -> dict[str, float]:
    """Return the times of the engine's own products for this number of rows."""
    times = {"wide": graph_us(case.wide, copies)}
    if case.rows.shape[0] <= MAX_QUANTIZED_ROWS:
        times["chosen"] = graph_us(case.ours, copies)
    if fits_fp8_linear(case.weights[0], torch.bfloat16):
        times["fp8"] = graph_us(case.fp8, copies)
        times["rounded"] = graph_us(case.rounded, copies)
    return times


def num_bytes(weight: Tensor | QuantWeight) -> int:
    """Return a weight's bytes in memory."""
    if isinstance(weight, QuantWeight):
        return sum(tensor.nbytes for tensor in (weight.codes, weight.scales, weight.zeros) if tensor is not None)
    return weight.nbytes


def run(options: argparse.Namespace) -> list[Row]:
    """Run all cases. Return their rows."""
    found: list[Row] = []
    for kind, shape in itertools.product(options.kinds, options.shapes):
        num_out, size = SHAPES[shape]
        first = random_weights(kind, num_out, size)
        copies = max(2, min(16, COPIES_BYTES // num_bytes(first)))
        weights = [first, *(random_weights(kind, num_out, size) for _ in range(copies - 1))]
        for count in options.rows:
            case = Case(kind, shape, torch.randn(count, size, device="cuda").bfloat16(), weights)
            wide = [torch.randn(num_out, size, device="cuda").bfloat16() for _ in range(max(2, copies // 2))]
            bound = num_bytes(first) / 4.2e6
            line = f"{kind:6s}{shape:8s} m{count:<4d}{bound:7.1f} us at 4.2 TB/s"
            times = {"bf16": graph_us(lambda copy, r=case.rows, w=wide: r @ w[copy].T, len(wide))}  # type: ignore[misc]
            times |= own_times(case, copies)
            worst = case.error() if "chosen" in times else 0.0
            if "fp8" in times:
                found.append(Row(f"{kind} {shape} m{count} fp8", "relative_error", case.off(case.fp8(0)), ""))
            for name, make in {"humming": humming, "scaled_mm": scaled_mm}.items():
                if name not in options.libraries:
                    continue
                try:
                    times[name] = graph_us(make(case), copies)
                except Exception as error:
                    if name == "humming" and count == options.rows[0]:
                        print(f"  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            row_case = f"{kind} {shape} m{count}"
            found += [Row(f"{row_case} {name}", "product_us", time, "us") for name, time in times.items()]
            found.append(Row(row_case, "relative_error", worst, ""))
            shown = "  ".join(f"{name} {time:6.1f}" for name, time in times.items())
            print(f"{line}  {shown}  error {worst:.1e}", flush=True)
            del wide
    return found


def main() -> None:
    """Parse options, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 64, 128])
    parser.add_argument("--libraries", nargs="*", choices=["humming", "scaled_mm"], default=["scaled_mm"])
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        rows = run(options)
    if options.out:
        write_report(options.out, "quantized_products", torch.cuda.get_device_name(), rows, ("torch", "triton"))


if __name__ == "__main__":
    main()
