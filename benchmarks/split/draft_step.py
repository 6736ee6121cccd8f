"""Cost of a draft step in a burst, by its nodes, requests and context; memory; the host's time for a launch.

A step is everything between two choices among the candidates: the choice of nodes, the forward, the proposals. Its time
is that of a burst of many steps less that of a burst of one step, over the number of steps between. All nodes are real.

python -m benchmarks.split.draft_step --standalone MODEL --random-eagle3 --out benchmarks/results/draft_step.json
python -m benchmarks.split.draft_step --random-standalone --random-eagle3 --rows 1 --nodes 32 --contexts 256 1024
python -m benchmarks.split.draft_step --device cpu --standalone MODEL --nodes 8 --contexts 256 --rows 1
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.split.bursts import RowState, row_states, seeds_of
from outrider.attention.torch_backend import TorchAttention
from outrider.attention.triton_backend import TritonAttention
from outrider.config.draft import DraftOptions
from outrider.drafting.model import runner as burst_runner
from outrider.drafting.model.burst import FORCED, Burst, BurstShape
from outrider.drafting.model.cuda_runner import CudaRunner
from outrider.drafting.model.runner import BurstRunner, RunnerOptions
from outrider.drafting.model.torch_runner import TorchRunner
from outrider.layers.linear import Linear
from outrider.models.config import ModelConfig
from outrider.models.decoder import CausalLM
from outrider.models.drafters.base import DraftHead, DraftModel
from outrider.models.drafters.config import eagle3_config
from outrider.models.drafters.heads import Eagle3Head, StandaloneDraft
from outrider.models.drafters.loader import load_draft_model
from outrider.sampling.params import SamplingParams
from outrider_tools.bench.report import Row, cpu_name, write_report
from outrider_tools.inflate.shapes import Shape

SMALL = Shape(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536)
"""Shape of SmolLM2-135M, whose embedding is its output matrix, too."""
SMALL_VOCAB = 49152


@torch.inference_mode()
def fill_random(model: CausalLM | DraftHead) -> None:
    """Give a new model random weights, and ones for norms."""
    for tensor in model.checkpoint_tensors().values():
        tensor.fill_(1.0) if tensor.ndim == 1 else tensor.normal_(0.0, 0.02)
    model.finish_loading()


@torch.inference_mode()
def random_model(
    sizes: Shape, vocab_size: int, dtype: torch.dtype, device: torch.device, tied: bool = False
) -> CausalLM:
    """Return a random Llama of that shape. If `tied`, its embedding is the output matrix, too."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        **sizes.config_fields(),
        "max_position_embeddings": 1 << 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
    }
    model = CausalLM(ModelConfig.from_fields(fields, {}), dtype, device)
    fill_random(model)
    return model


SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# The shape of the public heads for Llama-3.1-8B.
HEAD_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
PAGE_SIZE = 16
_MAX_STEPS = 8


@dataclass(frozen=True)
class DraftStepCase:
    """Steps of `nodes` nodes, spread evenly over `rows` requests of `context` tokens."""

    rows: int
    nodes: int
    context: int


def some_ids(count: int, device: torch.device) -> Tensor:
    """Return every fourth token: the vocabulary of a random head."""
    return torch.arange(0, 4 * count, 4, dtype=torch.int32, device=device)


def random_eagle3(sizes: dict[str, Any], device: torch.device) -> Eagle3Head:
    """Return an EAGLE-3 head of random weights."""
    config = eagle3_config({**HEAD_8B, **sizes}, {"fc.weight"}, 32)
    head = Eagle3Head(config, torch.bfloat16, device, some_ids(config.draft_vocab_size, device))
    fill_random(head)
    return head


def start_runner(model: DraftModel, shape: BurstShape, options: RunnerOptions) -> BurstRunner:
    """Return a runner on the model's device, with its graphs captured."""
    if model.device.type != "cuda":
        return TorchRunner(model, shape, TorchAttention(), options)
    runner = CudaRunner(model, shape, TritonAttention(), options)
    runner.capture()
    return runner


def models(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, DraftModel]]:
    """Yield the requested models, one after the other, with their names in reports."""
    for name, path in (("standalone", options.standalone), ("eagle3", options.eagle3)):
        if path:
            draft_options = DraftOptions(
                speculative_algorithm=(name.upper(),),
                speculative_draft_model_path=str(path),
                target_model_path=options.target,
                dtype=options.dtype,
                device=str(device),
            )
            yield f"{Path(path).name.lower()} {name}", load_draft_model(draft_options)
    if options.random_standalone:
        model = random_model(SMALL, SMALL_VOCAB, torch.bfloat16, device, tied=True)
        yield "135m standalone", StandaloneDraft(model, token_ids_hash="")
    if options.random_eagle3:
        yield "llama-8b eagle3", random_eagle3({}, device)


def make_runner(model: DraftModel, cases: list[DraftStepCase], branching: int) -> BurstRunner:
    """Return a runner with room for every case."""
    rows, context = max(case.rows for case in cases), max(case.context for case in cases)
    width = max(case.nodes for case in cases)
    shape = BurstShape(
        num_rows=rows,
        region=256,
        branching=branching,
        max_seeds=512,
        max_steps=_MAX_STEPS,
        max_width=width,
        page_size=PAGE_SIZE,
        num_pages=rows * -(-context // PAGE_SIZE),
        max_context=context,
        feature_size=model.feature_size,
    )
    return start_runner(model, shape, RunnerOptions(chunk_size=512))


class DraftStepBench:
    """A case's requests in a runner. Their roots have been run, and there are more nodes to run than time for them."""

    def __init__(self, runner: BurstRunner, case: DraftStepCase, temperature: float) -> None:
        self._runner, self._case = runner, case
        self._on_gpu = runner.memory.kv.k.is_cuda
        self._room = case.rows * (runner.shape.region - 1)
        pages = -(-case.context // PAGE_SIZE)
        for row in range(case.rows):
            runner.open(row, SamplingParams(temperature=temperature, seed=row))
            runner.set_pages(row, range(row * pages, (row + 1) * pages))
        self._run(self._burst(1, [-1] * case.rows, [0] * case.rows, float(FORCED)))
        self.steps = max(min(_MAX_STEPS, runner.shape.max_seeds // case.nodes, self._room // case.nodes), 2)

    def measure(self, repeats: int) -> tuple[float, float]:
        """Return the milliseconds of a step, and the host's milliseconds to launch the longest burst."""
        short, long = ([self._time(steps) for _ in range(repeats)] for steps in (1, self.steps))
        step_ms = (_median(long, 0) - _median(short, 0)) / (self.steps - 1)
        return step_ms, _median(long, 1)

    def _time(self, num_steps: int) -> tuple[float, float]:
        count = num_steps * self._case.nodes
        return self._run(self._burst(num_steps, [0] * count, [-1] * count, -1.0))

    def _burst(self, num_steps: int, parents: list[int], slots: list[int], score: float) -> Burst:
        """Return a burst with seeds for all rows in turn. Candidates score below seeds, so that only seeds are run."""
        count, case = len(parents), self._case
        live = np.zeros(self._runner.shape.region, np.bool_)
        live[0] = score <= 0
        free = range(1, min(1 + -(-num_steps * case.nodes // case.rows), self._runner.shape.region))
        ints = np.arange(count, dtype=np.int32)
        position = case.context + self._runner.shape.lag + (score <= 0)
        seeds = seeds_of(
            rows=ints % case.rows,
            parents=np.array(parents, np.int32),
            tokens=ints * 7 % 1000,
            positions=np.full(count, position, np.int32),
            scores=np.full(count, score, np.float32),
            slots=np.array(slots, np.int32),
            features=np.full(count, -1, np.int32),
        )
        rows = row_states([RowState(row, case.context, live, free) for row in range(case.rows)], len(live))
        return Burst(rows, seeds, num_steps, case.nodes, -1e9)

    def _run(self, burst: Burst) -> tuple[float, float]:
        """Return the milliseconds of the burst and of its launch. Raises RuntimeError if a step was not full."""
        begin = time.perf_counter()
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            pending = self._runner.launch(burst)
            end.record()
        else:
            pending = self._runner.launch(burst)
        host = (time.perf_counter() - begin) * 1e3
        result = pending.wait()
        whole = (time.perf_counter() - begin) * 1e3
        wanted = min(len(burst.seeds.rows), burst.num_steps * self._case.nodes, self._room)
        if (result.picked >= 0).sum() < wanted:
            raise RuntimeError(f"{(result.picked >= 0).sum()} nodes were run instead of {wanted}")
        return (start.elapsed_time(end) if self._on_gpu else whole), host


def _median(times: list[tuple[float, float]], which: int) -> float:
    return statistics.median(taken[which] for taken in times)


def measure(name: str, model: DraftModel, cases: list[DraftStepCase], options: argparse.Namespace) -> list[Row]:
    """Return all rows of a model."""
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    runner = make_runner(model, cases, options.branching)
    decoding = f"t{options.temperature:g}" if options.temperature else "greedy"
    rows = []
    for case in cases:
        bench = DraftStepBench(runner, case, options.temperature)
        step_ms, host_ms = bench.measure(options.repeats)
        line = f"{name} split b{case.rows} m{case.nodes} ctx{case.context / 1024:g}k {SHORT[model.dtype]} {decoding}"
        print(f"{line:66s}{step_ms:8.3f} ms a step{host_ms:8.3f} ms to launch {bench.steps} steps", flush=True)
        rows.append(Row(line, "draft_step_ms", step_ms, "ms"))
        if on_gpu:
            rows.append(Row(line, "draft_launch_host_ms", host_ms, "ms"))
        for row in range(case.rows):
            runner.close(row)
    if on_gpu:
        peak = torch.cuda.max_memory_allocated() / 2**20
        print(f"{name}: {peak:.0f} MiB at most", flush=True)
        rows.append(Row(f"{name} split {SHORT[model.dtype]}", "peak_memory_mib", peak, "MiB"))
    return rows


def main() -> None:
    """Parse options, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--standalone", default="", help="a small language model: folder or name")
    parser.add_argument("--random-standalone", action="store_true", help="a random model of SmolLM2-135M's shape")
    parser.add_argument("--eagle3", default="", help="folder of an EAGLE-3 head")
    parser.add_argument("--target", default="", help="folder of the head's target")
    parser.add_argument("--random-eagle3", action="store_true", help="a random head of an 8B model's shape")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 32, 64])
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--branching", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--long", action="store_true", help="all contexts as those that are not short")
    parser.add_argument("--launch-by-launch", action="store_true", help="layers of small models as those of large ones")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.launch_by_launch:
        Linear.uses_row_kernel = lambda *_, **__: False  # type: ignore[method-assign]
    if options.long:
        burst_runner.short_context = lambda _: 0
    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    device = torch.device("cuda" if on_gpu else "cpu")
    grid = [
        DraftStepCase(rows, nodes, length)
        for rows in options.rows
        for nodes in options.nodes
        for length in options.contexts
    ]
    cases = [case for case in grid if case.nodes >= case.rows]
    rows = []
    for name, model in models(options, device):
        rows += measure(name, model, cases, options)
    if options.out:
        where = torch.cuda.get_device_name() if on_gpu else f"{cpu_name()}, {options.threads} threads"
        write_report(options.out, "draft_step", where, rows, ("torch", "triton") if on_gpu else ("torch",))


if __name__ == "__main__":
    main()
