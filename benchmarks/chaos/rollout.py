"""Rehearse several machines on one: replicas behind DNS names, replaced one by one under load.

python -m benchmarks.chaos.rollout --out benchmarks/results/rollout_cpu.json    # some four minutes; no root, but Linux

4 verify, 2 draft and 2 gateway services are processes with their own addresses on loopback, in a network namespace with
a real DNS server. They find each other as in deploy/kubernetes, by dns:///verify-headless:50052 and the like; a new pod
has a new address. gRPC clients find the gateways by gRPC's name resolution, clients of OpenAI's library by the
system's, and every answer is known from plain decoding in float32. All verify services, then all drafts, then all
gateways are rolled out as by Kubernetes; then one verify is killed. Exit code 1 if a token was wrong, a request failed
without need, an error did not say that verify was lost, a service did not end by itself, or draft tokens are no longer
accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from openai import APIError, AsyncOpenAI

from benchmarks.chaos.load import ChaosLoad, KnownAnswer, Request, answered_plainly
from benchmarks.chaos.names import NameServer, enter_own_names
from benchmarks.chaos.pods import PORTS, REST_PORT, Deployment, Pod, Waits
from benchmarks.common import printer
from outrider.config.draft import DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.service import ServiceOptions
from outrider.config.verify import VerifyOptions
from outrider.rpc.transport import DEFAULT_MAX_MESSAGE_BYTES, channel_options
from outrider.v1 import common_pb2, gateway_pb2
from outrider_tools.bench.report import Row, cpu_name, write_report

VOCAB = 61
GATEWAY = f"dns:///gateway:{PORTS['gateway']}"
ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
LOST = "verify service"
"""Part of the error of an answer that was lost with its verify service."""


def tiny_model(folder: Path) -> Path:
    """Make a random Llama of a few words, with logits so far apart that rounding does not change greedy text."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=VOCAB - 1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(6.0)
    model.save_pretrained(folder)
    words = {f"word{number}": number for number in range(VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    return folder


def questions(count: int, max_tokens: int) -> list[KnownAnswer]:
    """Return questions with greedy answers. This model soon repeats itself, so that drafts find something."""
    made = []
    for number in range(count):
        prompt = gateway_pb2.TokenIds(ids=[number % 40 + 1, 2 * number % 50 + 3, 40 - number % 40])
        sampling = common_pb2.SamplingParams(temperature=0.0)
        made.append(
            KnownAnswer(Request(prompt_token_ids=prompt, sampling=sampling, max_tokens=max_tokens, ignore_eos=True))
        )
    return made


def dial(address: str) -> grpc.aio.Channel:
    """Open a channel to all addresses of a name in turn, as gRPC clients do."""
    options = [*channel_options(DEFAULT_MAX_MESSAGE_BYTES), ("grpc.service_config", ROUND_ROBIN)]
    return grpc.aio.insecure_channel(address, options=options)


class RestLoad:
    """Clients of OpenAI's library, with its own retries, that ask one question after the other until stopped."""

    def __init__(self, asked: Sequence[KnownAnswer], clients: int) -> None:
        self.complete = 0
        self.wrong = 0
        self.errors: list[str] = []
        self._asked = asked
        self._clients = clients
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> RestLoad:
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(self._clients)]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _run(self, number: int) -> None:
        async with AsyncOpenAI(base_url=f"http://gateway:{REST_PORT}/v1", api_key="none") as client:
            while not self._stopping:
                question = self._asked[number % len(self._asked)]
                number += self._clients
                try:
                    text = await self._ask(client, question)
                except APIError as error:
                    self.errors.append(f"{type(error).__name__}: {error.message}")
                    continue
                self.complete += 1
                self.wrong += text != question.text

    async def _ask(self, client: AsyncOpenAI, question: KnownAnswer) -> str:
        stream = await client.completions.create(
            model="tiny",
            prompt=list(question.request.prompt_token_ids.ids),
            max_tokens=question.request.max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


@dataclass
class Phase:
    """What clients saw in one step. Figures count only this step."""

    name: str
    seconds: float
    figures: dict[str, int]
    errors: list[str]
    stall: float
    """Longest wait of a stream, in seconds."""

    def complaints(self) -> list[str]:
        """Return in words what must not happen but did."""
        found = []
        if self.figures["wrong_tokens"] or self.figures["rest_wrong"]:
            found.append(f"{self.name}: wrong answers: {self.figures}")
        may_fail = self.name == "verify_killed"
        odd = [error for error in self.errors if LOST not in error] if may_fail else self.errors
        if odd:
            found.append(f"{self.name}: {len(odd)} failed: {odd[0]}")
        if not self.figures["complete"] or not self.figures["rest_complete"]:
            found.append(f"{self.name}: nothing was answered")
        return found


class Rehearsal:
    """Runs steps under load, and keeps what clients saw in each."""

    def __init__(self, load: ChaosLoad, rest: RestLoad) -> None:
        self.phases: list[Phase] = []
        self._load = load
        self._rest = rest

    def _figures(self) -> dict[str, int]:
        record, rest = self._load.record, self._rest
        return {
            "complete": record.complete,
            "failed": record.failed,
            "refused": record.refused,
            "wrong_tokens": record.wrong + record.wrong_texts,
            "rest_complete": rest.complete,
            "rest_failed": len(rest.errors),
            "rest_wrong": rest.wrong,
        }

    async def phase(self, name: str, step: Awaitable[None]) -> None:
        """Run a step under load, and wait until draft tokens are accepted after it."""
        before, began = self._figures(), time.monotonic()
        num_errors, num_rest = len(self._load.record.errors), len(self._rest.errors)
        await step
        await self._load.accepted()
        ended = time.monotonic()
        grown = {key: value - before[key] for key, value in self._figures().items()}
        errors = [*self._load.record.errors[num_errors:], *self._rest.errors[num_rest:]]
        stall = self._load.record.longest_gap(began, ended)
        self.phases.append(Phase(name, ended - began, grown, errors, stall))
        words = ", ".join(f"{key} {value}" for key, value in grown.items())
        print(f"{name}: {ended - began:.0f} s, {words}, longest wait {1000 * stall:.0f} ms", flush=True)
        for error in errors:
            print(f"    {error}", flush=True)


def options_of(model: Path) -> dict[str, ServiceOptions]:
    """Return each service's options, as in deploy/kubernetes: peers are names."""
    drain: dict[str, Any] = {"drain_seconds": 30.0}
    return {
        "draft": DraftOptions(
            speculative_algorithm=("NGRAM",), target_model_path=str(model), device="cpu", local_line="off", **drain
        ),
        "verify": VerifyOptions(
            model=str(model),
            served_model_name="tiny",
            dtype="float32",
            device="cpu",
            threads=1,
            max_total_tokens=8192,
            draft=(f"dns:///draft-headless:{PORTS['draft']}",),
            dns_seconds=1.0,
            **drain,
        ),
        "gateway": GatewayOptions(
            verify=(f"dns:///verify-headless:{PORTS['verify']}",),
            dns_seconds=1.0,
            allowed_hosts=("gateway",),
            no_page=True,
            **drain,
        ),
    }


async def rehearse(arguments: argparse.Namespace, folder: Path, names: NameServer) -> tuple[list[Phase], list[str]]:
    """Run the whole rehearsal. Return its phases, and what went wrong."""
    model = arguments.model or tiny_model(folder / "tiny")
    options, on_line = options_of(model), printer(arguments.verbose)
    waits = Waits(before_stop=arguments.before_stop)
    deployments: dict[str, Deployment] = {}
    # At first the names have no addresses: whoever looks them up waits.
    for place, (kind, name) in enumerate(
        (("verify", "verify-headless"), ("draft", "draft-headless"), ("gateway", "gateway")), 1
    ):
        make = partial(Pod, kind, options[kind], folder, on_line)
        deployments[kind] = Deployment(name, names, make, f"127.0.{place}", waits, kind == "gateway")
    try:
        for kind in ("draft", "verify", "gateway"):
            await deployments[kind].scale(getattr(arguments, kind))
        asked = await answered_plainly(GATEWAY, questions(arguments.questions, arguments.max_tokens))
        async with AsyncExitStack() as stack:
            load = await stack.enter_async_context(ChaosLoad(GATEWAY, asked, arguments.clients, dial))
            rest = await stack.enter_async_context(RestLoad(asked, arguments.clients))
            await load.accepted()
            rehearsal = Rehearsal(load, rest)
            await rehearsal.phase("calm", asyncio.sleep(5))
            for kind in ("verify", "draft", "gateway"):
                await rehearsal.phase(f"{kind}_rolled", deployments[kind].roll())
            verify = deployments["verify"]
            await rehearsal.phase("verify_killed", verify.lose(verify.pods[0]))
            await rehearsal.phase("calm_again", asyncio.sleep(5))
        for kind in ("gateway", "verify", "draft"):
            await deployments[kind].end()
    finally:
        for deployment in deployments.values():
            deployment.kill()
    complaints = [text for phase in rehearsal.phases for text in phase.complaints()]
    for kind, deployment in deployments.items():
        if any(deployment.exit_codes):
            complaints.append(f"{kind}: exit codes {deployment.exit_codes}")
    return rehearsal.phases, complaints


def rows(phases: Sequence[Phase], clients: int) -> list[Row]:
    """Return the figures for the report."""
    made = []
    for phase in phases:
        case = f"tiny ngram split b{2 * clients} rollout {phase.name} fp32 greedy"
        made += [Row(case, key, value, "") for key, value in phase.figures.items()]
        made += [Row(case, "seconds", phase.seconds, "s"), Row(case, "stall_ms", 1000 * phase.stall, "ms")]
    return made


def main() -> int:
    """Run the rehearsal, judge it and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verify", type=int, default=4, help="replicas")
    parser.add_argument("--draft", type=int, default=2, help="replicas")
    parser.add_argument("--gateway", type=int, default=2, help="replicas")
    parser.add_argument("--clients", type=int, default=4, help="of gRPC, and as many of REST")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--before-stop", type=float, default=3.0, help="seconds from leaving the name to SIGTERM")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; a tiny one is made if none is given")
    parser.add_argument("--verbose", action="store_true", help="print the services' log lines")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    enter_own_names()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="orollout-") as folder, NameServer() as names:
        phases, complaints = asyncio.run(rehearse(arguments, Path(folder), names))
        print(f"names were asked for: {dict(names.asked)}")
    if arguments.out:
        sizes = {kind: getattr(arguments, kind) for kind in ("gateway", "verify", "draft")}
        more = {
            "replicas": sizes,
            "complaints": complaints,
            "errors": {phase.name: phase.errors for phase in phases if phase.errors},
        }
        packages = ("torch", "grpcio", "openai", "dnslib")
        write_report(arguments.out, "rollout", cpu_name(), rows(phases, arguments.clients), packages, more=more)
    for text in complaints:
        print(f"FAILED {text}", flush=True)
    print(f"{len(phases)} phases in {time.monotonic() - start:.0f} s, {len(complaints)} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
