"""Rounds with everything running: clients that stream through the gateway, a draft that grows trees, verify on a GPU.

python -m benchmarks.serving.live --model /models/llama-8b --batches 1,32 --out benchmarks/results/live_h200.json

Reads the device's idle time between two rounds, and its time for a round, from verify's own metrics page before and
after each run. Drafts are n-grams over prompts and outputs; the same prompts are also decoded plainly. Greedy,
`--max-tokens` tokens each; the prompts are repeated until every client has its share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import torch

from benchmarks.serving.services import PROMPTS, request
from outrider.cli.cluster import Cluster
from outrider.config.verify import VerifyOptions
from outrider.metrics import MetricsPage
from outrider.rpc.channel import open_channel
from outrider.v1 import gateway_pb2_grpc
from outrider_tools.bench.report import Row, cpu_name, write_report

HISTOGRAMS = {"host_gap_ms": "outrider_verify_host_gap_seconds", "round_gpu_ms": "outrider_verify_gpu_seconds"}


Arrivals = list[tuple[float, int]]
"""When tokens came, and how many."""


async def client(
    stub: gateway_pb2_grpc.GatewayServiceStub, prompts: list[str], max_tokens: int, on: bool, arrivals: Arrivals
) -> list[int]:
    """Ask for one answer after another. Return total tokens, rounds, draft tokens and accepted tokens."""
    totals = [0, 0, 0, 0]
    for prompt in prompts:
        async for response in stub.Generate(request(prompt, max_tokens, on)):
            if response.token_ids:
                arrivals.append((time.perf_counter(), len(response.token_ids)))
            if response.HasField("usage"):
                usage = response.usage
                counts = (usage.completion_tokens, usage.num_rounds, usage.num_draft_tokens, usage.num_accepted_tokens)
                totals = [total + count for total, count in zip(totals, counts, strict=True)]
    return totals


def steady_speed(arrivals: list[Arrivals]) -> float:
    """Return tokens per second from when every client has its first ones until the first client has its last.

    Clients with predictable answers end early; after that, the batch is no longer full.
    """
    start, end = max(one[0][0] for one in arrivals), min(one[-1][0] for one in arrivals)
    return sum(count for one in arrivals for at, count in one if start < at <= end) / (end - start)


async def run(cluster: Cluster, prompts: list[str], batch: int, max_tokens: int, on: bool, label: str) -> list[Row]:
    """Run `batch` clients at once, each with its own order of the prompts. Return the figures."""
    channel = open_channel(cluster.gateway_address)
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    shares = [[prompts[(place + i) % len(prompts)] for i in range(3 if batch > 1 else 6)] for place in range(batch)]
    await client(stub, prompts[:1], 16, on, [])
    arrivals: list[Arrivals] = [[] for _ in shares]
    before, start = MetricsPage.read(cluster.metrics_url("verify")), time.perf_counter()
    clients = zip(shares, arrivals, strict=True)
    totals = await asyncio.gather(*(client(stub, share, max_tokens, on, came) for share, came in clients))
    seconds, page = time.perf_counter() - start, MetricsPage.read(cluster.metrics_url("verify")).since(before)
    await channel.close()
    tokens, rounds, drafted, accepted = (sum(column) for column in zip(*totals, strict=True))
    case = f"{label} {'ngram' if on else 'plain'} split b{batch} greedy"
    rows = [
        Row(case, "tokens_per_second", tokens / seconds, "tokens/s"),
        Row(case, "steady_tokens_per_second", steady_speed(arrivals), "tokens/s"),
        Row(case, "accept_length", tokens / max(rounds, 1), "tokens"),
        Row(case, "draft_tokens_per_round", drafted / max(rounds, 1), "tokens"),
        Row(case, "accept_rate", accepted / max(drafted, 1), "ratio"),
    ]
    hold = 1e3 * page.total("outrider_verify_hold_seconds") / max(page.total("outrider_verify_rounds"), 1)
    rows.append(Row(case, "hold_ms", hold, "ms"))
    for metric, name in HISTOGRAMS.items():
        seen = page.histogram(name)
        rows.append(Row(case, metric, 1e3 * seen.mean, "ms"))
        rows += [Row(case, f"{metric}_p{q}", 1e3 * seen.quantile(q / 100), "ms") for q in (50, 90, 99)]
        rows.append(Row(case, f"{metric}_rounds", seen.count, "rounds"))
    return rows


async def main() -> None:
    """Run all batches and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--label", default="llama-8b")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    batches = [int(batch) for batch in arguments.batches.split(",")]
    verify = VerifyOptions(
        model=arguments.model,
        disable_radix_cache=True,
        max_running_requests=max(VerifyOptions().max_running_requests, *batches),
    )
    rows: list[Row] = []
    start = time.perf_counter()
    with Cluster(verify=verify, on_line=lambda name, line: print(f"{name}: {line}", flush=True)) as cluster:
        rows.append(Row(f"{arguments.label} start", "seconds", time.perf_counter() - start, "s"))
        for batch in batches:
            for on in (False, True):
                rows += await run(cluster, prompts, batch, arguments.max_tokens, on, arguments.label)
    for row in rows:
        print(f"{row.case:44} {row.metric:26} {row.value:10.3f} {row.unit}")
    if arguments.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
        write_report(arguments.out, "live", device, rows, ("torch", "grpcio"))


if __name__ == "__main__":
    asyncio.run(main())
