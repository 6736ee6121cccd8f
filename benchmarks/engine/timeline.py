"""A round with drafting inside it, kernel by kernel: time of verification, extension, steps, choice, and idle time.

    python -m benchmarks.engine.timeline --model /models/llama-8b --speculative-algorithm EAGLE3 \
        --speculative-draft-model-path /models/eagle3-8b --prompts mt_bench.jsonl --batches 1 16 --out FILE.json

Drives verify's executor and growth policy without scheduler and doors, on real prompts, and reads the device's own
record of its kernels (CUPTI through torch.profiler). Options that are not listed here are verify's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import PROMPTS, device_name
from benchmarks.split.load import chat_prompts
from outrider.config.base import parse_options
from outrider.config.verify import VerifyOptions
from outrider.protocol.generation import GenerationRequest
from outrider.sampling.params import SamplingParams
from outrider_tools.bench.report import Row, write_report
from verify_service.engine.build import EngineParts, build
from verify_service.engine.loading import load, load_draft
from verify_service.engine.request import Request
from verify_service.engine.round import Entry
from verify_service.executors.cuda import CudaExecutor

PHASES = ("verify", "extension", "step", "choice")
"""The graphs of a round in launch order. There are several steps, or none."""
_LAUNCH = "cudaGraphLaunch"


@dataclass(frozen=True)
class Span:
    """Times of one graph on the device, in microseconds."""

    phase: str
    begin: float
    end: float
    busy: float
    """Time during which at least one kernel or copy ran."""
    num_kernels: int


def spans_of(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Return the graphs' spans in launch order, from a trace in Chrome's format.

    A round begins with its graph of the most kernels. After it come an extension, then steps; the last graph is the
    choice.
    """
    launches: dict[int, float] = {}
    kernels: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        number = event.get("args", {}).get("correlation")
        if event.get("name") == _LAUNCH:
            launches[number] = event["ts"]
        elif event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels[number].append((event["ts"], event["ts"] + event["dur"]))
    graphs = [sorted(kernels[number]) for number in sorted(launches, key=launches.__getitem__) if kernels[number]]
    if not graphs:
        return []
    most = max(map(len, graphs))
    starts = [place for place, graph in enumerate(graphs) if 2 * len(graph) > most]
    spans = []
    for start, end in zip(starts, [*starts[1:], len(graphs)], strict=True):
        num_steps = max(end - start - 3, 0)
        phases = ("verify", "extension", *["step"] * num_steps, "choice")
        spans += [_span(phase, graph) for phase, graph in zip(phases, graphs[start:end], strict=False)]
    return spans


def _span(phase: str, kernels: Sequence[tuple[float, float]]) -> Span:
    busy, until = 0.0, float("-inf")
    for begin, end in kernels:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return Span(phase, kernels[0][0], until, busy, len(kernels))


def figures(spans: Sequence[Span]) -> dict[str, float]:
    """Return the mean microseconds of whole rounds: of each phase, of its gaps, and between graphs."""
    starts = [place for place, span in enumerate(spans) if span.phase == "verify"]
    rounds = [spans[start:end] for start, end in pairwise(starts)]
    ends = [spans[end].begin for end in starts[1:]]
    found: dict[str, list[float]] = defaultdict(list)
    for graphs, end in zip(rounds, ends, strict=True):
        found["round_us"].append(end - graphs[0].begin)
        found["steps"].append(sum(span.phase == "step" for span in graphs))
        for phase in PHASES:
            of_phase = [span for span in graphs if span.phase == phase]
            found[f"{phase}_us"].append(sum(span.end - span.begin for span in of_phase))
            found[f"{phase}_idle_us"].append(sum(span.end - span.begin - span.busy for span in of_phase))
            found[f"{phase}_kernels"].append(sum(span.num_kernels for span in of_phase))
        nexts = [*(span.begin for span in graphs[1:]), end]
        gaps = [begin - span.end for span, begin in zip(graphs, nexts, strict=True)]
        found["between_graphs_us"].append(sum(gaps[:-1]))
        found["between_rounds_us"].append(gaps[-1])
    return {name: statistics.mean(values) for name, values in found.items()}


class ProfiledRounds:
    """Requests that decode with drafting inside their rounds, without an engine."""

    def __init__(self, parts: EngineParts, prompts: Sequence[list[int]]) -> None:
        if not isinstance(parts.executor, CudaExecutor) or parts.growth is None:
            raise SystemExit("timeline: needs a GPU, and a draft model inside the rounds")
        self._executor, self._growth, self._memory = parts.executor, parts.growth, parts.memory
        vocab_size = parts.limits.vocab_size
        self.requests = []
        self.num_committed = 0
        for prompt in prompts:
            asked = GenerationRequest("profile", prompt, SamplingParams(temperature=0.0), max_tokens=1 << 12)
            request = Request.begin(asked, lambda update: None, vocab_size)
            self._memory.reserve(request, len(prompt) + 1)
            self._executor.launch([Entry(request, len(prompt) - 1)]).wait()
            request.cached_len = len(prompt) - 1
            self.requests.append(request)

    def run(self, num_rounds: int) -> None:
        """Run rounds over all requests."""
        for _ in range(num_rounds):
            entries = [Entry(request, 1) for request in self.requests]
            for request in self.requests:
                self._memory.reserve(request, request.cached_len + 1)
            taken = self._growth.take(entries)
            pending = self._executor.launch(entries, self._growth.plan(entries))
            results = pending.wait()
            for entry, result in zip(entries, results, strict=True):
                entry.request.cached_len += len(result.token_ids)
                entry.request.tokens.extend(result.token_ids)
                self.num_committed += len(result.token_ids)
            if taken is not None:
                self._growth.learn(taken, entries, results, pending.drafting_seconds)

    def end(self) -> None:
        """Free rows and pages."""
        for request in self.requests:
            self._executor.forget(request)
            self._memory.release(request)


def record(rounds: ProfiledRounds, num_rounds: int) -> list[Span]:
    """Run rounds under the profiler. Return their spans."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        rounds.run(num_rounds)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return spans_of(json.loads(path.read_text("utf-8"))["traceEvents"])


def main() -> int:
    """Parse options, profile and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSONL, with "turns" or "prompt"')
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--warm-rounds", type=int, default=80, help="before the profile, for the policy to settle")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--label", default="llama-8b", help="the model's name in results")
    parser.add_argument("--out", type=Path)
    arguments, others = parser.parse_known_args()
    options = parse_options(VerifyOptions, others)
    path, model = load(options)
    draft = load_draft(options, path, model)
    if draft is None:
        raise SystemExit("timeline: name a draft model with --speculative-algorithm and --speculative-draft-model-path")
    parts = build(options, path, model, draft)
    prompts = chat_prompts(path, arguments.prompts)
    rows = []
    with torch.inference_mode():
        for batch in arguments.batches:
            rounds = ProfiledRounds(parts, [prompts[index % len(prompts)] for index in range(batch)])
            rounds.run(arguments.warm_rounds)
            before = rounds.num_committed
            found = figures(record(rounds, arguments.rounds))
            found["accept_length"] = (rounds.num_committed - before) / arguments.rounds / batch
            rounds.end()
            case = f"{arguments.label} {draft.options.name} colocated b{batch} bf16 greedy"
            print(case, {name: round(value, 1) for name, value in found.items()}, flush=True)
            rows += [Row(case, name, value, "us" if name.endswith("_us") else "") for name, value in found.items()]
    if arguments.out:
        write_report(arguments.out, "timeline", device_name(), rows, ("torch", "triton"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
