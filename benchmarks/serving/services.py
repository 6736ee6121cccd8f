"""The main case on one machine: gateway, verify and draft as processes, against plain decoding and transformers.

python -m benchmarks.serving.services --out benchmarks/results/services_cpu.json

For every prompt, one after the other: transformers.generate, our plain decoding (speculation off) and our speculative
decoding; the last two go through the gateway's gRPC door, in alternating order. Greedy, the end of sequence obeyed, the
radix cache off, so that no run benefits from another one's prefill. Each prompt is drafted for once, so the n-gram
drafter never sees a prompt's own answer. Times run from the request to the last token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from outrider.cli.client import Sampling, encode
from outrider.cli.cluster import Cluster
from outrider.config.verify import VerifyOptions
from outrider.models.store import DEFAULT_MODEL, resolve_model
from outrider.rpc.channel import open_channel
from outrider.v1 import gateway_pb2, gateway_pb2_grpc
from outrider_tools.bench.report import Row, cpu_name, write_report

PROMPTS = Path(__file__).resolve().parents[1] / "prompts" / "cpu.jsonl"
SHORT = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Run:
    """One answer."""

    tokens: int
    seconds: float
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


def request(prompt: str, max_tokens: int, speculate: bool) -> gateway_pb2.GatewayServiceGenerateRequest:
    """Return a greedy request with one user turn."""
    return encode(Sampling(temperature=0.0, max_tokens=max_tokens, speculation=speculate), [("user", prompt)])


async def ours(stub: Any, prompt: str, max_tokens: int, speculate: bool) -> Run:
    """Get one answer from the gateway."""
    start, usage = time.perf_counter(), None
    async for response in stub.Generate(request(prompt, max_tokens, speculate)):
        usage = response.usage if response.HasField("usage") else usage
    seconds = time.perf_counter() - start
    if usage is None:
        raise RuntimeError("the stream ended without usage")
    return Run(usage.completion_tokens, seconds, usage.num_rounds, usage.num_draft_tokens, usage.num_accepted_tokens)


class Worker:
    """An engine of other_worker.py in its own process, with OpenMP's default settings."""

    @classmethod
    def transformers(cls, dtype: str) -> Self:
        """Return a worker for transformers.generate with the default model."""
        return cls("transformers", str(resolve_model(DEFAULT_MODEL)), dtype)

    def __init__(self, engine: str, *arguments: str) -> None:
        command = [sys.executable, str(Path(__file__).parent / "other_worker.py"), engine, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def generate(self, prompt: str, max_tokens: int) -> Run:
        """Get one answer."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the worker has no pipes")
        self._process.stdin.write(json.dumps({"prompt": prompt, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        return Run(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


async def measure(
    cluster: Cluster, prompts: list[dict[str, str]], max_tokens: int, dtype: str
) -> dict[str, list[tuple[str, Run, Run, Run]]]:
    """Return for each kind of prompt its name and the runs of transformers, plain and speculative decoding."""
    reference = Worker.transformers(dtype)
    channel = open_channel(cluster.gateway_address)
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    warm = "Say hello to everyone in the room."
    reference.generate(warm, 16)
    for speculate in (False, True):
        await ours(stub, warm, 16, speculate)
    kinds: dict[str, list[tuple[str, Run, Run, Run]]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        baseline = reference.generate(prompt["prompt"], max_tokens)
        runs = {}
        for speculate in (index % 2 == 0, index % 2 == 1):
            runs[speculate] = await ours(stub, prompt["prompt"], max_tokens, speculate)
        kinds[prompt["kind"]].append((prompt["name"], baseline, runs[False], runs[True]))
        print_line(f"{prompt['kind']}/{prompt['name']}", baseline, runs[False], runs[True])
    await channel.close()
    reference.close()
    return kinds


def rate(runs: list[Run]) -> float:
    """Return the tokens per second over all of `runs`."""
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def print_line(name: str, baseline: Run, plain: Run, drafted: Run) -> None:
    """Print one line of the table."""
    accept = drafted.tokens / max(drafted.rounds, 1)
    print(
        f"{name:24} transformers {rate([baseline]):6.1f}  plain {rate([plain]):6.1f}  ngram {rate([drafted]):6.1f} "
        f"tokens/s  {rate([drafted]) / rate([plain]):5.2f}x  accept length {accept:4.2f}",
        flush=True,
    )


def rows_of(kind: str, runs: list[tuple[str, Run, Run, Run]], dtype: str) -> list[Row]:
    """Return result rows of one kind of prompt, and of each prompt's speed-up."""
    baseline, plain, drafted = ([run[place] for run in runs] for place in (1, 2, 3))
    case = f"smollm2-135m {{}} split b1 {SHORT[dtype]} greedy {kind}"
    per_prompt = {name: rate([fast]) / rate([slow]) for name, _, slow, fast in runs}
    rounds = sum(run.rounds for run in drafted)
    return [
        Row(case.format("transformers").replace(" split", ""), "tokens_per_second", rate(baseline), "tokens/s"),
        Row(case.format("plain"), "tokens_per_second", rate(plain), "tokens/s"),
        Row(case.format("plain"), "speedup_over_transformers", rate(plain) / rate(baseline), "ratio"),
        Row(case.format("ngram"), "tokens_per_second", rate(drafted), "tokens/s"),
        Row(case.format("ngram"), "speedup_over_plain", rate(drafted) / rate(plain), "ratio"),
        Row(case.format("ngram"), "speedup_over_plain_lowest_prompt", min(per_prompt.values()), "ratio"),
        Row(case.format("ngram"), "speedup_over_plain_median_prompt", statistics.median(per_prompt.values()), "ratio"),
        Row(case.format("ngram"), "speedup_over_transformers", rate(drafted) / rate(baseline), "ratio"),
        Row(case.format("ngram"), "accept_length", sum(run.tokens for run in drafted) / rounds, "tokens"),
        Row(case.format("ngram"), "draft_tokens_per_round", sum(run.drafted for run in drafted) / rounds, "tokens"),
    ]


def memory_rows(cluster: Cluster) -> list[Row]:
    """Return peak resident memory and processor time of each service and of its engine process."""
    rows = []
    for name in cluster.services:
        process = psutil.Process(cluster.children[name].pid)
        parts = [(f"{name} service", process), *((f"{name} engine", child) for child in process.children())]
        for label, part in parts:
            status = Path(f"/proc/{part.pid}/status").read_text()
            peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
            rows.append(Row(label, "peak_memory_mib", peak / 1024, "MiB"))
            rows.append(Row(label, "cpu_seconds", sum(part.cpu_times()[:2]), "s"))
    return rows


async def main() -> None:
    """Run all prompts and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--kind", help="only prompts of this kind")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    arguments = parser.parse_args()
    prompts = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    prompts = [prompt for prompt in prompts if arguments.kind in (None, prompt["kind"])]
    with Cluster(verify=VerifyOptions(dtype=arguments.dtype, disable_radix_cache=True)) as cluster:
        dtype = cluster.verify.ready_info["dtype"]
        kinds = await measure(cluster, prompts, arguments.max_tokens, dtype)
        memory = memory_rows(cluster)
    copying = [run for kind, runs in kinds.items() if kind != "creative" for run in runs]
    groups = {**kinds, "copying": copying} if copying else dict(kinds)
    rows = [row for kind, runs in groups.items() for row in rows_of(kind, runs, dtype)] + memory
    for row in rows:
        print(f"{row.case:60} {row.metric:34} {row.value:8.2f} {row.unit}")
    if arguments.out:
        write_report(arguments.out, "services", cpu_name(), rows, ("torch", "transformers", "grpcio"))


if __name__ == "__main__":
    asyncio.run(main())
