"""The split in virtual time: the real engines of both services, with two simulated devices and scripted models.

The project's own code runs: growth and forests of the draft; engine, budget, calibration, holds and mirrors of verify.
Only time is invented: devices take as long as was measured, and so does host work, charged phase by phase
(`benchmarks.simulate.world.Costs`; `--cost` changes each of them). So the effect of a rule or of a faster phase on
tokens per second shows in a minute on a CPU, without noise. The models agree as often as SmolLM2 and its 0.10-noise
copy (`benchmarks.simulate.language.Language`).

python -m benchmarks.simulate.split --batch 1 16 --answers 32
python -m benchmarks.simulate.split --batch 16 --cost host=0.5 --set planner._STEP_NODES_PER_ROW=6

An EAGLE-3 head as measured with 16 requests, whose draft rests:
python -m benchmarks.simulate.split --batch 16 --answers 192 --spread 0.5 --flatten 1.2 \\
    --language fluent=0 shares=0.03,0.3 --cost step=0.55 line=1.2 gap_trees=0.9 host=2
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import outrider.drafting.model.batch_manager as batch_manager
import outrider.drafting.model.burst_grower as growth
import outrider.drafting.model.drafter as drafter
import outrider.drafting.model.planner as planner
import outrider.drafting.model.publisher as publisher
import verify_service.engine.engine as verify_engine
import verify_service.speculation.draft_wait as draft_wait
import verify_service.speculation.drafts as drafts
import verify_service.speculation.replica as replica
from benchmarks.simulate.draft import DraftService
from benchmarks.simulate.language import VOCAB, Language
from benchmarks.simulate.world import Actor, Costs, Notes, SimulatedVerifyInbox, SimulatedWorld
from outrider.models.capacity import TOKEN_BUCKETS
from outrider.protocol.generation import GenerationRequest, GenerationUpdate
from outrider.protocol.speculation import DraftMessage
from outrider.sampling.params import SamplingParams
from outrider_tools.bench.report import Row, cpu_name, write_report
from verify_service.engine.memory import Memory
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Growth, Pending, Result
from verify_service.engine.scheduler import EngineLimits
from verify_service.speculation.budget import CostModel

_MODULES = (publisher, growth, planner, drafter, batch_manager, draft_wait, replica, drafts)
MODULES = {one.__name__.rsplit(".", 1)[1]: one for one in _MODULES}
"""Modules whose constants `--set` can change."""
MAX_NODES, MAX_DEPTH, MAX_RUNNING, PROMPT = 63, 31, 32, 67
_LOOK_SECONDS = 5e-4
"""Time between two checks of verify's engine whether to launch the next round."""


@dataclass(frozen=True)
class Scene:
    """The scene to simulate."""

    batch: int
    answers: int
    tokens: int = 256
    """Mean tokens of an answer."""
    spread: float = 0.0
    """Share by which an answer may be shorter or longer. Without drafts, answers of equal length end together, and the
    next prompts are computed together; drafts end that."""
    speculate: bool = True
    seed: int = 0
    costs: Costs = field(default_factory=Costs)
    language: Language = field(default_factory=Language)


class Round(Pending):
    """A round that ends at a given time."""

    def __init__(self, actor: Actor, ends: float, gap: float | None, gpu: float, results: list[Result]) -> None:
        self.gap_seconds, self.gpu_seconds = gap, gpu
        self._actor, self.ends, self._results = actor, ends, results

    def done(self) -> bool:
        """Whether the round's time is up."""
        return self._actor.now >= self.ends

    def wait(self) -> list[Result]:
        """Return the results."""
        self._actor.now = max(self._actor.now, self.ends)
        return self._results


class Device:
    """Runs rounds: see Executor. The target continues the request's prompt as the language does."""

    launches_ahead = True

    def __init__(self, actor: Actor, scene: Scene) -> None:
        self._actor, self._scene = actor, scene
        self._rounds: list[Round] = []
        """Rounds that have not ended, and the last one that was launched."""
        self._text = cache(lambda prompt: scene.language.text(prompt, round((1 + scene.spread) * scene.tokens) + 1))

    def launch(self, entries: Sequence[Entry], growth: Growth | None = None) -> Round:
        """See Executor. A round that is launched during another one begins when that one ends."""
        costs, now = self._scene.costs, self._actor.now
        decoded = [entry for entry in entries if entry.samples]
        chunk = sum(entry.num_extend for entry in entries if not entry.samples)
        gpu = costs.of_round(sum(entry.num_tokens for entry in decoded), len(decoded)) if decoded else 0.0
        prefill = 1e-3 * (costs.prefill + costs.prefill_token * chunk) if chunk else 0.0
        results = [Result(self._accepted(entry)) if entry.samples else Result() for entry in entries]
        before = self._rounds[-1].ends if self._rounds else None
        gap = None if before is None else max(now - before, 0.0)
        ends = max(now, before or 0.0) + gpu + prefill
        self._rounds = [*(one for one in self._rounds if one.ends > now), Round(self._actor, ends, gap, gpu, results)]
        return self._rounds[-1]

    def dry_run(self, entries: Sequence[Entry]) -> None:
        """See Executor."""

    def idle(self, entries: Sequence[Entry]) -> None:
        """Wait until something arrives, a round is over, or the next one may be launched."""
        now = self._actor.now
        ends = [one.ends for one in self._rounds if one.ends > now]
        self._actor.wait(min(ends[0], now + _LOOK_SECONDS) if ends else now + 1e-5)

    def forget(self, request: Request) -> None:
        """See Executor."""

    def _accepted(self, entry: Entry) -> list[int]:
        request, nodes = entry.request, entry.nodes
        text = self._text(tuple(request.tokens[: request.prompt_len]))
        place = entry.start + entry.num_extend - request.prompt_len
        below = {edge: node for node, edge in enumerate(zip(nodes.parents, nodes.token_ids, strict=True))}
        node, count = below.get((-1, text[place])), 1
        while node is not None and place + count < len(text):
            node = below.get((node, text[place + count]))
            count += 1
        return text[place : place + count]


@dataclass(eq=False)
class Port:
    """Verify's end of the line: see DraftConnection."""

    send: Callable[[list[Any]], None]
    address: str = "draft"

    def reset(self) -> None:
        """See DraftConnection."""
        raise RuntimeError("the draft's session is reset")


class Simulation:
    """A verify engine, a draft service, and clients that ask for one answer after the other."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.world = SimulatedWorld(1e-3 * scene.costs.line)
        self.notes = Notes()
        self.ends: Counter[str] = Counter()
        """Number of bursts by the reason of their end."""
        self._actor = self.world.verify
        self._luck = random.Random(scene.seed)
        self._waiting: list[tuple[list[int], int]] = []
        """Prompts, and the numbers of tokens of their answers."""
        self._left = 0
        self._device = Device(self._actor, scene)
        self.draft = DraftService(self.world.draft, scene.costs, scene.language, self._deliver)
        self._port = Port(self.draft.send)
        self.engine: verify_engine.VerifyEngine

    def run(self) -> dict[str, float]:
        """Return the figures of all answers except a first batch, which warms up."""
        with self._in_virtual_time():
            self.engine = self._make_engine()
            self.world.run(self._verify, self.draft.live)
        return self._figures

    def _verify(self) -> None:
        self.engine.draft_connected(self._port)
        self._ask(self.scene.batch)
        self.engine.run()

    def _ask(self, answers: int) -> None:
        """Let clients begin to ask for `answers` answers."""
        self._left = answers
        least, most = (round(self.scene.tokens * (1 + sign * self.scene.spread)) for sign in (-1, 1))
        prompts = [[self._luck.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(answers)]
        self._waiting = [(prompt, self._luck.randint(least, most) if most > least else most) for prompt in prompts]
        for _ in range(min(self.scene.batch, answers)):
            self._submit(self._actor.now)

    def _submit(self, at: float) -> None:
        if self._waiting:
            prompt, count = self._waiting.pop()
            self._actor.post(at, lambda _: self._begin(prompt, count))

    def _begin(self, prompt: list[int], count: int) -> None:
        params = SamplingParams(temperature=0.0)
        self.engine.submit(
            Request.begin(
                GenerationRequest("r", prompt, params, count, disable_speculation=not self.scene.speculate),
                self._update,
                VOCAB,
            )
        )

    def _update(self, update: GenerationUpdate) -> None:
        if not update.last:
            return
        if update.error is not None:
            raise RuntimeError("an answer failed") from update.error
        self._left -= 1
        self._submit(self._actor.now + 1e-3 * self.scene.costs.client)
        if self._left:
            return
        if hasattr(self, "_began"):
            self._figures = self._work_out()
            self.engine.stop()
            return
        self._began = self._actor.now + 1e-3 * self.scene.costs.client
        self._actor.post(self._began, lambda _: self._start_to_count())

    def _start_to_count(self) -> None:
        draft = self.draft
        self.notes.__init__()  # type: ignore[misc]
        draft.totals.clear()
        draft.requests.commits.clear()
        self.ends.clear()
        self.world.draft.spent.clear()
        self._busy = draft.runner.busy
        self._ask(self.scene.answers)

    def _deliver(self, at: float, messages: list[DraftMessage]) -> None:
        """Deliver the draft's messages, on the draft's thread and in the draft's time."""
        for message in messages:
            self._actor.post(at, partial(self._receive, message))

    def _receive(self, message: DraftMessage, arrived_at: float) -> None:
        self._actor.spend("take_grow", self.scene.costs.take_grow)
        self.engine.drafts.receive(self._port, [message], arrived_at)

    def _make_engine(self) -> verify_engine.VerifyEngine:
        costs = self.scene.costs
        widths = [width for width in TOKEN_BUCKETS if width < MAX_RUNNING + MAX_NODES] + [MAX_RUNNING + MAX_NODES]
        cost = CostModel(
            [costs.of_round(width, 1) for width in widths],
            widths,
            lambda tokens: next((width for width in widths if width >= tokens), tokens),
        )
        limits = EngineLimits(
            VOCAB, 1 << 20, max_running=MAX_RUNNING, chunk_size=2048, max_nodes=MAX_NODES, max_hold_seconds=0.05,
            root_apart=True, max_depth=MAX_DEPTH, max_round_tokens=MAX_RUNNING + MAX_NODES, spin=True,
        )  # fmt: skip
        memory = Memory(MAX_RUNNING * 64, 16, keep_prefixes=False)
        engine = verify_engine.VerifyEngine(
            self._device, memory, cost, limits, self.notes, SimulatedVerifyInbox(self._actor)
        )
        engine.drafts.clock = self._actor.clock
        warmer: Any = SimpleNamespace(resume=lambda: None, run=self._device.idle)
        engine._warmer = warmer
        self._charge(engine)
        return engine

    def _charge(self, engine: verify_engine.VerifyEngine) -> None:
        """Charge virtual time for verify's host work."""
        costs, running = self.scene.costs, engine.scheduler.running
        trees, drafts = self.scene.speculate, engine.drafts

        def num_commits() -> int:
            return 0 if drafts.resting else len(running)

        for owner, name, ms in (
            (engine.scheduler, "plan", lambda: costs.gap + costs.gap_row * max(len(running) - 1, 0)),
            (engine.scheduler, "choose", lambda *_: costs.gap_trees * (trees and not drafts.resting)),
            (engine.scheduler, "take", lambda plan: costs.gap_node * plan.choice.num_nodes),
            (engine._postprocessor, "_send_commits", lambda _: costs.send_commit * num_commits()),
            (engine.drafts, "learn", lambda: costs.settle + costs.settle_row * len(running)),
        ):
            setattr(owner, name, self._actor.charged(name, getattr(owner, name), ms))

    @contextmanager
    def _in_virtual_time(self) -> Iterator[None]:
        """Let both services read the world's clocks, and functions of their modules take virtual time."""
        changes = [
            *self.draft.module_changes(),
            (verify_engine, "time", SimpleNamespace(monotonic=self._actor.clock)),
            (growth.BurstGrower, "_land", self._noting_ends(growth.BurstGrower._land)),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
        for owner, name, value in changes:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)

    def _noting_ends(self, land: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def noting(grown: Any, active: Any) -> None:
            plan, lists = active.plan, grown._batch_manager
            reasons = {
                "outdated": active.is_outdated,
                "all steps": plan.queued_steps >= plan.most_steps,
                "opening or closing": lists._opening or lists._closing,
                "changes": lists._changed,
                "incomplete": lists._incomplete,
            }
            self.ends[next((name for name, holds in reasons.items() if holds), "nothing to run")] += 1
            land(grown, active)

        return noting

    def _work_out(self) -> dict[str, float]:
        notes, draft, seconds = self.notes, self.draft, self._actor.now - self._began
        rounds = max(notes.rounds, 1)
        cuts = statistics.quantiles(notes.answers, n=100) if len(notes.answers) > 1 else [0.0] * 99
        figures = {
            "tokens_per_second": notes.tokens / seconds,
            "accept_length": notes.tokens / max(notes.request_rounds, 1),
            "nodes": notes.drafted_tokens / rounds,
            "hit_rate": notes.hits / max(notes.drafted, 1),
            "ready_rate": notes.found / max(notes.drafted, 1),
            "rounds": notes.rounds,
            "round_wall_ms": 1e3 * seconds / rounds,
            "gpu_ms": 1e3 * statistics.mean(notes.gpu),
            "gap_ms": 1e3 * statistics.mean(notes.gaps),
            "hold_ms": 1e3 * sum(notes.held) / rounds,
            "held_rounds": sum(map(bool, notes.held)) / rounds,
            "answer_ms_p50": 1e3 * cuts[49],
            "answer_ms_p90": 1e3 * cuts[89],
            "answer_ms_p99": 1e3 * cuts[98],
            "device_busy": (draft.runner.busy - self._busy) / seconds,
        }
        for name, count in draft.totals.items():
            figures[f"{name}_per_s"] = count / seconds
        for outcome, count in draft.requests.commits.items():
            figures[f"commits_{outcome.value}_per_s"] = count / seconds
        for reason, count in self.ends.items():
            figures[f"ends, {reason}_per_s"] = count / seconds
        for what, spent in sorted(self.world.draft.spent.items()):
            figures[f"host, {what}"] = spent / seconds
        return figures


def parse_costs(changes: Sequence[str]) -> Costs:
    """Return costs with changes: name=ms, or name=factor for tables. A change of `step` is one of `lone_step`, too."""
    usual = Costs()
    known = {one.name for one in fields(Costs)}
    values: dict[str, Any] = {}
    for change in changes:
        name, value = change.split("=")
        values[name] = float(value)
    if "step" in values:
        values.setdefault("lone_step", values["step"])
    if unknown := values.keys() - known:
        raise SystemExit(f"--cost: there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    for name, factor in values.items():
        if isinstance(table := getattr(usual, name), tuple):
            values[name] = tuple((size, factor * taken) for size, taken in table)
    return replace(usual, **values)


def parse_language(changes: Sequence[str], flatten: float) -> Language:
    """Return a language with changes: name=value, or name=value,value,... for a tuple."""
    known = {one.name for one in fields(Language)}
    values: dict[str, Any] = {"flatten": flatten}
    for change in changes:
        name, value = change.split("=")
        if name not in known:
            raise SystemExit(f"--language: there is no {name}; there are {', '.join(sorted(known))}")
        several = tuple(float(one) for one in value.split(","))
        values[name] = several if isinstance(getattr(Language(), name), tuple) else several[0]
    return Language(**values)


def main() -> None:
    """Parse options, simulate and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--answers", type=int, default=0, help="0: 6 of one at a time, else two of each client")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--spread", type=float, default=0.0, help="part by which answers are shorter or longer")
    parser.add_argument("--seeds", type=int, default=1, help="runs, each with other texts")
    parser.add_argument(
        "--cost", nargs="*", default=[], help="name=ms, name=factor for tables: see benchmarks.simulate.world.Costs"
    )
    parser.add_argument(
        "--language", nargs="*", default=[], help="name=value: see benchmarks.simulate.language.Language"
    )
    parser.add_argument("--set", nargs="*", default=[], help="module._NAME=value, of " + ", ".join(MODULES))
    parser.add_argument("--flatten", type=float, default=1.0, help="above 1: the draft's scores promise too little")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    arguments = parser.parse_args()
    for change in arguments.set:
        name, value = change.split("=")
        module, constant = name.split(".")
        setattr(MODULES[module], constant, type(getattr(MODULES[module], constant))(float(value)))
    rows: list[Row] = []
    for batch in arguments.batch:
        answers = arguments.answers or (6 if batch == 1 else 2 * batch)
        language = parse_language(arguments.language, arguments.flatten)
        scene = Scene(
            batch, answers, arguments.tokens, arguments.spread, True, 0, parse_costs(arguments.cost), language
        )
        scenes = [replace(scene, seed=seed) for seed in range(arguments.seeds)]
        runs = [Simulation(one).run() for one in scenes]
        plain = [Simulation(replace(one, speculate=False)).run()["tokens_per_second"] for one in scenes]
        names = list(dict.fromkeys(name for run in runs for name in run))
        means = {name: float(np.mean([run.get(name, 0.0) for run in runs])) for name in names}
        means["speedup"] = means["tokens_per_second"] / float(np.mean(plain))
        print(f"batch {batch}, {answers} answers: {means['speedup']:.3f} times plain")
        for name, value in means.items():
            print(f"  {name:28}{value:12.3f}")
        case = f"llama-8b standalone split simulated b{batch} bf16 greedy"
        rows += [Row(case, name.replace(", ", "_").replace(" ", "_"), value, "") for name, value in means.items()]
    if arguments.out:
        write_report(arguments.out, "simulate_split", cpu_name(), rows, ("numpy",))


if __name__ == "__main__":
    main()
