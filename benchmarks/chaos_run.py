"""One case of `chaos.py` from start to end, and what was measured."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from chaos_cases import Case
from chaos_load import Load, Question, Record
from chaos_worlds import World
from report import Row
from soak import settle

RECOVERY_SECONDS = 45.0
"""A refused draft is asked again every 30."""
WARM_ANSWERS = 4


@dataclass(frozen=True)
class Timing:
    """How long the parts of a case last, in seconds."""

    before: float = 3.0
    fault: float = 4.0
    after: float = 3.0


@dataclass
class Outcome:
    """What a case has shown."""

    name: str
    case: Case
    record: Record
    started: float
    """When the load was warm; like all times here of the monotonic clock, in seconds."""
    fault: float
    lifted: float
    accepted: float | None
    """When the first draft token was accepted after that; None if none was."""
    ended: float
    leaked: dict[str, float]
    """Gauges that are not 0 with nobody there, pages among them."""
    alive: int
    services: int

    @property
    def pages(self) -> float:
        """KV pages that nobody gave back."""
        return self.leaked.get("outrider_verify_kv_pages_used", 0.0)

    def rows(self, label: str) -> list[Row]:
        """Figures, for the report."""
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
        """What must not be, in words."""
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
    name: str, case: Case, world: World, asked: Sequence[Question], clients: int, timing: Timing, draw: random.Random
) -> Outcome:
    """Bring a fault over services under load."""
    async with Load(world.cluster.gateway_address, asked, clients) as load:
        await load.answers(WARM_ANSWERS)
        await load.accepted()
        started = time.monotonic()
        await asyncio.sleep(timing.before * (1 + 0.5 * draw.random()))
        fault = time.monotonic()
        async with case.fault(world, draw):
            await asyncio.sleep(timing.fault * case.lasts)
        lifted = time.monotonic()
        accepted = None
        with suppress(TimeoutError):  # it is complained of
            accepted = await load.accepted(RECOVERY_SECONDS)
        await asyncio.sleep(timing.after)
        ended = time.monotonic()
    rest = await asyncio.to_thread(settle, world.cluster)
    leaked = {gauge: value for gauge, value in rest.gauges.items() if value}
    services = len(world.cluster.services)
    return Outcome(name, case, load.record, started, fault, lifted, accepted, ended, leaked, world.num_alive, services)
