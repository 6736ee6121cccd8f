"""Cuts of products with few rows, each measured within a round of the engine.

    python -m benchmarks.kernels.product_chains --model /models/llama-8b-fp8 --rounds 1x1 1x32 64x64 --out FILE.json

A product that is launched alone, again and again, hides the cost of its start and end: how soon the next kernel's
weights are requested, how unevenly its programs end, and whether the next kernel's programs find room beside them. So
the four matrices of a layer are cut one after the other, while the others keep their best cuts so far, and the device's
time of the whole round is measured: of REQUESTSxTOKENS, with 1,024 tokens of context each. For dense models on Hopper.

    git show 0819fb56:kernels/linear_configs.py > former.py
    python -m benchmarks.kernels.product_chains --shape llama-3b,layers=14 --format fp8 --against former.py

compares the cuts chosen by a former file's `choose_ring` and by today's, in turns. `--shape` has random weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

import kernels.linear
from benchmarks.engine.quantized import ROOM, engine_rounds
from benchmarks.kernels.quantized_products import exact_product
from kernels.compile_workers import compile_aside
from kernels.compiling import allow_threads, compile_ahead
from kernels.launch import ceil_div
from kernels.linear import fits_ring, stream_config, stream_linear
from kernels.linear_configs import SHARED_MARGIN, SHARED_MEMORY, GemmConfig
from kernels.quant_weight import QuantWeight
from kernels.ring_configs import RingConfig, choose_ring
from outrider.layers.linear import Linear
from outrider.models.config import ModelConfig
from outrider.models.decoder import CausalLM, GatedMlp
from outrider.models.loader import load_decoder
from outrider.models.weights import write_shards
from outrider_tools.bench.report import Row, write_report
from outrider_tools.inflate.shapes import parse_shape
from outrider_tools.quantize import quantize

Shape = tuple[int, int, bool]
"""num_out, size and gated, as in kernels.linear_configs."""
Cut = RingConfig | GemmConfig
ADDED = ("down", "o")
"""Matrices whose products a model adds to its residual stream."""
TILES = ((64, 4), (128, 4), (128, 8))
"""Weight rows of a tile, and warps."""
STAGES = (2, 3, 4, 5, 6, 8)
DEPTHS = {16: (64, 128), 8: (128, 256), 4: (128, 256)}
"""Columns of a step, by the bits of a weight."""
LEAST_BYTES = 40 * 1024
"""Least shared memory of a processor that rings take."""
MAX_WAVES = 2.4
"""Most programs that tiles are cut into, as a multiple of the processors."""
CONTEXT = 1024
TURNS = 4
"""How often former and today's cuts are timed, one after the other."""
GROUP = 128
"""Weights that share a scale, for int4."""
SHARD_BYTES = 4_000_000_000
WORST = 0.01
"""Largest permitted difference of a cut to the exact product, over the largest value."""


class Chain:
    """A model's products within a round of `num_rows` tokens, and the cuts that compute them."""

    def __init__(self, model: CausalLM, num_requests: int, num_rows: int) -> None:
        self.model, self.num_rows = model, num_rows
        self.cuts: dict[Shape, Cut] = {}
        self._exact: dict[str, Tensor] = {}
        layer = model.layers[len(model.layers) // 2]
        if not isinstance(layer.mlp, GatedMlp):
            raise TypeError("for dense models alone")
        self.matrices: dict[str, Linear] = {
            "down": layer.mlp.down.linear,
            "gate_up": layer.mlp.gate_up,
            "qkv": layer.attention.qkv,
            "o": layer.attention.output.linear,
        }
        self._chosen = stream_config
        self._processors = torch.cuda.get_device_properties(model.device).multi_processor_count
        sizes = {self.shape(name)[1] for name in self.matrices}
        self._rows = {size: torch.randn(num_rows, size, device=model.device).to(model.dtype) for size in sizes}
        setattr(kernels.linear, "stream_config", self._choose)  # noqa: B010
        self._rounds = engine_rounds(model, num_requests, CONTEXT, ((num_requests, num_rows),))
        self._rounds.prepare(num_requests, CONTEXT, ROOM, computed=False)

    def _choose(self, rows: Tensor, weight: Tensor | QuantWeight, gated: bool = False) -> object:
        found = self.cuts.get(_shape(weight, gated))
        return found or self._chosen(rows, weight, gated)

    def weight(self, name: str) -> Tensor | QuantWeight:
        """Return a matrix in the form that kernels take."""
        linear = self.matrices[name]
        return linear.quantized or linear.weight

    def shape(self, name: str) -> Shape:
        """Return a matrix's shape."""
        return _shape(self.weight(name), name == "gate_up")

    def product(self, name: str, cut: Cut) -> Tensor:
        """Compute a matrix's product in a cut, compiled as the model does."""
        num_out, size, gated = self.shape(name)
        rows = self._rows[size]
        residual = rows.new_zeros(self.num_rows, num_out) if name in ADDED else None
        return stream_linear(rows, self.weight(name), residual=residual, gated=gated, config=cut)

    def is_right(self, name: str, cut: Cut) -> bool:
        """Whether a cut gives the dequantized matrix's product, twice."""
        if name not in self._exact:
            (_, size, gated), weight = self.shape(name), self.weight(name)
            wide = weight.dequantized(torch.float32) if isinstance(weight, QuantWeight) else weight
            self._exact[name] = exact_product(self._rows[size], wide, gated)
        exact = self._exact[name]
        off = max(float((self.product(name, cut).float() - exact).abs().max()) for _ in range(2))
        return off <= WORST * float(exact.abs().max())

    def ms(self, repeats: int = 9) -> float:
        """Return the median milliseconds of a round on the device."""
        executor = self._rounds.executor
        executor._input.clear()
        executor.graphs.capture(executor.graphs.captured(), together=False)
        return self._rounds.measure(self.num_rows, repeats).gpu

    def chosen(self, name: str) -> Cut:
        """Return the engine's cut."""
        _, size, gated = self.shape(name)
        return self._chosen(self._rows[size], self.weight(name), gated)

    def candidates(self, name: str) -> list[Cut]:
        """Return the engine's cut and all rings that fit a processor. TypeError if no ring takes the weights."""
        num_out, _, gated = self.shape(name)
        weight, most = self.weight(name), MAX_WAVES * self._processors
        if not fits_ring(weight):
            raise TypeError(
                f"{name} is not multiplied by rings: bfloat16 is, and fp8 and int4 in groups that steps fit"
            )
        bits = 16 // weight.per_word if isinstance(weight, QuantWeight) else 16
        found: dict[Cut, None] = {self.chosen(name): None}
        for (tile, warps), depth, stages in itertools.product(TILES, DEPTHS[bits], STAGES):
            # Half a tile has steps of 128 bytes.
            if gated and depth * bits > 1024:
                continue
            base = RingConfig(tile, depth, stages=stages, warps=warps)
            tiles = ceil_div(num_out, tile // (2 if gated else 1))
            for cut in (
                *(replace(base, split_k=0, per_sm=programs) for programs in (1, 2, 3)),
                *(replace(base, split_k=split) for split in (1, 2, 3, 4, 8) if split == 1 or tiles * split <= most),
            ):
                used = cut.shared_bytes(cut.rows(self.num_rows), bits)
                programs = cut.per_sm if cut.split_k == 0 else ceil_div(tiles * cut.split_k, self._processors)
                at_once = min(programs, SHARED_MEMORY // used) if used < SHARED_MEMORY - SHARED_MARGIN else 0
                if at_once * used >= LEAST_BYTES and (cut.split_k or at_once == cut.per_sm):
                    found[cut] = None
                    if bits < 16:
                        found[replace(cut, by_warp=True)] = None
        return list(found)

    def usable(self, tried: Iterable[tuple[str, Cut]]) -> dict[str, list[Cut]]:
        """Return the cuts that compile and are right."""
        jobs = list(tried)

        def compiled(job: tuple[str, Cut]) -> bool:
            with torch.inference_mode():
                try:
                    self.product(*job)
                except Exception as error:
                    print(f"  {job[0]} {brief(job[1])}: {str(error)[:120]}", flush=True)
                    return False
                return True

        with compile_aside():
            with compile_ahead():
                for job in jobs:
                    self.product(*job)
            # Launches are serial, since compiling takes the time. Each thread first needs the device's context.
            with ThreadPoolExecutor(16, initializer=torch.cuda.synchronize) as pool:
                good = list(pool.map(compiled, jobs))
        found: dict[str, list[Cut]] = {name: [] for name in self.matrices}
        for (name, cut), fine in zip(jobs, good, strict=True):
            if fine and self.is_right(name, cut):
                found[name].append(cut)
            elif fine:
                print(f"  WRONG {name} {brief(cut)}", flush=True)
        return found

    def descend(self, usable: dict[str, list[Cut]], repeats: int = 5) -> dict[str, list[tuple[float, Cut]]]:
        """Time each matrix in each of its cuts. Return them, fastest first; `cuts` then holds the fastest."""
        found = {}
        for name, cuts in usable.items():
            timed = []
            for cut in cuts:
                self.cuts[self.shape(name)] = cut
                timed.append((self.ms(repeats), cut))
            timed.sort(key=lambda pair: pair[0])
            self.cuts[self.shape(name)] = timed[0][1]
            found[name] = timed
            for ms, cut in timed[:6]:
                print(f"  {name:8s}{ms:8.3f} ms  {brief(cut)}", flush=True)
        return found


def _shape(weight: Tensor | QuantWeight, gated: bool) -> Shape:
    rows, size = (weight.num_out, weight.size) if isinstance(weight, QuantWeight) else weight.shape
    return rows // (2 if gated else 1), size, gated


def brief(cut: Cut) -> str:
    """Describe a cut in a few words."""
    if isinstance(cut, GemmConfig):
        return f"in Triton, {cut.block_n} x {cut.block_k} split {cut.split_k} stages {cut.stages}"
    programs = f"split {cut.split_k}" if cut.split_k else f"even {cut.per_sm}"
    apart = " by warp" if cut.by_warp else ""
    return f"{cut.tile} x {cut.block_k} {programs} stages {cut.stages} warps {cut.warps}{apart}"


def run(model: CausalLM, label: str, num_requests: int, num_rows: int) -> list[Row]:
    """Find cuts for a round. Return them with the round's time in these and in the engine's cuts."""
    chain, case = Chain(model, num_requests, num_rows), f"{label} b{num_requests} m{num_rows}"
    before = chain.ms(31)
    print(f"{case}: {before:.3f} ms as the engine cuts them", flush=True)
    first = chain.descend(chain.usable((name, cut) for name in chain.matrices for cut in chain.candidates(name)))
    timed = chain.descend({name: [cut for _, cut in cuts[:6]] for name, cuts in first.items()}, repeats=21)
    after = chain.ms(31)
    print(f"{case}: {after:.3f} ms in these cuts", flush=True)
    rows = [Row(case, "chosen_ms", before, "ms"), Row(case, "found_ms", after, "ms")]
    for name, found in timed.items():
        rows.append(Row(f"{case} {name} {brief(found[0][1])}", "round_ms", found[0][0], "ms"))
    return rows


def run_turns(
    model: CausalLM, label: str, num_requests: int, num_rows: int, former: Callable[..., object]
) -> list[Row]:
    """Time a round in a former `choose_ring`'s cuts and in today's. RuntimeError if one of them is wrong."""
    chain, case = Chain(model, num_requests, num_rows), f"{label} b{num_requests} m{num_rows}"
    cuts: dict[str, dict[str, Cut]] = {}
    for name, choose in (("former", former), ("chosen", choose_ring)):
        setattr(kernels.linear, "choose_ring", choose)  # noqa: B010
        cuts[name] = {matrix: chain.chosen(matrix) for matrix in chain.matrices}
    jobs = list(dict.fromkeys(job for of_kind in cuts.values() for job in of_kind.items()))
    usable = chain.usable(jobs)
    if any(cut not in usable[matrix] for matrix, cut in jobs):
        raise RuntimeError(f"{case}: a cut is wrong")
    times: dict[str, list[float]] = {name: [] for name in cuts}
    for turn in range(TURNS):
        for name in sorted(cuts, reverse=turn % 2 == 0):
            chain.cuts = {chain.shape(matrix): cut for matrix, cut in cuts[name].items()}
            times[name].append(chain.ms())
    former_ms, chosen_ms = fmean(times["former"]), fmean(times["chosen"])
    print(f"{case}: {former_ms:.3f} and {chosen_ms:.3f} ms, {chosen_ms / former_ms:.3f}", flush=True)
    return [
        Row(case, "former_ms", former_ms, "ms"),
        Row(case, "chosen_ms", chosen_ms, "ms"),
        Row(case, "chosen_over_former", chosen_ms / former_ms, "ratio"),
    ]


def former_choice(path: Path) -> Callable[..., object]:
    """Return `choose_ring` of a former file of kernels, adapted to today's class of cuts."""
    spec = importlib.util.spec_from_file_location("former_ring_configs", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--against {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    vars(module)["RingConfig"] = RingConfig
    choose: Callable[..., object] = module.choose_ring
    return choose


def write_random(folder: Path, shape: str, form: str, device: torch.device) -> Path:
    """Write a Llama checkpoint of random weights. Return its folder, inside `folder`. `shape` is one of `outrider
    inflate`, `form` is bf16 or a format of `outrider quantize`."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49_152,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        **parse_shape(shape).config_fields(),
    }
    whole = CausalLM(ModelConfig.from_fields(fields, {}), torch.float32, torch.device("meta"))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in whole.checkpoint_tensors().items():
            values = torch.randn(tensor.shape, device=device) * 0.02 if tensor.dim() > 1 else torch.ones(tensor.shape)
            yield name, values.bfloat16()

    wide, packed = folder / "bf16", folder / form
    wide.mkdir()
    (wide / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    write_shards(wide, tensors(), SHARD_BYTES, lambda done: None)
    if packed != wide:
        quantize(wide, packed, form, GROUP, device, SHARD_BYTES, lambda *done: None)
    return packed


def main() -> None:
    """Parse options, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, help="folder of a dense model, quantized or not")
    model.add_argument("--shape", help="random weights of this shape, as `outrider inflate` takes it")
    parser.add_argument("--format", choices=("bf16", "fp8", "fp8-block", "int4"), default="bf16", help="of --shape")
    parser.add_argument("--rounds", nargs="+", metavar="REQUESTSxTOKENS", default=["1x1", "1x32", "64x64"])
    parser.add_argument("--against", type=Path, help="former file with a `choose_ring`: time its cuts beside today's")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    torch.manual_seed(0)
    allow_threads()
    rows: list[Row] = []
    former = None if options.against is None else former_choice(options.against)
    device, label = torch.device("cuda"), options.model.name if options.model else f"{options.shape} {options.format}"
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        made = options.model or write_random(Path(folder), options.shape, options.format, device)
        loaded = load_decoder(made, torch.bfloat16, device, own_products=True)
        for text in options.rounds:
            num_requests, num_rows = map(int, text.split("x"))
            if former is None:
                rows += run(loaded, label, num_requests, num_rows)
            else:
                rows += run_turns(loaded, label, num_requests, num_rows, former)
            if options.out:
                write_report(options.out, "product_chains", torch.cuda.get_device_name(), rows, ("torch", "triton"))


if __name__ == "__main__":
    main()
