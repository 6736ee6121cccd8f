"""Cause the faults of production on purpose under steady load: no token may be lost, repeated or changed.

python -m benchmarks.chaos --out benchmarks/results/chaos_cpu.json    # all cases, some nine minutes, as root
python -m benchmarks.chaos --only draft_killed,messages_hostile --verbose
python -m benchmarks.chaos --list

Clients ask for greedy and sampled answers whose tokens are known from plain decoding in float32. In each case a fault
begins at a random moment (`--seed`) and ends again; the load goes on until draft tokens are accepted again, and for
some seconds more. Then the services are left alone until they are idle. Exit code 1 if a token was wrong, a stream
failed without need, speculation did not come back, a page leaked or a service died. The `network_` cases need Linux and
root, and are skipped elsewhere; the `proxy_` cases do the same to byte streams.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.cases import CASES, ChaosCase
from benchmarks.chaos.link import Link
from benchmarks.chaos.load import ChaosLoad, KnownAnswer, Record, answered_plainly, questions
from benchmarks.chaos.worlds import Setup, World, open_world
from benchmarks.common import printer
from benchmarks.serving.soak import settle
from outrider.config.base import parse_options
from outrider.config.draft import DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.verify import VerifyOptions
from outrider.models.config import ModelConfig
from outrider.models.store import resolve_model
from outrider_tools.bench.report import Row, cpu_name, write_report

RECOVERY_SECONDS = 45.0
"""A draft that was refused is asked again every 30 seconds."""
WARM_ANSWERS = 4


@dataclass(frozen=True)
class Timing:
    """Durations of the parts of a case, in seconds."""

    before: float = 3.0
    fault: float = 4.0
    after: float = 3.0


@dataclass
class CaseOutcome:
    """Outcome of a case."""

    name: str
    case: ChaosCase
    record: Record
    started: float
    """When the load was warm. This and other times are seconds of the monotonic clock."""
    fault: float
    lifted: float
    accepted: float | None
    """When the first draft token after the fault was accepted; None if none was."""
    ended: float
    leaked: dict[str, float]
    """Gauges that are not 0 once no client is left, pages among them."""
    alive: int
    services: int

    @property
    def pages(self) -> float:
        """KV pages that were not given back."""
        return self.leaked.get("outrider_verify_kv_pages_used", 0.0)

    def rows(self, label: str) -> list[Row]:
        """Return the figures for the report."""
        record, calm = self.record, self.accepted or self.ended
        before = record.speed(self.started, self.fault)
        during, after = record.speed(self.fault, self.lifted), record.speed(calm, self.ended)
        figures = [
            ("complete", record.complete, ""),
            ("failed", record.failed, ""),
            ("refused", record.refused, ""),
            ("wrong_tokens", record.wrong, ""),
            ("wrong_texts", record.wrong_texts, ""),
            ("stall_before_ms", 1000 * record.longest_gap(self.started, self.fault), "ms"),
            ("stall_ms", 1000 * record.longest_gap(self.fault, self.ended), "ms"),
            ("fault_seconds", self.lifted - self.fault, "s"),
            ("tokens_per_second", before, "1/s"),
            ("tokens_per_second_during", during, "1/s"),
            ("tokens_per_second_after", after, "1/s"),
            ("during_over_before", during / before if before else 0.0, ""),
            ("after_over_before", after / before if before else 0.0, ""),
            ("pages_leaked", self.pages, ""),
            ("leftovers", sum(self.leaked.values()), ""),
            ("processes_alive", self.alive, ""),
        ]
        if self.accepted is not None:
            figures.append(("recovery_ms", 1000 * (self.accepted - self.lifted), "ms"))
        return [Row(f"{label} chaos {self.name} fp32", *figure) for figure in figures]

    def complaints(self) -> list[str]:
        """Return in words what must not happen but did."""
        found = []
        record = self.record
        if record.wrong or record.wrong_texts:
            found.append(f"{record.wrong} wrong tokens, {record.wrong_texts} wrong texts")
        if record.failed and not self.case.may_fail:
            found.append(f"{record.failed} failed: {record.errors[0]}")
        if record.refused and not (self.case.may_refuse or self.case.may_fail):
            found.append(f"{record.refused} refused: {record.errors[0]}")
        if self.accepted is None:
            found.append("no draft token is accepted any more")
        found += [f"{name} is {value:g}, not 0" for name, value in self.leaked.items() if value]
        if self.alive != self.services:
            found.append(f"{self.alive} of {self.services} services live")
        return [f"{self.name}: {text}" for text in found]


async def run_case(
    name: str,
    case: ChaosCase,
    world: World,
    asked: Sequence[KnownAnswer],
    clients: int,
    timing: Timing,
    draw: random.Random,
) -> CaseOutcome:
    """Run a case: cause its fault in services under load."""
    async with ChaosLoad(world.cluster.gateway_address, asked, clients) as load:
        await load.answers(WARM_ANSWERS)
        await load.accepted()
        started = time.monotonic()
        await asyncio.sleep(timing.before * (1 + 0.5 * draw.random()))
        fault = time.monotonic()
        async with case.fault(world, draw):
            await asyncio.sleep(timing.fault * case.lasts)
        lifted = time.monotonic()
        accepted = None
        with suppress(TimeoutError):  # `complaints` reports it
            accepted = await load.accepted(RECOVERY_SECONDS)
        await asyncio.sleep(timing.after)
        ended = time.monotonic()
    rest = await asyncio.to_thread(settle, world.cluster)
    leaked = {gauge: value for gauge, value in rest.gauges.items() if value}
    services = len(world.cluster.services)
    return CaseOutcome(
        name, case, load.record, started, fault, lifted, accepted, ended, leaked, world.num_alive, services
    )


def chosen(only: str) -> dict[str, ChaosCase]:
    """Return the cases to run: the named ones, or all that this machine can run."""
    if only:
        return {name: CASES[name] for name in only.split(",")}
    linkable = Link.possible()
    if not linkable:
        print("no namespaces here: cases of the network are left out", flush=True)
    return {name: case for name, case in CASES.items() if linkable or case.world != "linked"}


def setup_of(arguments: argparse.Namespace) -> Setup:
    """Return the services' options: exact arithmetic, and no radix cache, so that every page must come back."""
    folder = resolve_model(arguments.model)
    verify = [
        f"--model={folder}",
        "--dtype=float32",
        "--device=cpu",
        "--disable-radix-cache",
        "--max-total-tokens=8192",
    ]
    draft = [f"--target-model-path={folder}", "--device=cpu"]
    return Setup(
        parse_options(VerifyOptions, [*verify, *arguments.verify_option]),
        parse_options(DraftOptions, [*draft, *arguments.draft_option]),
        GatewayOptions(),
        ModelConfig.from_folder(folder).vocab_size,
        arguments.seed,
        printer(arguments.verbose),
    )


async def run_all(arguments: argparse.Namespace, cases: dict[str, ChaosCase]) -> tuple[list[CaseOutcome], list[str]]:
    """Run all cases. A world starts once, and again after a case that broke it. Return outcomes, and what broke."""
    setup, asked = setup_of(arguments), questions(arguments.questions, arguments.max_tokens)
    timing = Timing(arguments.before, arguments.fault, arguments.after)
    outcomes: list[CaseOutcome] = []
    broken: list[str] = []
    known: list[KnownAnswer] = []
    left = list(cases.items())
    while left:
        kind = left[0][1].world
        async with open_world(kind, setup) as world:
            known = known or await answered_plainly(world.cluster.gateway_address, asked)
            while left and left[0][1].world == kind:
                name, case = left.pop(0)
                draw = random.Random(f"{arguments.seed} {name}")
                try:
                    outcomes.append(await run_case(name, case, world, known, arguments.clients, timing, draw))
                except Exception as error:  # the figures of the other cases are still useful
                    broken.append(f"{name}: {type(error).__name__}: {error}")
                    print(f"FAILED {broken[-1]}", flush=True)
                    break
                print_outcome(outcomes[-1])
    return outcomes, broken


def print_outcome(outcome: CaseOutcome) -> None:
    """Print a case's figures and complaints."""
    figures = {row.metric: row.value for row in outcome.rows("")}
    words = ("complete", "failed", "refused", "wrong_tokens", "stall_before_ms", "stall_ms", "tokens_per_second")
    words += ("during_over_before", "after_over_before", "recovery_ms", "pages_leaked")
    print(
        f"{outcome.name}: " + ", ".join(f"{word} {figures[word]:.3g}" for word in words if word in figures), flush=True
    )
    for text in outcome.complaints():
        print(f"FAILED {text}", flush=True)


def main() -> int:
    """Run all cases, judge them and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases, comma separated")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of what is random in faults")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--before", type=float, default=3.0, help="seconds of calm, and up to half as long again")
    parser.add_argument("--fault", type=float, default=4.0, help="seconds that a fault lasts")
    parser.add_argument("--after", type=float, default=3.0, help="seconds from the first accepted token on")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--label", default="smollm2-135m eagle3+ngram split b4")
    parser.add_argument("--verify-option", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--draft-option", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--verbose", action="store_true", help="print the services' log lines")
    parser.add_argument("--out", type=Path, help="write the report; `benchmarks.results_page` makes a table of it")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{name:20} {case.title}" for name, case in CASES.items()))
        return 0
    start = time.monotonic()
    outcomes, broken = asyncio.run(run_all(arguments, chosen(arguments.only)))
    if arguments.out:
        rows = [row for outcome in outcomes for row in outcome.rows(arguments.label)]
        write_report(arguments.out, "chaos", cpu_name(), rows, ("torch", "grpcio"))
    complaints = [*broken, *(text for outcome in outcomes for text in outcome.complaints())]
    print(f"{len(outcomes)} cases in {time.monotonic() - start:.0f} s, {len(complaints)} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
