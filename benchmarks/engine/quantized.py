"""Rounds of one model in several formats, each against the bare products of its own weights.

    python -m benchmarks.engine.quantized --model bf16=/models/llama-8b --model fp8=/models/llama-8b-fp8 --out FILE.json

Drives CudaExecutor directly, as benchmarks.engine does. Contexts are 1,024 tokens; prompts are computed as by the
engine, up to 2,048 tokens at a time. --long adds 16 requests of 16,384 tokens, with keys and values in the model's
format and in fp8, and the number of such requests that fit beside the weights. Ratios are over the first model's
figures.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine.rounds import MeasuredRounds
from benchmarks.engine.timing import median_ms
from outrider.attention.triton_backend import TritonAttention
from outrider.models.decoder import CausalLM, GatedMlp
from outrider.models.loader import load_decoder
from outrider_tools.bench.report import Row, cpu_name, write_report
from verify_service.engine.scheduler import EngineLimits
from verify_service.executors.cuda import CudaExecutor

PAGE_SIZE = 16
ROOM = 160
"""Tokens that fit behind a request's context."""
GRAPH_PROMPT = 512
"""Longest prompt, in tokens, that a graph computes."""
SHARE = 0.88
"""Share of a device's memory for weights and KV: the default of --mem-fraction-static."""


@dataclass(frozen=True)
class Sizes:
    """What to measure: requests and tokens of a round, prompts, and contexts."""

    context: int = 1024
    rounds: tuple[tuple[int, int], ...] = (
        (1, 1), (1, 8), (1, 32), (1, 64), (16, 16), (16, 64), (64, 64), (16, 96), (16, 128), (16, 192), (16, 256),
    )  # fmt: skip
    prompts: tuple[int, ...] = (128, 256, 512, 1024, 4096)
    decodes: tuple[int, ...] = (1, 16, 64)
    long_rows: int = 16
    long_context: int = 16384


SMALL = Sizes(64, ((1, 1), (1, 8), (2, 2)), (48, 96), (1, 2), 2, 128)


def bare_products(model: CausalLM, num_rows: int) -> Callable[[], object]:
    """Return a function that runs only the products of a forward, in its order, with the operations fused into them."""
    config = model.config

    def rows(size: int) -> torch.Tensor:
        return torch.randn(num_rows, size, device=model.device).to(model.dtype)

    stream, heads = rows(config.hidden_size), rows(config.num_heads * config.weight_head_dim)
    inner = rows(config.intermediate_size)

    def work() -> None:
        for layer in model.layers:
            mlp = layer.mlp
            if not isinstance(mlp, GatedMlp):
                raise TypeError("for dense models alone")
            layer.attention.qkv(stream)
            layer.attention.output.linear.add_to(stream, heads)
            mlp.gate_up.gated(stream)
            mlp.down.linear.add_to(stream, inner)
        model.head.to_float32(stream)

    return work


def engine_rounds(model: CausalLM, num_rows: int, context: int, shapes: Iterable[tuple[int, int]]) -> MeasuredRounds:
    """Prepare an executor for `num_rows` requests of `context` tokens, with graphs of rounds of (requests, tokens)."""
    shapes = tuple(shapes)
    num_pages = num_rows * -(-(context + ROOM + 1) // PAGE_SIZE)
    limits = EngineLimits(
        vocab_size=model.config.vocab_size,
        context_length=context + 512,
        max_running=num_rows,
        max_round_tokens=max(tokens for _, tokens in shapes),
        chunk_size=min(2048, context),
        root_apart=True,
    )
    executor = CudaExecutor(model, num_pages, PAGE_SIZE, limits, TritonAttention())
    if model.device.type == "cuda":
        buckets = {executor.buckets.fit(tokens, rows) for rows, tokens in shapes}
        executor.graphs.capture(sorted(buckets, reverse=True), together=True)
        if context <= GRAPH_PROMPT:
            executor.capture_prefill()
    return MeasuredRounds(executor, model.config.vocab_size, num_pages, limits.chunk_size)


class FormatBench:
    """Measures one model, and gathers its rows."""

    def __init__(self, label: str, folder: Path, options: argparse.Namespace, sizes: Sizes) -> None:
        self.label, self._options, self._sizes = label, options, sizes
        self.rows: list[Row] = []
        device = torch.device(options.device)
        start = time.perf_counter()
        own = label in options.own_products
        self.model = load_decoder(folder, getattr(torch, options.dtype), device, own_products=own)
        self._synchronize()
        self._add("weights", "load_seconds", time.perf_counter() - start, "s")
        if device.type == "cuda":
            self._add("weights", "weight_gib", torch.cuda.memory_allocated() / 2**30, "GiB")

    def short(self) -> None:
        """Measure rounds of short contexts, their products, and plain decoding."""
        sizes = self._sizes
        rounds = engine_rounds(self.model, max(rows for rows, _ in sizes.rounds), sizes.context, sizes.rounds)
        # After the capture, which compiles kernels in parallel.
        gemm: dict[int, float] = {}
        for tokens in sorted({tokens for _, tokens in sizes.rounds}):
            gemm[tokens] = median_ms(bare_products(self.model, tokens), self.model.device)
            self._add(f"bare products m{tokens}", "gemm_ms", gemm[tokens], "ms")
        for num_rows, tokens in sizes.rounds:
            rounds.prepare(num_rows, sizes.context, ROOM, computed=False)
            times = rounds.measure(tokens, self._options.repeats)
            case = self._case(num_rows, tokens, sizes.context)
            self._add(case, "round_gpu_ms", times.gpu, "ms")
            self._add(case, "round_gpu_over_gemm", times.gpu / gemm[tokens], "ratio")
        for num_rows in sizes.decodes:
            rounds.prepare(num_rows, sizes.context, ROOM, computed=False)
            seconds = rounds.decode(self._options.repeats)
            case = self._case(num_rows, num_rows, sizes.context)
            self._add(case, "tokens_per_second", num_rows / seconds, "tokens/s")

    def prompts(self) -> None:
        """Measure prompts of one request, each with its own executor."""
        for length in self._sizes.prompts:
            rounds = engine_rounds(self.model, 1, length, ((1, 1),))
            seconds = [rounds.prepare(1, length, ROOM) for _ in range(self._options.repeats // 3 + 2)]
            self._add(f"prefill engine b1 m{length}", "prefill_ms", statistics.median(seconds[1:]) * 1e3, "ms")
            del rounds
            self._free()

    def long(self) -> None:
        """Measure rounds of long contexts with KV in the model's own format and in fp8."""
        sizes, model = self._sizes, self.model
        for name, dtype in (("", None), (" kv-fp8", torch.float8_e4m3fn)):
            if dtype is not None and model.device.type != "cuda":
                continue
            model.kv_dtype = dtype
            rounds = engine_rounds(model, sizes.long_rows, sizes.long_context, ((sizes.long_rows, sizes.long_rows),))
            rounds.prepare(sizes.long_rows, sizes.long_context, ROOM, computed=False)
            times = rounds.measure(sizes.long_rows, self._options.repeats)
            case = self._case(sizes.long_rows, sizes.long_rows, sizes.long_context) + name
            self._add(case, "round_gpu_ms", times.gpu, "ms")
            seconds = rounds.decode(self._options.repeats)
            self._add(case, "tokens_per_second", sizes.long_rows / seconds, "tokens/s")
            del rounds
            self._free()
            if model.device.type == "cuda":
                room = SHARE * torch.cuda.mem_get_info()[1] - torch.cuda.memory_allocated()
                fitting = room // (model.kv_bytes * sizes.long_context)
                self._add(f"ctx{sizes.long_context // 1024}k{name}", "requests_that_fit", fitting, "requests")
        model.kv_dtype = None

    @property
    def _name(self) -> str:
        return str(self._options.name)

    def _case(self, num_rows: int, num_tokens: int, context: int) -> str:
        drafter = "plain" if num_tokens == num_rows else "tree"
        return f"{drafter} engine b{num_rows} m{num_tokens} ctx{context / 1024:g}k"

    def _add(self, case: str, metric: str, value: float, unit: str) -> None:
        self.rows.append(Row(f"{self._name} {case} {self.label}", metric, value, unit))
        print(f"{self.rows[-1].case:64} {metric:22} {value:10.3f} {unit}", flush=True)

    def _free(self) -> None:
        gc.collect()
        self._synchronize()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def ratios(rows: list[Row], base: str, label: str) -> list[Row]:
    """Return how many times as fast rounds and decoding are as those of the model `base`."""
    found = {(row.case, row.metric): row.value for row in rows}
    made = []
    for (case, metric), value in found.items():
        if metric not in ("round_gpu_ms", "tokens_per_second", "gemm_ms", "prefill_ms") or label not in case.split():
            continue
        other = found.get((" ".join(base if word == label else word for word in case.split()), metric))
        if other:
            ratio = value / other if metric == "tokens_per_second" else other / value
            name = metric if metric == "tokens_per_second" else metric.removesuffix("_ms") + "_speed"
            made.append(Row(case, f"{name}_over_{base}", ratio, "ratio"))
    return made


def main() -> int:
    """Parse options, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, metavar="LABEL=FOLDER")
    parser.add_argument("--name", default="llama-8b", help="of the shape, in results")
    parser.add_argument("--long", nargs="*", default=[], help="labels of models that long contexts are measured with")
    parser.add_argument(
        "--own-products",
        nargs="*",
        default=[],
        help="labels of models that no library multiplies: those of --deterministic",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--small", action="store_true", help="few and small rounds: a look at whether it runs")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    rows: list[Row] = []
    failed: list[str] = []
    labels = []
    for text in options.model:
        label, _, folder = text.partition("=")
        labels.append(label)
        bench = None
        try:
            with torch.inference_mode():
                bench = FormatBench(label, Path(folder), options, SMALL if options.small else Sizes())
                bench.short()
                bench.prompts()
                if label in options.long:
                    bench.long()
        except Exception:
            traceback.print_exc()
            failed.append(label)
        if bench is not None:
            rows += bench.rows
        del bench
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        rows += ratios(rows, labels[0], label) if label != labels[0] else []
        if options.out:
            name = torch.cuda.get_device_name() if options.device.startswith("cuda") else cpu_name()
            write_report(options.out, "engine_quantized", name, rows, ("torch", "triton"))
    for row in rows:
        if row.unit == "ratio":
            print(f"{row.case:64} {row.metric:36} {row.value:8.3f}")
    for label in failed:
        print(f"FAILED {label}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
