"""Rounds of the CUDA engine against their floor: time by tokens, batch and context, and its parts.

    python -m benchmarks.engine --shape llama-8b --out benchmarks/results/engine_llama-8b.json
    python -m benchmarks.engine --model FOLDER ...      weights of a checkpoint, for instance one that was inflated

Drives CudaExecutor directly: no scheduler, no draft, no wire. Each round is repeated at the same place; contexts are
prefilled, and trees hold the model's own continuation. The floor is measured in the same run: the device's copy rate,
its dense matmul rate, and the bare products of the same number of tokens in one graph.
`benchmarks.results_page` draws the results.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from benchmarks.engine.cost import FittedCost, round_times
from benchmarks.engine.parts import BareProducts, EvenRound, RoundParts, linear_forward
from benchmarks.engine.rounds import GREEDY, MeasuredRounds, MeasuredTimes
from benchmarks.engine.timing import copy_rate, matmul_rate, median_ms
from benchmarks.split.draft_step import random_model
from outrider.attention.base import AttentionBackend
from outrider.cache.kv import KVCache
from outrider.models.decoder import CausalLM
from outrider.models.loader import load_model
from outrider.sampling.params import SamplingParams
from outrider_tools.bench.report import Row, cpu_name, write_report
from outrider_tools.inflate.shapes import parse_shape
from verify_service.engine.build import attention_backend
from verify_service.engine.scheduler import EngineLimits
from verify_service.executors.cuda import CudaExecutor
from verify_service.executors.round_buffers import Bucket

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
VOCAB_SIZE = 49152
DECODE_ROUNDS = 128
SAMPLINGS = {
    "greedy": GREEDY,
    "t0.8": SamplingParams(temperature=0.8, seed=1),
    "t0.8 top_p0.95": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
}


class Plan:
    """What to measure. `scale` divides contexts and batches, for a quick test run."""

    def __init__(self, scale: int) -> None:
        self.context = 1024 // scale
        self.tokens = [1, 2, 4, 8, 16, 32, 64]
        self.batches = [1, 2, 4, 8, 16, 32, 64] if scale == 1 else [1, 4]
        self.shared = [(4, 64), (16, 64), (32, 64)] if scale == 1 else [(4, 16)]
        self.contexts = [context // scale for context in (1024, 2048, 4096, 8192, 16384, 32768)]
        self.floor = [1, 8, 16, 32, 64]
        self.prefills = [512 // scale, 2048 // scale]
        if scale > 1:
            self.tokens, self.floor = [1, 4, 16], [1, 4, 16]

    def buckets(self, executor: CudaExecutor) -> list[Bucket]:
        """Return the shapes of all rounds, largest first, in the order of graph capture."""
        rounds = [(1, tokens) for tokens in self.tokens] + [(rows, rows) for rows in self.batches] + self.shared
        return sorted({executor.buckets.fit(tokens, rows) for rows, tokens in rounds}, reverse=True)

    @property
    def num_slots(self) -> int:
        """KV slots that the largest case needs, rounded up to pages."""
        rooms = [rows * (self.context + 256) for rows in [*self.batches, *(rows for rows, _ in self.shared)]]
        return max([*rooms, max(self.contexts) + 256, max(self.prefills) + 256])


class Benchmark:
    """Rows of one model, measured phase by phase. A phase that fails is reported, and the others go on."""

    def __init__(self, model: CausalLM, options: argparse.Namespace, plan: Plan) -> None:
        self.model, self.options, self.plan = model, options, plan
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self._gemm_ms: dict[int, float] = {}
        self._linear_ms: dict[int, float] = {}
        self._attend_ms: dict[EvenRound, float] = {}
        self._sampling_ms: dict[EvenRound, float] = {}
        self._matmul_rate = 0.0
        self._copy_rate = 0.0

    def phase(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` and print its duration; print the error if it fails."""
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                work()
        except Exception:
            self.failed.append(name)
            traceback.print_exc()
        print(f"[{name}: {time.perf_counter() - start:.1f} s]", flush=True)

    def add(self, case: str, metric: str, value: float, unit: str) -> None:
        """Add a figure. `case` goes between the shape's name and the dtype; the decoding comes after a bar."""
        middle, _, decoding = case.partition("|")
        words = [self.options.name, middle, SHORT[self.options.dtype], decoding, self._mode]
        self.rows.append(Row(" ".join(word for word in words if word), metric, value, unit))

    def _compile(self, runs: list[Callable[[], object]]) -> None:
        """Run each function once, in parallel, so that kernels are compiled on all cores."""
        if self.model.device.type != "cuda":
            return
        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(run) for run in runs]:
                # An error here comes again in the measurement, and is reported there.
                with suppress(Exception):
                    future.result()
        torch.cuda.synchronize()

    @property
    def _mode(self) -> str:
        return "deterministic" if self.options.deterministic else ""

    def floor(self) -> None:
        """Measure copy rate, matmul rate and bare products."""
        model, device = self.model, self.model.device
        self._copy_rate = copy_rate(device)
        self._matmul_rate = matmul_rate(device, model.dtype)
        self.add("device copy", "copy_tb_per_second", self._copy_rate / 1e12, "TB/s")
        self.add("dense matmul", "matmul_tflops", self._matmul_rate / 1e12, "TFLOP/s")
        products = BareProducts(model.config, model.dtype, device)
        self.add("weights", "weight_gib", products.num_bytes / 2**30, "GiB")
        self._compile([partial(products.warm, count) for count in self.plan.floor])
        for count in self.plan.floor:
            for maker, ms in products.measure(count).items():
                self.add(f"bare products {maker} m{count}", "gemm_ms", ms, "ms")
                self._gemm_ms[count] = min(ms, self._gemm_ms.get(count, ms))
            rate = products.num_bytes / self._gemm_ms[count] * 1e3
            self.add(f"bare products fastest m{count}", "weights_tb_per_second", rate / 1e12, "TB/s")

    def parts(self) -> None:
        """Measure products as the model calls them, attention and sampling, each alone."""
        forwards = {count: linear_forward(self.model, count) for count in self.plan.floor}
        self._compile(list(forwards.values()))
        for count, forward in forwards.items():
            self._linear_ms[count] = median_ms(forward, self.model.device)
            self.add(f"forward without attention m{count}", "linear_ms", self._linear_ms[count], "ms")
        context, many = self.plan.context, self.plan.shared[len(self.plan.shared) // 2]
        widest = self.plan.tokens[-2]
        shapes = [EvenRound(1, 1, context), EvenRound(1, widest, context), EvenRound(*many, context)]
        shapes += [EvenRound(1, widest, self.plan.contexts[index]) for index in (2, 4)]
        slots = max(shape.num_rows * (shape.context + 256) for shape in shapes)
        parts = RoundParts(self.model, self._attention(), slots, self.options.page_size)
        for shape in shapes:
            self._attention_rows(parts, shape)
        for shape in shapes[:3]:
            for decoding, params in SAMPLINGS.items():
                case = f"{self._case(shape.num_rows, shape.num_tokens, shape.context)}|{decoding}"
                microseconds = parts.sampling_us(shape, params)
                self.add(case, "sampling_us", microseconds, "us")
                if decoding == "greedy":
                    self._sampling_ms[shape] = microseconds / 1e3

    def _attention_rows(self, parts: RoundParts, shape: EvenRound) -> None:
        case = self._case(shape.num_rows, shape.num_tokens, shape.context)
        microseconds = parts.attention_us(shape)
        self.add(case, "attention_us_per_layer", microseconds, "us")
        self._attend_ms[shape] = parts.attend_ms(shape)
        self.add(case, "attend_ms", self._attend_ms[shape], "ms")
        if self._copy_rate:
            read = shape.num_rows * shape.context * self._kv_bytes() / self.model.config.num_layers
            self.add(case, "attention_over_kv_read", microseconds * 1e-6 * self._copy_rate / read, "ratio")

    def rounds(self) -> None:
        """Measure whole rounds by tokens, batch and context, plain decoding and prefill."""
        plan, options = self.plan, self.options
        num_pages = -(-plan.num_slots // options.page_size)
        limits = EngineLimits(
            vocab_size=self.model.config.vocab_size,
            context_length=max(plan.contexts) + 256,
            # Rounds of one shape need room for a row with the largest tree in addition to all other rows.
            max_round_tokens=max(plan.tokens) * (2 if options.deterministic else 1),
            max_running=max(plan.batches),
            chunk_size=min(2048, max(plan.prefills)),
            root_apart=True,
            deterministic=options.deterministic,
        )
        use_graphs = not options.disable_cuda_graph
        executor = CudaExecutor(
            self.model, num_pages, options.page_size, limits, self._attention(), use_graphs=use_graphs
        )
        if self.model.device.type == "cuda" and use_graphs:
            executor.graphs.capture(plan.buckets(executor), together=True)
            self.add(f"{len(executor.graphs)} graphs", "capture_seconds", executor.graphs.seconds, "s")
            self.add(f"{len(executor.graphs)} graphs", "capture_mib", executor.graphs.num_bytes / 2**20, "MiB")
        rounds = MeasuredRounds(executor, self.model.config.vocab_size, num_pages, limits.chunk_size)
        self._prefill(rounds)
        self._by_tokens(rounds)
        self._by_batch(rounds)
        self._by_context(rounds)
        self._cost_model()

    def _cost_model(self) -> None:
        model = FittedCost.fit(round_times(self.rows, "round_gpu_ms").items())
        for name, value in zip(FittedCost.NAMES, model.coefficients, strict=True):
            self.add("cost of a round", name, float(value), "ms")
        self.add("cost of a round", "largest_error", model.worst, "ratio")
        if model.coefficients[3]:
            rate = 1024 * self._kv_bytes() / model.coefficients[3] * 1e3
            self.add("cost of a round", "kv_tb_per_second", rate / 1e12, "TB/s")

    def _prefill(self, rounds: MeasuredRounds) -> None:
        rounds.prepare(1, max(self.plan.prefills), 16)
        for count in self.plan.prefills:
            seconds = rounds.prefill_seconds(count)
            case = f"prefill engine b1 m{count}"
            self.add(case, "prefill_ms", seconds * 1e3, "ms")
            self.add(case, "tokens_per_second", count / seconds, "tokens/s")
            if self._matmul_rate:
                rate = self._prefill_operations(count) / seconds
                self.add(case, "prefill_over_matmul", rate / self._matmul_rate, "ratio")

    def _by_tokens(self, rounds: MeasuredRounds) -> None:
        context = self.plan.context
        for decoding, params in SAMPLINGS.items():
            rounds.prepare(1, context, 256, params)
            for count in self.plan.tokens if decoding == "greedy" else self.plan.tokens[-2:-1]:
                self._round_rows(1, count, context, decoding, rounds.measure(count))
        rounds.prepare(1, context, 256)
        seconds = rounds.decode(DECODE_ROUNDS)
        self.add(f"{self._case(1, 1, context)}|greedy", "tokens_per_second", 1 / seconds, "tokens/s")

    def _by_batch(self, rounds: MeasuredRounds) -> None:
        context = self.plan.context
        for num_rows in self.plan.batches[1:]:
            rounds.prepare(num_rows, context, 128)
            self._round_rows(num_rows, num_rows, context, "greedy", rounds.measure(num_rows))
            for tokens in [tokens for rows, tokens in self.plan.shared if rows == num_rows]:
                self._round_rows(num_rows, tokens, context, "greedy", rounds.measure(tokens))
            seconds = rounds.decode(32)
            case = f"{self._case(num_rows, num_rows, context)}|greedy"
            self.add(case, "tokens_per_second", num_rows / seconds, "tokens/s")

    def _by_context(self, rounds: MeasuredRounds) -> None:
        rounds.prepare(1, max(self.plan.contexts), 128)
        for context in reversed(self.plan.contexts):
            rounds.cut(context)
            for count in (self.plan.tokens[0], self.plan.tokens[-2]):
                if context != self.plan.context:
                    self._round_rows(1, count, context, "greedy", rounds.measure(count))

    def _round_rows(self, num_rows: int, num_tokens: int, context: int, decoding: str, times: MeasuredTimes) -> None:
        case = f"{self._case(num_rows, num_tokens, context)}|{decoding}"
        self.add(case, "round_gpu_ms", times.gpu, "ms")
        self.add(case, "round_ms", times.wall, "ms")
        self.add(case, "host_gap_ms", times.gap, "ms")
        self.add(case, "launch_ms", times.launch, "ms")
        self.add(case, "accept_length", times.accepted, "tokens")
        floor = next((ms for count, ms in self._gemm_ms.items() if count >= num_tokens), None)
        if floor is not None:
            self.add(case, "round_gpu_over_gemm", times.gpu / floor, "ratio")
        shape = EvenRound(num_rows, num_tokens, context)
        known = (self._linear_ms.get(num_tokens), self._attend_ms.get(shape), self._sampling_ms.get(shape))
        if decoding == "greedy" and None not in known:
            self.add(case, "rest_ms", times.gpu - sum(ms or 0.0 for ms in known), "ms")

    def _case(self, num_rows: int, num_tokens: int, context: int) -> str:
        drafter = "plain" if num_tokens == num_rows else "tree"
        return f"{drafter} engine b{num_rows} m{num_tokens} ctx{context / 1024:g}k"

    def _attention(self) -> AttentionBackend:
        options = self.options
        return attention_backend(options.attention_backend, self.model, options.page_size)

    def _kv_bytes(self) -> int:
        config = self.model.config
        return KVCache.bytes_per_slot(config.num_layers, config.num_kv_heads, config.head_dim, self.model.dtype)

    def _prefill_operations(self, count: int) -> int:
        """Return the number of operations in the layers' products and in causal attention."""
        config = self.model.config
        heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
        weights = config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)
        attention = config.num_layers * config.num_heads * config.head_dim * count * count
        return 2 * weights * count + 2 * attention


def print_table(rows: list[Row]) -> None:
    """Print the figures that have targets, rounds last."""
    metrics = ["gemm_ms", "linear_ms", "attention_us_per_layer", "attention_over_kv_read", "attend_ms", "sampling_us"]
    metrics.append("rest_ms")
    units = ("TB/s", "TFLOP/s", "s", "MiB", "tokens/s")
    for row in rows:
        if row.metric in metrics or row.unit in units or row.case.split()[1] in ("prefill", "cost"):
            print(f"{row.case:60} {row.metric:24} {row.value:9.3f} {row.unit}")
    cases: dict[str, dict[str, float]] = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.metric] = row.value
    print(f"{'case':60}{'gpu ms':>8}{'wall ms':>9}{'gap ms':>8}{'launch':>8}{'x gemm':>8}{'accept':>8}")
    for case, found in cases.items():
        if "round_gpu_ms" in found:
            columns = ("round_gpu_ms", "round_ms", "host_gap_ms", "launch_ms", "round_gpu_over_gemm", "accept_length")
            print(f"{case:60}" + "".join(f"{found.get(name, float('nan')):8.3f}" for name in columns))


def main() -> int:
    """Parse options, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--shape", help="random weights of a shape, as for `outrider inflate`")
    source.add_argument("--model", type=Path, help="a model folder")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="with --shape")
    parser.add_argument("--dtype", choices=sorted(SHORT), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument(
        "--attention-backend", choices=["triton", "flashinfer", "mixed"], default="triton", help="of rounds and prefill"
    )
    parser.add_argument("--deterministic", action="store_true", help="rounds as --deterministic runs them")
    parser.add_argument("--disable-cuda-graph", action="store_true", help="rounds kernel by kernel")
    parser.add_argument(
        "--phases", nargs="+", default=["floor", "parts", "rounds"], choices=["floor", "parts", "rounds"]
    )
    parser.add_argument("--scale", type=int, default=1, help="divide contexts, batches and prompts: a smoke test")
    parser.add_argument("--name", help="of the shape, in the rows; by default as given")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    options.name = options.name or (options.shape or options.model.name).split(",")[0]
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    start = time.perf_counter()
    if options.shape:
        model = random_model(parse_shape(options.shape), options.vocab_size, dtype, device)
    else:
        model = load_model(options.model, dtype, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    benchmark = Benchmark(model, options, Plan(options.scale))
    benchmark.add("load" if options.model else "random weights", "load_seconds", time.perf_counter() - start, "s")
    for phase in options.phases:
        benchmark.phase(phase, getattr(benchmark, phase))
    print_table(benchmark.rows)
    if options.out:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
        write_report(options.out, "engine", name, benchmark.rows, ("torch", "triton", "numpy"))
    if benchmark.failed:
        print(f"FAILED: {', '.join(benchmark.failed)}")
    return 1 if benchmark.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
