"""Replicas of a verify service behind one gateway, under load; a rank of one replica is killed.

python -m benchmarks.serving.replicas --model /models/llama-70b-fp8 --verify-device cuda:0 \
    --verify-option=--tensor-parallel-size=2 --minutes 4 --out benchmarks/results/replicas_h200x4.json

Each replica has its own GPUs: `--verify-device` is the first one of the first replica, and the others follow. A single
stream is timed first, then `--streams` are kept running over the gRPC door. After a third of the time, a rank of the
first replica gets SIGKILL (the service itself if there is only one rank); the replica is started again as a supervisor
would. Exit code 1 if a request failed that was not running on that replica when the rank died, if more requests failed
than ran there, or if the replica did not come back.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import psutil

from benchmarks.common import add_service_arguments, device_name, printer, verify_options
from benchmarks.serving.load import make_prompts
from outrider.cli.cluster import Cluster
from outrider.config.gateway import GatewayOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import UnavailableError
from outrider.metrics import MetricsPage
from outrider_tools.bench.clients import GrpcClient, RequestOptions, run_point
from outrider_tools.bench.report import Row, write_report
from outrider_tools.bench.requests import LoadPoint, LoadRun, RequestRecord, errors_of

WARM_SECONDS = 10.0
POLL_SECONDS = 0.25


@dataclass
class Fault:
    """What happened to the first replica, in seconds of the load."""

    killed_at: float = 0.0
    back_at: float = 0.0
    """When the replica committed tokens again; 0 if it did not."""
    num_running: int = 0
    """Requests on the replica when the rank was killed."""
    what: str = ""


def replica_options(arguments: argparse.Namespace) -> list[VerifyOptions]:
    """Return the options of each replica."""
    options = verify_options(arguments, [f"--max-running-requests={arguments.streams}"])
    numbers = range(arguments.replicas)
    match = re.fullmatch(r"cuda:(\d+)", arguments.verify_device)
    if match is None:
        return [options for _ in numbers]
    first, ranks = int(match[1]), options.tensor_parallel_size
    return [replace(options, device=f"cuda:{first + number * ranks}") for number in numbers]


def start(arguments: argparse.Namespace, stack: ExitStack) -> tuple[list[Cluster], Cluster]:
    """Start the replicas, and a gateway for them, until the stack closes."""
    replicas = [
        Cluster(verify=options, services=("verify",), supervise=True, on_line=printer(arguments.verbose))
        for options in replica_options(arguments)
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(stack.enter_context, replicas))
    gateway = Cluster(
        gateway=GatewayOptions(verify=tuple(one.address("verify") for one in replicas)),
        services=("gateway",),
        on_line=printer(arguments.verbose),
    )
    return replicas, stack.enter_context(gateway)


def kill_rank(replica: Cluster) -> str:
    """Kill a replica's last rank, or the service if it has only one. Return in words what was killed."""
    family = psutil.Process(replica.verify.pid).children(recursive=True)
    ranks = [child for child in family if "verify_service.engine.rank_worker" in child.cmdline()]
    if ranks:
        ranks[-1].send_signal(signal.SIGKILL)
        return f"rank {len(ranks)} of {len(ranks) + 1}"
    replica.verify.kill()
    return "the service"


async def disturb(replica: Cluster, after: float, begin: float) -> Fault:
    """Kill a rank after `after` seconds, and wait until its replica commits tokens again."""
    await asyncio.sleep(after)
    page = await asyncio.to_thread(MetricsPage.read, replica.metrics_url("verify"))
    fault = Fault(num_running=round(page.total("outrider_verify_running_requests")))
    fault.what, fault.killed_at = kill_rank(replica), time.perf_counter() - begin
    before = page.total("outrider_verify_committed_tokens")
    while not fault.back_at:
        await asyncio.sleep(POLL_SECONDS)
        try:
            page = await asyncio.to_thread(MetricsPage.read, replica.metrics_url("verify"))
        except UnavailableError:
            continue
        if 0 < page.total("outrider_verify_committed_tokens") < before:
            fault.back_at = time.perf_counter() - begin
    return fault


async def drive(
    replicas: Sequence[Cluster], gateway: Cluster, arguments: argparse.Namespace
) -> tuple[float, LoadRun, Fault]:
    """Return tokens a second of a single stream, the load, and its fault."""
    client = GrpcClient(gateway.gateway_address, RequestOptions(ignore_eos=True))
    prompts = make_prompts(arguments.prompts, arguments.max_tokens, seed=0)
    try:
        await run_point(client, prompts[::-1], LoadPoint(concurrency=arguments.streams, seconds=WARM_SECONDS))
        lone = await run_point(client, prompts[-64:], LoadPoint(concurrency=1, num_prompts=arguments.lone))
        begin = time.perf_counter()
        fault = asyncio.create_task(disturb(replicas[0], 20 * arguments.minutes, begin))
        run = await run_point(client, prompts, LoadPoint(concurrency=arguments.streams, seconds=60 * arguments.minutes))
        if not fault.done():
            fault.cancel()
            raise SystemExit(f"the replica was not back {40 * arguments.minutes:.0f} s after a rank was killed")
        return stream_speed(lone.records), run, await fault
    finally:
        await client.close()


def stream_speed(records: Sequence[RequestRecord]) -> float:
    """Return tokens a second of one answer after another, without prompts."""
    seconds = sum(record.arrivals[-1][0] - record.arrivals[0][0] for record in records if record.arrivals)
    return sum(record.tokens - record.arrivals[0][1] for record in records if record.arrivals) / max(seconds, 1e-9)


def speed(run: LoadRun, start: float, end: float) -> float:
    """Return tokens a second in this part of the load."""
    tokens = sum(count for record in run.records for at, count in record.arrivals if start <= at < end)
    return tokens / max(end - start, 1e-9)


def rows_of_run(case: str, alone: float, run: LoadRun, fault: Fault) -> list[Row]:
    """Return rows with speeds and failures."""
    failed = [record for record in run.records if record.error]
    figures = [
        ("lone_stream_tokens_per_second", alone, "tokens/s"),
        ("before_tokens_per_second", speed(run, 0.0, fault.killed_at), "tokens/s"),
        ("without_tokens_per_second", speed(run, fault.killed_at, fault.back_at), "tokens/s"),
        ("after_tokens_per_second", speed(run, fault.back_at, run.window), "tokens/s"),
        ("back_seconds", fault.back_at - fault.killed_at, "s"),
        ("running_when_killed", fault.num_running, "requests"),
        ("failed", len(failed), "requests"),
        ("failed_later", sum(record.due > fault.killed_at for record in failed), "requests"),
        ("complete", len(run.records) - len(failed), "requests"),
    ]
    return [Row(case, *figure) for figure in figures]


def main() -> int:
    """Run the load, judge it and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=5.0, help="of load")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--lone", type=int, default=6, help="answers of the stream that is timed alone")
    parser.add_argument(
        "--max-tokens", type=int, default=256, help="of the longest answers; the shortest have a fourth"
    )
    add_service_arguments(parser, "smollm2-135m")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        replicas, gateway = start(arguments, stack)
        alone, run, fault = asyncio.run(drive(replicas, gateway, arguments))
    ranks = replica_options(arguments)[0].tensor_parallel_size
    case = f"{arguments.label} replicas{arguments.replicas} tp{ranks} b{arguments.streams} greedy"
    rows = rows_of_run(case, alone, run, fault)
    if arguments.out:
        more = {"errors": dict(errors_of(run.records)), "killed": fault.what}
        write_report(arguments.out, "replicas", device_name(), rows, ("torch", "grpcio"), more=more)
    for row in rows:
        print(f"{row.metric:<32} {row.value:12.2f} {row.unit}")
    found = {row.metric: row.value for row in rows}
    troubles = []
    if found["failed_later"]:
        troubles.append(f"{found['failed_later']:g} requests failed that began after {fault.what} was killed")
    if found["failed"] > fault.num_running:
        troubles.append(f"{found['failed']:g} requests failed, {fault.num_running} ran where {fault.what} was killed")
    for text in troubles:
        print("FAILED", text, dict(errors_of(run.records)))
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
