"""Compare two checkouts of this repository, both served by `outrider up`: tokens per second, and CPU time a token.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.serving.checkouts --before /tmp/before --out benchmarks/results/checkouts_cpu.json

Both answer each question plainly and with the default's drafters, in an order that rotates by one with each question,
so that all meet the same machine. Greedy, the radix cache off. Other work on the machine affects both, and hardly
affects the services' CPU time, which counts all their processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import threading
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serving.mt_bench import PROMPTS, WARM, pick, read_questions
from benchmarks.serving.services import Run, ours
from outrider.rpc.channel import open_channel
from outrider.v1 import gateway_pb2_grpc
from outrider_tools.bench.report import Row, cpu_name, write_report

HERE = Path(__file__).resolve().parents[2]
ADDRESS = re.compile(r"\bgRPC\s+(\S+)")
WAYS = ("plain", "default")


@dataclass(frozen=True)
class TimedRun:
    """One answer, and the services' CPU time for it."""

    run: Run
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.run.tokens / self.run.seconds


class ServedCheckout:
    """The services of one checkout."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "outrider.cli", "up", "--ephemeral", "--disable-radix-cache", *arguments]
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.address = self._wait_for_address()

    def _wait_for_address(self) -> str:
        lines = []
        for line in self._process.stdout or ():
            lines.append(line)
            if found := ADDRESS.search(line):
                # Drain later output, which would otherwise fill the pipe.
                threading.Thread(target=lambda: list(self._process.stdout or ()), daemon=True).start()
                return found[1]
        raise RuntimeError("".join(lines))

    def close(self) -> None:
        """End the services."""
        self._process.terminate()
        self._process.wait()

    def cpu_seconds(self) -> float:
        """Return the CPU time of all processes so far."""
        top = psutil.Process(self._process.pid)
        return sum(sum(one.cpu_times()[:2]) for one in (top, *top.children(recursive=True)))

    async def answer(self, stub: Any, text: str, max_tokens: int, way: str) -> TimedRun:
        """Answer a text."""
        before = self.cpu_seconds()
        run = await ours(stub, text, max_tokens, way == "default")
        return TimedRun(run, self.cpu_seconds() - before)


async def measure(
    checkouts: dict[str, ServedCheckout], options: argparse.Namespace
) -> dict[tuple[str, str], list[TimedRun]]:
    """Return all answers, by checkout and way."""
    questions = pick(read_questions(options.prompts), options.per_category)
    cases = [(name, way) for name in checkouts for way in WAYS]
    found: dict[tuple[str, str], list[TimedRun]] = {case: [] for case in cases}
    async with AsyncExitStack() as channels:
        stubs = {}
        for name, checkout in checkouts.items():
            channel = await channels.enter_async_context(open_channel(checkout.address))
            stubs[name] = gateway_pb2_grpc.GatewayServiceStub(channel)
            for text in WARM:
                for way in WAYS:
                    await checkout.answer(stubs[name], text, options.max_tokens // 2, way)
        for index, question in enumerate(questions):
            first = index % len(cases)
            for name, way in (*cases[first:], *cases[:first]):
                answer = await checkouts[name].answer(stubs[name], question.text, options.max_tokens, way)
                found[name, way].append(answer)
            print(index + 1, "  ".join(f"{' '.join(case)} {found[case][-1].rate:5.1f}/s" for case in cases), flush=True)
    return found


def rows_of(found: dict[tuple[str, str], list[TimedRun]]) -> list[Row]:
    """Return the totals of each checkout and way, and the ratios of the later checkout to the earlier one."""
    rows = [Row("all", "load_average", os.getloadavg()[1], "processes")]
    for (name, way), answers in found.items():
        case = f"smollm2-135m {way} b1 greedy {name}"
        tokens, seconds = (sum(getattr(one.run, field) for one in answers) for field in ("tokens", "seconds"))
        rows.append(Row(case, "tokens_per_second", tokens / seconds, "tokens/s"))
        rows.append(Row(case, "cpu_ms_per_token", 1e3 * sum(one.cpu_seconds for one in answers) / tokens, "ms"))
        if rounds := sum(one.run.rounds for one in answers):
            rows.append(Row(case, "accept_length", tokens / rounds, "tokens"))
        if name == "after":
            before = found["before", way]
            ratios = [one.rate / other.rate for one, other in zip(answers, before, strict=True)]
            whole = tokens / seconds / (sum(one.run.tokens for one in before) / sum(one.run.seconds for one in before))
            rows.append(Row(case, "speedup_over_before", whole, "ratio"))
            rows.append(Row(case, "median_speedup_over_before", statistics.median(ratios), "ratio"))
            rows.append(Row(case, "lowest_speedup_over_before", min(ratios), "ratio"))
    return rows


def main() -> None:
    """Run all questions and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="folder of the earlier checkout")
    parser.add_argument("--after", type=Path, default=HERE, help="folder of the later one")
    parser.add_argument("--after-option", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--per-category", type=int, default=0, help="questions of each category; 0 takes all")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with ExitStack() as services:
        checkouts = {}
        for name, folder, arguments in (
            ("before", options.before, []),
            ("after", options.after, options.after_option),
        ):
            checkouts[name] = ServedCheckout(folder, arguments)
            services.callback(checkouts[name].close)
        rows = rows_of(asyncio.run(measure(checkouts, options)))
    for row in rows:
        print(f"{row.case:60} {row.metric:28} {row.value:9.3f} {row.unit}")
    if options.out:
        write_report(options.out, "checkouts", cpu_name(), rows, ("torch",))


if __name__ == "__main__":
    main()
