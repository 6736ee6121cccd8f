"""Many streams at once for minutes: no errors, flat memory, and the latencies that clients see.

python -m benchmarks.serving.load --minutes 10 --verify-option=--max-total-tokens=16384 \
    --draft-option=--max-total-tokens=16384 --out benchmarks/results/load_cpu.json

A KV cache touches its memory page by page, and the radix cache uses all of it in time: memory is flat once the cache is
full, which takes an hour at the default size. So the load runs with small caches.

Starts all three services and keeps `--streams` requests running over the gRPC door (`--backend openai-chat`: REST).
Prompts and answers have random lengths. The memory of each service and of the load generator is read every second. It
is flat if the line that best fits the second half rises there by no more than `--allow-mib` and 5 %. Exit code 1 for an
error or memory that is not flat.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.common import add_service_arguments, cost_of, device_name, make_cluster
from outrider.cli.cluster import Cluster
from outrider.metrics import MetricsPage
from outrider_tools.bench.clients import Client, GrpcClient, RequestOptions, RestClient, run_point
from outrider_tools.bench.report import Row, write_report
from outrider_tools.bench.requests import LoadPoint, LoadRun, Prompt, errors_of, read_prompts, rows_of

WARM_SECONDS = 15.0
"""Seconds before memory counts: caches fill, threads start."""


class ServiceMemory:
    """Memory of each service over time, in MiB."""

    def __init__(self, cluster: Cluster) -> None:
        self._pids = {name: child.pid for name, child in cluster.children.items()} | {"load": os.getpid()}
        self.samples: list[tuple[float, dict[str, float]]] = []

    async def watch(self) -> None:
        """Sample until cancelled."""
        begin = time.monotonic()
        while True:
            # The load generator is the parent of the services, so it is counted without its children.
            found = {name: cost_of(pid).resident_mib for name, pid in self._pids.items() if name != "load"}
            with open("/proc/self/statm", encoding="ascii") as file:
                found["load"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            self.samples.append((time.monotonic() - begin, found))
            await asyncio.sleep(1.0)

    def rise(self, service: str) -> float:
        """Return the MiB by which the least-squares line rises over the second half."""
        half = self.samples[len(self.samples) // 2 :]
        mean_at = sum(at for at, _ in half) / len(half)
        mean = sum(found[service] for _, found in half) / len(half)
        spread = sum((at - mean_at) ** 2 for at, _ in half)
        slope = sum((at - mean_at) * (found[service] - mean) for at, found in half) / spread if spread else 0.0
        return slope * (half[-1][0] - half[0][0])

    def rows(self, case: str) -> list[Row]:
        """Return each service's first, largest and last memory, and its rise."""
        rows = []
        for name in self._pids:
            series = [found[name] for _, found in self.samples]
            for word, value in (("first", series[0]), ("max", max(series)), ("last", series[-1])):
                rows.append(Row(case, f"{name}_resident_mib_{word}", value, "MiB"))
            rows.append(Row(case, f"{name}_second_half_rise_mib", self.rise(name), "MiB"))
        return rows

    def judge(self, allowed_mib: float) -> list[str]:
        """Return in words which memory is not flat."""
        found = []
        for name in self._pids:
            most = allowed_mib + 0.05 * max(sample[name] for _, sample in self.samples)
            if self.rise(name) > most:
                found.append(f"{name} grew by {self.rise(name):.0f} MiB in the second half; at most {most:.0f} may be")
        return found


def make_prompts(path: Path, max_tokens: int, seed: int) -> list[Prompt]:
    """Return the file's prompts, cut at random, with random answer lengths."""
    draw = random.Random(seed)
    known = read_prompts(path, max_tokens)
    prompts = []
    for _ in range(4096):
        prompt = draw.choice(known)
        words = prompt.text.split()
        text = " ".join(words[: draw.randint(min(8, len(words)), len(words))])
        prompts.append(replace(prompt, text=text, max_tokens=draw.randint(max(1, max_tokens // 4), max_tokens)))
    return prompts


def services(arguments: argparse.Namespace) -> Cluster:
    """Return services with room for all streams."""
    return make_cluster(arguments, [f"--max-running-requests={arguments.streams}"])


def make_client(cluster: Cluster, arguments: argparse.Namespace) -> Client:
    """Return a client of the chosen door."""
    ask = RequestOptions(temperature=arguments.temperature, ignore_eos=True)
    if arguments.backend == "grpc":
        return GrpcClient(cluster.gateway_address, ask)
    return RestClient(cluster.rest_url, replace(ask, chat=arguments.backend == "openai-chat"))


async def drive(cluster: Cluster, arguments: argparse.Namespace, memory: ServiceMemory) -> LoadRun:
    """Warm up, then run the load and watch memory."""
    client = make_client(cluster, arguments)
    prompts = make_prompts(arguments.prompts, arguments.max_tokens, seed=0)
    point = LoadPoint(concurrency=arguments.streams, seconds=60 * arguments.minutes)
    printed_at = 0.0

    def print_progress(run: LoadRun) -> None:
        nonlocal printed_at
        if run.window - printed_at >= 30:
            printed_at = run.window
            done = sum(1 for record in run.records if record.end)
            print(f"{run.window:.0f} s: {done} done, {dict(errors_of(run.records))} failed", flush=True)

    try:
        warm = min(WARM_SECONDS, 30 * arguments.minutes)
        await run_point(client, prompts[::-1], LoadPoint(concurrency=arguments.streams, seconds=warm))
        watching = asyncio.create_task(memory.watch())
        try:
            return await run_point(client, prompts, point, print_progress)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    finally:
        await client.close()


def main() -> int:
    """Run the load, judge it and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64, help="of the longest answers; the shortest have a fourth")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--backend", choices=("grpc", "openai", "openai-chat"), default="grpc")
    parser.add_argument("--allow-mib", type=float, default=48.0)
    add_service_arguments(parser, "smollm2-135m eagle3+ngram split")
    arguments = parser.parse_args()
    with services(arguments) as cluster:
        memory = ServiceMemory(cluster)
        before = MetricsPage.read(cluster.metrics_url("gateway"))
        run = asyncio.run(drive(cluster, arguments, memory))
        gained = MetricsPage.read(cluster.metrics_url("gateway")).since(before)
        ended = [f"{name} ended" for name, child in cluster.children.items() if not child.running]
    decoding = "greedy" if arguments.temperature == 0 else f"t{arguments.temperature:g}"
    case = f"{arguments.label} b{arguments.streams} {decoding} {arguments.backend}"
    rows = [*rows_of(run, case, gained), *memory.rows(case)]
    if arguments.out:
        more = {"memory": [{"at": round(at, 1), **found} for at, found in memory.samples[::5]]}
        write_report(arguments.out, "load", device_name(), rows, ("torch", "grpcio"), more=more)
    for row in rows:
        print(f"{row.metric:<32} {row.value:12.2f} {row.unit}")
    troubles = [f"{count} requests failed: {code}" for code, count in errors_of(run.records).items()]
    troubles += [*ended, *memory.judge(arguments.allow_mib)]
    for text in troubles:
        print("FAILED", text)
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
