"""Products of experts with quantized weights, ours and those of humming-kernels: check them first, then time them.

    python -m benchmarks.kernels.expert_products --out FILE.json

Tokens choose their experts at random. Times are those of a launch within a CUDA graph over copies of the experts, so
many that the experts of one token in all copies exceed L2. Ours computes gate, up and their gating in one launch; in
brackets is the library's product with its gating, a separate launch. `read` is the time that the bytes of a layer's
woken experts take at the device's copy rate. gpt-oss's own gating and biases are left out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.engine.timing import copy_rate
from benchmarks.kernels.quantized_products import COPIES_BYTES, graph_us, num_bytes
from kernels.compile_workers import compile_aside
from kernels.compiling import allow_threads
from kernels.elementwise import gate_mul
from kernels.expert_tiles import SWIGLU, Routes, tile_of
from kernels.experts import expert_linear, in_tiles
from kernels.quant_weight import QuantWeight, packed, piece_of, unpacked
from kernels.reference import experts as reference
from outrider.layers.formats import nibble_words
from outrider_tools.bench.report import Row, write_report


class ExpertShape(NamedTuple):
    """A layer of experts."""

    experts: int
    active: int
    hidden: int
    size: int

    def matrix(self, part: str) -> tuple[int, int]:
        """Return rows and columns of an expert's matrix."""
        return (2 * self.size, self.hidden) if part == "gate_up" else (self.hidden, self.size)


SHAPES = {"qwen3-30b-a3b": ExpertShape(128, 8, 2048, 768), "gpt-oss-20b": ExpertShape(32, 4, 2880, 2880)}
KINDS = {"bf16": ("", 0), "fp8": ("fp8", 0), "block": ("fp8", 128), "int4": ("int4", 128), "mxfp4": ("mxfp4", 32)}
PARTS = ("gate_up", "down")
LIMIT = 0.01
"""Largest permitted difference to the reference, over the reference's largest value. Results are bfloat16."""
SCHEMAS: dict[str, dict[str, Any]] = {
    "fp8": {"b_dtype": "float8e4m3"},
    "block": {"b_dtype": "float8e4m3", "weight_scale_group_size": 128, "weight_scale_group_size_n": 128},
    "int4": {"b_dtype": "uint4", "weight_scale_group_size": 128},
    "mxfp4": {"b_dtype": "float4e2m1", "weight_scale_group_size": 32, "bs_dtype": "float8e8m0"},
}
"""The library's options; what is not given is bfloat16."""
INDEXED = '{"gemm_type": "indexed"}'
STEP = 128
"""The library's kernels take matrices with a multiple of this many rows; others are padded."""


def random_weights(kind: str, shape: ExpertShape, part: str, device: str) -> Tensor | QuantWeight:
    """Return random matrices of all experts, as in checkpoints; scales are bfloat16 numbers."""
    (name, group), (num_out, size) = KINDS[kind], shape.matrix(part)
    if not name:
        wide: Tensor = torch.randn(shape.experts, num_out, size, device=device) * size**-0.5
        return wide.bfloat16()
    group, span = group or size, 128 if kind == "block" else 1
    piece = piece_of(name, size, group)
    scales = (torch.rand(shape.experts, size // group, num_out // span, device=device) + 0.5) * size**-0.5
    if name == "fp8":
        codes = torch.randn(shape.experts, num_out, size, device=device).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = scales.bfloat16().float()
    else:
        codes = torch.randint(16, (shape.experts, num_out, size), dtype=torch.uint8, device=device)
        scales = scales / 4
        scales = (scales.log2().round().exp2() if name == "mxfp4" else scales).bfloat16()
    return QuantWeight(name, packed(codes, name, piece), scales, group, piece, span)


@dataclass(frozen=True)
class ExpertMatrices:
    """One of a layer's two matrices, for all its experts."""

    kind: str
    shape: ExpertShape
    part: str
    weight: Tensor | QuantWeight

    @property
    def copies(self) -> int:
        """Number of copies that exceed L2 with the experts of one token."""
        woken = num_bytes(self.weight) * self.shape.active // self.shape.experts
        return max(2, -(-COPIES_BYTES // woken))

    def clones(self) -> Iterator[Tensor | QuantWeight]:
        """Yield `copies` copies of the weight."""
        for _ in range(self.copies):
            weight = self.weight
            if isinstance(weight, QuantWeight):
                yield replace(weight, codes=weight.codes.clone(), scales=weight.scales.clone())
            else:
                yield weight.clone()

    @cached_property
    def wide(self) -> Tensor:
        """The matrices, dequantized to float32."""
        weight = self.weight
        return weight.dequantized(torch.float32) if isinstance(weight, QuantWeight) else weight.float()


@dataclass(frozen=True)
class ExpertTokens:
    """Rows and their experts, in tiles of `tile` places."""

    rows: Tensor
    routes: Routes

    @classmethod
    def random(cls, experts: ExpertMatrices, count: int, device: str) -> ExpertTokens:
        """Return `count` random tokens, which choose the same experts in both parts and all kinds."""
        shape = experts.shape
        generator = torch.Generator().manual_seed(count)
        logits = torch.randn(count, shape.experts, generator=generator).to(device)
        num_rows = count if experts.part == "gate_up" else count * shape.active
        rows = torch.randn(num_rows, experts.shape.matrix(experts.part)[1], generator=generator).to(device).bfloat16()
        tile = tile_of(count, shape.active, shape.experts)
        return cls(rows, reference.route(logits, shape.active, True, None, tile)).in_tiles(shape.experts, tile)

    def in_tiles(self, num_experts: int, tile: int) -> ExpertTokens:
        """Return the same tokens in tiles of another size."""
        return replace(self, routes=in_tiles(self.routes, num_experts, tile))

    @property
    def woken(self) -> int:
        """Number of different experts."""
        return len(self.routes.experts.unique())


def ours(experts: ExpertMatrices, tokens: ExpertTokens, clones: Sequence[Tensor | QuantWeight], copy: int) -> Tensor:
    """Run our product with one copy, for gate and up including their gating."""
    gating = SWIGLU if experts.part == "gate_up" else None
    return expert_linear(tokens.rows, clones[copy], tokens.routes, gating=gating)


def error(experts: ExpertMatrices, tokens: ExpertTokens, found: Tensor) -> float:
    """Return the largest difference to the float32 reference, over its largest value; huge for NaN and infinity."""
    gating = SWIGLU if experts.part == "gate_up" else None
    expected = reference.expert_linear(tokens.rows.float(), experts.wide, tokens.routes, None, gating, False)
    difference = (found.float() - expected).abs().nan_to_num(1e9, 1e9)
    return float(difference.max() / expected.abs().max())


class ExpertLibrary:
    """The library's form of experts, and its kernels for each number of tokens."""

    def __init__(self, experts: ExpertMatrices) -> None:
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_layer_config

        num_out, size = experts.shape.matrix(experts.part)
        self.experts = experts
        self.config = prepare_layer_config(
            num_out, size, HummingWeightSchema(**SCHEMAS[experts.kind]), num_experts=experts.shape.experts,
            pad_n_to_multiple=STEP, torch_dtype=torch.bfloat16,
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the library's kernels read, with their own locks."""
        from humming.transform import transform_humming_tensors

        weight = self.experts.weight
        assert isinstance(weight, QuantWeight)
        codes = unpacked(weight.codes, weight.kind, weight.piece)
        words = codes.contiguous().view(torch.int32) if weight.kind == "fp8" else nibble_words(codes)
        scales = weight.scales.transpose(1, 2)
        if weight.kind == "mxfp4":
            scales = (scales.float().log2() + 127).to(torch.uint8).contiguous().view(torch.float8_e8m0fnu)
        else:
            scales = scales.to(torch.float32 if weight.span > 1 else torch.bfloat16).contiguous()
        found: dict[str, Tensor] = transform_humming_tensors(self.config, {"weight": words, "weight_scale": scales})
        return found | {"locks": torch.zeros(2048, dtype=torch.int32, device=words.device)}

    def tuned(self, num_tokens: int) -> dict[str, Any]:
        """Return the tiling that the library chooses for this number of tokens."""
        from humming.tune import get_heuristics_config

        pairs = num_tokens * self.experts.shape.active
        found: dict[str, Any] = get_heuristics_config(
            json.loads(self.config.to_str()), shape_m=pairs, gemm_type="indexed", device=0
        )
        return found

    def kernels(self, num_tokens: int) -> Tensor:
        """Return the compiled kernels for the library's launcher."""
        from humming.kernel import HummingKernel

        found: Tensor = HummingKernel.prepare_kernels(
            self.config.to_str(), INDEXED, json.dumps(self.tuned(num_tokens)), 0
        )
        return found

    def product(self, tokens: ExpertTokens, clones: list[dict[str, Tensor]]) -> Callable[[int], Tensor]:
        """Return the bare product, without gating."""
        from humming.ops import launch_kernel

        count, active = tokens.routes.experts.shape
        kernels = self.kernels(count)
        routes = tokens.in_tiles(self.experts.shape.experts, self.tuned(count)["block_shape"][0]).routes
        padded = ((routes.tile_experts >= 0).sum() * routes.tile).int()
        moe = {"sorted_ids": routes.places, "expert_ids": routes.tile_experts, "num_tokens_padded": padded}
        top_k = active if self.experts.part == "gate_up" else 1

        def product(copy: int) -> Tensor:
            found: Tensor = launch_kernel(configs=kernels, inputs=tokens.rows, top_k=top_k, **moe, **clones[copy])
            return found

        return product


Times = dict[tuple[str, str, int], float]
"""Microseconds by part, implementation, and number of tokens."""


def measure_ours(experts: ExpertMatrices, counts: list[int], device: str) -> tuple[Times, list[float]]:
    """Return the times of our products, and the errors."""
    times: Times = {}
    errors = []
    clones = list(experts.clones())
    for count in counts:
        tokens = ExpertTokens.random(experts, count, device)
        product = partial(ours, experts, tokens, clones)
        errors.append(error(experts, tokens, product(0)))
        times[experts.part, "ours", count] = graph_us(product, len(clones))
    return times, errors


def measure_library(experts: ExpertMatrices, counts: list[int], device: str) -> tuple[Times, list[float]]:
    """Return times and errors of the library's product, for gate and up also with gating. Failures are only printed."""
    times: Times = {}
    errors: list[float] = []
    try:
        library = ExpertLibrary(experts)
        tensors = library.tensors()
    except Exception as failure:
        print_failure(f"  library, {experts.kind} {experts.part}", failure)
        return times, errors
    clones = [{name: tensor.clone() for name, tensor in tensors.items()} for _ in range(experts.copies)]
    for count in counts:
        try:
            tokens = ExpertTokens.random(experts, count, device)
            bare = library.product(tokens, clones)
            gated = bare if experts.part == "down" else partial(gate, bare)
            found = error(experts, tokens, gated(0))
            errors.append(found)
            if found > LIMIT:
                raise ValueError(f"wrong by {found:.1e} of the largest value")
            times[experts.part, "library", count] = graph_us(bare, len(clones))
            times[experts.part, "library, gated", count] = graph_us(gated, len(clones))
        except Exception as failure:
            print_failure(f"  library, {experts.kind} {experts.part}, {count} tokens", failure)
    return times, errors


def gate(bare: Callable[[int], Tensor], copy: int) -> Tensor:
    """Run the library's product, and its gating."""
    return gate_mul(bare(copy))


def print_failure(what: str, failure: Exception) -> None:
    """Print a failure in a line or two."""
    print(f"{what}: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}", flush=True)


def compile_all(layers: dict[tuple[str, str], list[ExpertMatrices]], counts: list[int], device: str) -> None:
    """Compile all kernels at once. A failure here comes again in the measurement, and is printed there."""
    jobs: list[Any] = []
    for parts in layers.values():
        for experts in parts:
            jobs.append(lambda e=experts: ours(e, ExpertTokens.random(e, counts[0], device), [e.weight], 0))
            if experts.kind != "bf16" and find_spec("humming") is not None:
                jobs += [lambda e=experts, c=count: ExpertLibrary(e).kernels(c) for count in counts]

    def done(job: Any) -> None:
        # A kernel that cannot be compiled is reported later.
        try:
            with torch.inference_mode():
                job()
        except Exception:
            return

    allow_threads()
    with compile_aside(), ThreadPoolExecutor(16) as pool:
        list(pool.map(done, jobs))
    torch.cuda.synchronize()


HEAD = f"{'':20s}{'tokens':>7s}{'woken':>6s}{'read':>8s} | {'gate, up, gating':^23s} | {'down':^15s} | both"


def figure_rows(name: str, layer: list[ExpertMatrices], times: Times, counts: list[int], rate: float) -> list[Row]:
    """Print a line for each number of tokens. Return the figures."""
    rows = []
    for count in counts:
        woken = ExpertTokens.random(layer[0], count, "cpu").woken
        read = woken * sum(num_bytes(experts.weight) for experts in layer) / layer[0].shape.experts

        def us(part: str, whose: str, count: int = count) -> float:
            return times.get((part, whose, count), float("nan"))

        whole = us("gate_up", "ours") + us("down", "ours")
        library = us("gate_up", "library, gated") + us("down", "library")
        print(
            f"{name:20s}{count:7d}{woken:6d}{read / rate * 1e6:8.1f} | {us('gate_up', 'ours'):7.1f}"
            f"{us('gate_up', 'library'):7.1f} ({us('gate_up', 'library, gated'):6.1f}) | {us('down', 'ours'):7.1f}"
            f"{us('down', 'library'):7.1f} | {whole:7.1f}{library:7.1f}  {library / whole:.2f}".replace("nan", "  -"),
            flush=True,
        )
        case = f"{name} m{count}"
        rows.append(Row(case, "read_bytes", read, "B"))
        rows.append(Row(case, "read_us", read / rate * 1e6, "us"))
        rows += [
            Row(f"{case} {part} {whose}", "product_us", us(part, whose), "us")
            for part in PARTS
            for whose in ("ours", "library", "library, gated")
            if (part, whose, count) in times
        ]
    return rows


def run(options: argparse.Namespace) -> None:
    """Measure all of ours first: a failure of the library may leave the device unusable."""
    device, begun = "cuda", time.perf_counter()
    layers = {}
    for name in options.shapes:
        for kind in options.kinds:
            if name == "gpt-oss-20b" and kind != "mxfp4":
                continue  # Its checkpoints have no other format.
            shape = SHAPES[name]
            layers[name, kind] = [
                ExpertMatrices(kind, shape, part, random_weights(kind, shape, part, device)) for part in PARTS
            ]
    rate = copy_rate(torch.device(device))
    print(f"{rate / 1e12:.2f} TB/s copied; compiling", flush=True)
    compile_all(layers, options.tokens, device)
    print(f"{time.perf_counter() - begun:.0f} s; microseconds, ours and library's, and library's over ours", flush=True)
    print(HEAD, flush=True)
    gpu, rows = torch.cuda.get_device_name(), [Row("copy", "rate", rate, "B/s")]
    times: dict[tuple[str, str], Times] = {}
    for key, layer in layers.items():
        measured = [measure_ours(experts, options.tokens, device) for experts in layer]
        times[key] = measured[0][0] | measured[1][0]
        rows += worst(key, "ours", measured)
    for key, layer in layers.items():
        if key[1] != "bf16":
            measured = [measure_library(experts, options.tokens, device) for experts in layer]
            times[key] |= measured[0][0] | measured[1][0]
            rows += worst(key, "library", measured)
        rows += figure_rows(" ".join(key), layer, times[key], options.tokens, rate)
        if options.out:
            write_report(options.out, "expert_products", gpu, rows, ("torch", "triton", "humming-kernels"))
    print(f"{time.perf_counter() - begun:.0f} s", flush=True)


def worst(key: tuple[str, str], whose: str, measured: list[tuple[Times, list[float]]]) -> list[Row]:
    """Return a row with a layer's largest error, if any. Print a warning if rounding cannot explain it."""
    errors = [error for _, found in measured for error in found]
    if not errors:
        return []
    if max(errors) > LIMIT:
        print(f"  WRONG: {whose}, {' '.join(key)}, by {max(errors):.1e}", flush=True)
    return [Row(f"{' '.join(key)} {whose}", "relative_error", max(errors), "")]


def main() -> None:
    """Parse options, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 16, 32, 64])
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        run(options)


if __name__ == "__main__":
    main()
