"""Tokens per second of a verify engine with one rank and with several, and whether their texts are the same.

    python -m benchmarks.engine.ranks --model /models/llama-8b --prompts mt_bench.jsonl --cases 1 2 2,nccl

Each case starts an engine, with N ranks from `--verify-device` on, and asks it directly, without a gateway: the same
prompts, in the model's chat template, with 1, 16 and 64 requests at a time, greedy, past the end of sequence. With
`--speculate NAME` the engine has the drafter of its options, and the prompts are asked twice: with speculation off,
then on. In half precision, texts differ from where two candidates are near; the length that agrees with the first
case's text is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import add_service_arguments, device_name, verify_options
from benchmarks.split.load import chat_prompts
from outrider.config.verify import VerifyOptions
from outrider.errors import OutriderError
from outrider.models.store import resolve_model
from outrider.protocol.generation import GenerationRequest, GenerationUpdate
from outrider.sampling.params import SamplingParams
from outrider_tools.bench.report import Row, write_report
from verify_service.frames import RoundReport
from verify_service.main import start_engine

GREEDY = SamplingParams(temperature=0.0)


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_service_arguments(parser, "llama-8b")
    parser.add_argument("--cases", nargs="+", default=["1", "2"], help="ranks, and how they exchange: 2, 2,nccl")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--speculate", metavar="NAME", help="also with the drafter of the verify options, called NAME")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="repeat prompts up to so many tokens")
    parser.add_argument(
        "--texts", type=Path, help="answers to compare with, of an earlier run; written if it is not there"
    )
    arguments = parser.parse_args()
    options = verify_options(arguments, ["--metrics-address=", "--draft="])
    rows: list[Row] = []
    texts: dict[str, list[int]] = {}
    if arguments.texts is not None and arguments.texts.exists():
        texts = json.loads(arguments.texts.read_text())
    for case in arguments.cases:
        world, _, exchange = case.partition(",")
        case_options = replace(
            options, tensor_parallel_size=int(world), rank_exchange=exchange or options.rank_exchange
        )
        try:
            rows += asyncio.run(_run(arguments, case_options, case, texts))
        except (OutriderError, TimeoutError) as error:
            print(f"{case}: {type(error).__name__} {error}", flush=True)
    if arguments.texts is not None:
        arguments.texts.write_text(json.dumps(texts))
    if arguments.out is not None:
        write_report(arguments.out, "ranks", device_name(), rows, ("torch", "triton"))


async def _run(
    arguments: argparse.Namespace, options: VerifyOptions, case: str, texts: dict[str, list[int]]
) -> list[Row]:
    reports: list[RoundReport] = []
    begin = time.monotonic()
    process, engine = await start_engine(options, reports.append)
    rows: list[Row] = []
    dtype = options.dtype.replace("bfloat16", "bf16")
    world = f"tp{case.replace(',', ' ')}"
    try:
        if await process.ready(asyncio.Event()) is None:
            return []
        rows.append(Row(f"{arguments.label} plain {world} {dtype}", "start_seconds", time.monotonic() - begin, "s"))
        prompts = _prompts(arguments, options.model)
        for batch in arguments.batches:
            for name in ("plain", arguments.speculate) if arguments.speculate else ("plain",):
                speculate = name != "plain"
                # Fill the cache with the prompts, so that only decoding is timed; for longer if drafts must warm up.
                await _ask(engine, prompts, batch, 192 if speculate else 2, speculate)
                reports.clear()
                start = time.monotonic()
                found = await _ask(engine, prompts, batch, arguments.max_tokens, speculate)
                seconds = time.monotonic() - start
                values = [("tokens_per_second", sum(map(len, found)) / seconds, "tokens/s"), *_figures(reports, batch)]
                agreed = [
                    _num_common(text, texts.setdefault(f"{batch} {number}", text)) for number, text in enumerate(found)
                ]
                values.append(("agreed_tokens", sum(agreed) / len(agreed), "tokens"))
                title = f"{arguments.label} {name} {world} b{batch} {dtype} greedy"
                rows += [Row(title, *value) for value in values]
                print(f"{title:45s}", *(f"{metric} {value:.4g}" for metric, value, _ in values), flush=True)
        await process.stop()
    finally:
        await process.close()
    return rows


def _figures(reports: list[RoundReport], batch: int) -> list[tuple[str, float, str]]:
    """Return times and gains of rounds that had the whole batch and no prompts."""
    full = [report for report in reports if not report.num_prefilled and len(report.committed) == batch]
    figures = [report.figures for report in full]
    lengths = [count for report in full for count in report.committed]
    return [
        ("accept_length", sum(lengths) / max(len(lengths), 1), "tokens"),
        ("round_ms", 1e3 * median([one.seconds for one in figures] or [0.0]), "ms"),
        ("round_gpu_ms", 1e3 * median([one.gpu for one in figures if one.gpu] or [0.0]), "ms"),
        ("host_gap_ms", 1e3 * median([one.gap for one in figures if one.gap is not None] or [0.0]), "ms"),
    ]


async def _ask(engine: Any, prompts: list[list[int]], batch: int, max_tokens: int, speculate: bool) -> list[list[int]]:
    """Ask the first `batch` prompts at the same time. Return the answers."""
    queue: asyncio.Queue[tuple[int, GenerationUpdate]] = asyncio.Queue()
    texts: list[list[int]] = [[] for _ in range(batch)]
    for number in range(batch):

        def take(update: GenerationUpdate, number: int = number) -> None:
            queue.put_nowait((number, update))

        asked = GenerationRequest(
            f"r{number}", prompts[number % len(prompts)], GREEDY, max_tokens, disable_speculation=not speculate
        )
        engine.submit(asked, take)
    left = batch
    while left:
        number, update = await asyncio.wait_for(queue.get(), 60)
        if update.error is not None:
            raise update.error
        texts[number] += update.token_ids
        left -= update.last
    return texts


def _num_common(text: list[int], other: list[int]) -> int:
    """Return the length of the common beginning of two texts, in tokens."""
    return next((at for at, pair in enumerate(zip(text, other, strict=True)) if len(set(pair)) > 1), len(text))


def _prompts(arguments: argparse.Namespace, model: str) -> list[list[int]]:
    found = chat_prompts(resolve_model(model), arguments.prompts)
    if length := arguments.prompt_tokens:
        return [(ids * (length // len(ids) + 1))[:length] for ids in found]
    return found


if __name__ == "__main__":
    main()
