"""A long run under mixed load: neither service leaks, and no request fails.

python -m benchmarks.serving.soak --minutes 30 --out benchmarks/results/soak_cpu.json
python -m benchmarks.serving.soak --minutes 8 --model /models/llama-8b --verify-device cuda:0 --draft-device cuda:1 \
    --draft-option=--speculative-algorithm=STANDALONE --draft-option=--speculative-draft-model-path=/models/noisy-0.10

Clients ask for answers of random length, temperature and kind; a third of the requests is cancelled half-way. KV memory
is scarce, so that requests are preempted. The load runs in `--spells` parts. After each one the services are left alone
until they are idle: then there must be no used pages, running requests, or requests and nodes of the draft, and each
process's memory, on the host and on GPUs, may have grown since the second spell by at most `--allow-mib` and 5 %.
Exit code 1 on a leak, a failed request, or a load without preemptions.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks.common import Cost, add_service_arguments, cost_of, device_name, make_cluster
from benchmarks.split.load import read_prompts
from outrider.cli.cluster import Cluster
from outrider.metrics import MetricsPage
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from outrider_tools.bench.report import Row, write_report

CANCELLED_SHARE = 0.3
PLAIN_SHARE = 0.15
MANY_SHARE = 0.1
"""Share of requests that ask for two answers."""


@dataclass
class SoakLoad:
    """Clients that ask for answers until told to stop."""

    address: str
    prompts: list[str]
    clients: int
    max_tokens: int
    seed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Requests by how they ended, and tokens."""
    failures: list[str] = field(default_factory=list)

    async def run(self, seconds: float) -> None:
        """Ask for `seconds`, then wait for the last answer to complete."""
        channel = open_channel(self.address)
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        end = time.monotonic() + seconds
        generators = [random.Random(f"{self.seed} {place}") for place in range(self.clients)]
        self.seed += 1
        await asyncio.gather(*(self._client(stub, generator, end) for generator in generators))
        await channel.close()

    async def _client(self, stub: Any, generator: random.Random, end: float) -> None:
        while time.monotonic() < end:
            message = self._request(generator)
            patience = generator.randrange(8) if generator.random() < CANCELLED_SHARE else -1
            call = stub.Generate(message)
            try:
                finished = await self._read(call, patience)
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"{error.code().name}: {error.details()}")
                self.counts["failed"] += 1
                continue
            if patience < 0 and not finished:
                self.failures.append("a stream ended before its answer was complete")
            self.counts["complete" if finished else "cancelled"] += 1

    async def _read(self, call: Any, patience: int) -> bool:
        """Read an answer, or cancel it after `patience` messages. Return whether it came to its end."""
        seen = 0
        async for response in call:
            self.counts["tokens"] += len(response.token_ids)
            if response.HasField("usage"):
                return True
            if seen == patience:
                call.cancel()
                return False
            seen += 1
        return False

    def _request(self, generator: random.Random) -> gateway_pb2.GatewayServiceGenerateRequest:
        words = generator.choice(self.prompts).split()
        prompt = " ".join(words[: generator.randint(1, len(words))])
        sampling = common_pb2.SamplingParams(temperature=generator.choice((0.0, 0.0, 0.8, 1.2)))
        if generator.random() < 0.3:
            sampling.top_p = 0.9
        if generator.random() < 0.2:
            sampling.frequency_penalty = 0.5
        return gateway_pb2.GatewayServiceGenerateRequest(
            chat=gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role="user", content=prompt)]),
            sampling=sampling,
            n=2 if generator.random() < MANY_SHARE else 1,
            max_tokens=generator.randint(1, self.max_tokens),
            ignore_eos=generator.random() < 0.5,
            speculation=gateway_pb2.SPECULATION_OFF if generator.random() < PLAIN_SHARE else gateway_pb2.SPECULATION_ON,
        )


IDLE_SECONDS = 15.0
AT_REST = {
    "verify": ("outrider_verify_running_requests", "outrider_verify_waiting_requests", "outrider_verify_kv_pages_used"),
    "draft": ("outrider_draft_open_requests", "outrider_draft_live_nodes"),
}
"""Gauges that must be 0 when no request is left, as must all of the draft's with a word of DRAFTER_WORDS."""
DRAFTER_WORDS = ("used", "open", "live", "rows")
WARM_SPELLS = 2
"""Spells until caches are full and all KV memory was used: growth after that is a leak."""


@dataclass
class IdleState:
    """Both services at idle."""

    gauges: dict[str, float]
    costs: dict[str, Cost]
    """Costs by service."""
    counts: dict[str, int] = field(default_factory=dict)


def at_rest(page: MetricsPage, service: str) -> dict[str, float]:
    """Return a service's gauges that must come back to 0."""
    found = {name: page.gauges[name] for name in AT_REST[service] if name in page.gauges}
    for name, value in page.gauges.items():
        words = name.removeprefix("outrider_draft_").split("_")
        if service == "draft" and name.startswith("outrider_draft_") and any(word in DRAFTER_WORDS for word in words):
            found[name] = value
    return found


def settle(cluster: Cluster) -> IdleState:
    """Wait until the services are idle, or time is over. Return their state then."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        gauges: dict[str, float] = {}
        for service in AT_REST:
            gauges |= at_rest(MetricsPage.read(cluster.metrics_url(service)), service)
        if not any(gauges.values()) or time.monotonic() > deadline:
            return IdleState(gauges, {name: cost_of(cluster.children[name].pid) for name in cluster.services})
        time.sleep(0.25)


def grown(before: Cost, after: Cost, allowed_mib: float) -> list[str]:
    """Return in words which memory of a service grew by more than is allowed."""
    found = []
    for name in ("resident_mib", "gpu_mib"):
        old, new = getattr(before, name), getattr(after, name)
        if new - old > allowed_mib + 0.05 * old:
            found.append(f"{name} grew from {old:.0f} to {new:.0f}")
    return found


def judge(rests: list[IdleState], allowed_mib: float) -> list[str]:
    """Return in words what leaked."""
    leaks = [
        f"after spell {number}: {name} is {value:g}, not 0"
        for number, rest in enumerate(rests)
        for name, value in rest.gauges.items()
        if value
    ]
    # The first rest comes before all spells.
    if len(rests) > WARM_SPELLS + 1:
        for service, cost in rests[-1].costs.items():
            leaks += [f"{service}: {text}" for text in grown(rests[WARM_SPELLS].costs[service], cost, allowed_mib)]
    return leaks


def services(arguments: argparse.Namespace) -> Cluster:
    """Return services with little KV memory, and small tries that fill soon."""
    verify = ["--disable-radix-cache", f"--max-total-tokens={arguments.kv_tokens}"]
    verify.append(f"--context-length={arguments.kv_tokens // 2}")
    draft = [f"--target-model-path={arguments.model}", "--capacity=8192"]
    return make_cluster(arguments, verify, [*draft, "--request-capacity=4096", "--total-capacity=65536"])


def run(cluster: Cluster, arguments: argparse.Namespace) -> tuple[list[IdleState], SoakLoad]:
    """Run all spells. Return the services' state at idle, before the first spell and after each one."""
    prompts = read_prompts(arguments.prompts)
    load = SoakLoad(cluster.gateway_address, prompts, arguments.clients, arguments.max_tokens)
    rests = [settle(cluster)]
    for spell in range(arguments.spells):
        asyncio.run(load.run(60 * arguments.minutes / arguments.spells))
        rest = settle(cluster)
        rest.counts = dict(load.counts)
        rests.append(rest)
        memory = ", ".join(f"{name} {cost.resident_mib:.0f}+{cost.gpu_mib:.0f}" for name, cost in rest.costs.items())
        print(f"spell {spell + 1}: {dict(load.counts)}; MiB {memory}; left {sum(rest.gauges.values()):g}", flush=True)
        for name, child in cluster.children.items():
            if not child.running:
                load.failures.append(f"{name} ended")
                return rests, load
    return rests, load


def rows_of(rests: list[IdleState], load: SoakLoad, page: MetricsPage, label: str, minutes: float) -> list[Row]:
    """Return the result rows."""
    rows = [Row(f"{label} soak", name, count, "") for name, count in sorted(load.counts.items())]
    rows += [Row(f"{label} soak", "minutes", minutes, "min"), Row(f"{label} soak", "failed", len(load.failures), "")]
    for name in ("preemptions", "rounds", "draft_tokens", "accepted_tokens"):
        rows.append(Row(f"{label} soak", name, page.total(f"outrider_verify_{name}"), ""))
    for number, rest in enumerate(rests):
        case = f"{label} soak spell {number}" if number else f"{label} soak start"
        for service, cost in rest.costs.items():
            rows.append(Row(case, f"{service}_resident_mib", cost.resident_mib, "MiB"))
            rows.append(Row(case, f"{service}_gpu_mib", cost.gpu_mib, "MiB"))
        rows += [Row(case, name, value, "") for name, value in rest.gauges.items()]
    return rows


def main() -> int:
    """Run the load, judge it and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--spells", type=int, default=6)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--kv-tokens", type=int, default=1024)
    parser.add_argument("--allow-mib", type=float, default=64.0)
    add_service_arguments(parser, "smollm2-135m ngram")
    arguments = parser.parse_args()
    with services(arguments) as cluster:
        rests, load = run(cluster, arguments)
        page = MetricsPage.read(cluster.metrics_url("verify"))
    leaks = judge(rests, arguments.allow_mib)
    if arguments.out:
        rows = rows_of(rests, load, page, arguments.label, arguments.minutes)
        write_report(arguments.out, "soak", device_name(), rows, ("torch", "grpcio"))
    preempted = page.total("outrider_verify_preemptions")
    idle = [] if preempted else ["no request was preempted; lower --kv-tokens"]
    for text in [*load.failures[:10], *leaks, *idle]:
        print("FAILED", text)
    print(f"{dict(load.counts)}: {len(load.failures)} failed, {preempted:g} preemptions, {len(leaks)} leaks")
    return 1 if leaks or load.failures or idle else 0


if __name__ == "__main__":
    sys.exit(main())
