"""--deterministic on a GPU: the same tokens, bit for bit, whatever speculates, runs beside it or lies in the cache.

python benchmarks/deterministic.py --prompts mt_bench.jsonl --out benchmarks/results/deterministic_h200.json

Every prompt is answered greedily and at temperature 0.8 with a fixed seed: without speculation one at a time, with
n-gram drafts one at a time, without and with them in a batch, and with so little KV memory that requests are preempted
and resumed. Answers are compared token by token. The same runs without --deterministic tell what it costs. A line of
the prompts has "turns" (the first is taken) or "prompt".
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from report import Row, cpu_name, write_report

from outrider.cli.cluster import Cluster
from outrider.config.verify import VerifyOptions
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

Answers = list[list[int]]


@dataclass(frozen=True)
class Run:
    """One way to answer all prompts."""

    name: str
    speculate: bool
    batch: int
    scarce: bool = False
    """With KV memory for a few requests only."""


RUNS = (
    Run("plain", False, 1),
    Run("ngram", True, 1),
    Run("plain", False, 32),
    Run("ngram", True, 32),
    Run("ngram preempted", True, 32, scarce=True),
)


def message(prompt: str, seed: int, temperature: float, arguments: argparse.Namespace, speculate: bool) -> Any:
    """A request for one answer."""
    return gateway_pb2.GatewayServiceGenerateRequest(
        chat=gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role="user", content=prompt)]),
        sampling=common_pb2.SamplingParams(temperature=temperature, seed=seed),
        max_tokens=arguments.max_tokens,
        ignore_eos=True,
        speculation=gateway_pb2.SPECULATION_ON if speculate else gateway_pb2.SPECULATION_OFF,
    )


async def answer_all(
    address: str, prompts: list[str], temperature: float, run: Run, arguments: argparse.Namespace
) -> tuple[Answers, float]:
    """Tokens of every answer, and seconds for all."""
    channel = open_channel(address)
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    places = asyncio.Semaphore(run.batch)

    async def answer(index: int) -> list[int]:
        async with places:
            tokens: list[int] = []
            async for response in stub.Generate(message(prompts[index], index, temperature, arguments, run.speculate)):
                tokens += response.token_ids
            return tokens

    start = time.perf_counter()
    answers = await asyncio.gather(*(answer(index) for index in range(len(prompts))))
    seconds = time.perf_counter() - start
    await channel.close()
    return list(answers), seconds


def run_all(prompts: list[str], mode: str, arguments: argparse.Namespace) -> list[Row]:
    """All runs of a mode, on services that are started for them."""
    options = VerifyOptions(model=arguments.model, deterministic=mode == "deterministic")
    truth: dict[float, Answers] = {}
    rows: list[Row] = []
    for scarce in (False, True):
        verify = replace(options, max_total_tokens=arguments.scarce_tokens) if scarce else options
        with Cluster(verify=verify) as cluster:
            for run in (run for run in RUNS if run.scarce == scarce and run.batch in arguments.batches):
                for temperature in (0.0, 0.8):
                    answers, seconds = asyncio.run(
                        answer_all(cluster.gateway_address, prompts, temperature, run, arguments)
                    )
                    expected = truth.setdefault(temperature, answers)
                    equal = sum(one == other for one, other in zip(answers, expected, strict=True))
                    decoding = f"t{temperature}" if temperature else "greedy"
                    case = f"{arguments.label} {run.name} {mode} b{run.batch} bf16 {decoding}"
                    rows.append(Row(case, "equal_answers", equal, "answers"))
                    rows.append(Row(case, "tokens_per_second", sum(map(len, answers)) / seconds, "tokens/s"))
                    print(f"{case:60} {equal:3} of {len(prompts)} equal, {rows[-1].value:8.0f} tokens/s", flush=True)
    return rows


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=80)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--label", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--modes", nargs="+", choices=("deterministic", "fast"), default=["deterministic", "fast"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--scarce-tokens", type=int, default=8704)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.prompts.read_text().splitlines()][: arguments.limit]
    prompts = [line["turns"][0] if "turns" in line else line["prompt"] for line in lines]
    rows: list[Row] = []
    for mode in arguments.modes:
        rows += run_all(prompts, mode, arguments)
        if arguments.out:
            device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
            write_report(arguments.out, "deterministic", device, rows, ("torch", "triton"))


if __name__ == "__main__":
    main()
