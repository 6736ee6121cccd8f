"""--deterministic on a GPU: tokens are the same bit for bit, whatever the drafts, the other requests and the cache.

python -m benchmarks.serving.deterministic --prompts mt_bench.jsonl --out benchmarks/results/deterministic_h200.json
python -m benchmarks.serving.deterministic --prompts mt_bench.jsonl --model /models/llama-8b --label llama-8b \
    --verify-device cuda:0 --draft-device cuda:1 --draft eagle3=/models/eagle3 --drafters ngram eagle3 eagle3+ngram
python -m benchmarks.serving.deterministic --prompts mt_bench.jsonl --model /models/llama-8b --label llama-8b \
    --draft eagle3=/models/eagle3 --drafters eagle3,colocated

Every prompt is answered greedily and at temperature 0.8 with a fixed seed: without a draft, one at a time and in a
batch; with each of the `--drafters`, in the same ways; and with so little KV memory that requests are preempted and
resumed. Answers are compared token by token with those of the first run. The same runs without --deterministic show its
cost: `deterministic_over_fast`, a ratio of tokens per second. On a CPU, float32, which is equal up to near ties, stands
in for --deterministic. Drafters are written as for benchmarks.split, and --draft NAME=PATH gives a drafter's model;
n-gram drafts know the answers of earlier runs.

Exit code 1 if an answer of the exact mode differs, or if its runs prove nothing: no draft token was accepted, or no
request was preempted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.common import add_service_arguments, device_name, printer, verify_options
from benchmarks.split.cases import SplitCase
from benchmarks.split.load import CaseAnswers, answer_all, read_prompts, warm_up
from benchmarks.split.services import StartedDraft, StartedTarget
from outrider_tools.bench.report import Row, write_report

EXACT, FAST = "deterministic", "fast"
TEMPERATURES = (0.0, 0.8)
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
SNAPSHOT_SECONDS = 0.3
"""Within this time verify has reported its last rounds."""


@dataclass(frozen=True)
class PromptRun:
    """One way to answer all prompts."""

    case: SplitCase
    scarce: bool
    """Whether KV memory is enough only for a few requests."""

    def title(self, *words: str) -> str:
        """Return the case's name in results, with `words` after the drafter."""
        mode = self.case.mode if self.case.colocated else ""
        parts = (self.case.drafter, mode, "preempted" if self.scarce else "", *words, self.case.decoding)
        return " ".join(part for part in parts if part)


class Mode:
    """All runs with or without --deterministic, on services that it starts."""

    def __init__(self, name: str, prompts: list[str], arguments: argparse.Namespace) -> None:
        self.name = name
        self.rows: list[Row] = []
        self.troubles: list[str] = []
        self.speeds: dict[str, float] = {}
        """Tokens per second by run; the names do not contain the mode."""
        self._prompts = prompts
        self._arguments = arguments
        self._paths = {
            label.lower(): Path(path) for label, _, path in (text.partition("=") for text in arguments.draft)
        }
        self._truth: dict[float, list[list[int]]] = {}
        self._dtype = ""

    def run(self) -> None:
        """Do all runs. Raises ServiceFailedError if a service does not start."""
        batches = sorted(self._arguments.batches)
        cases = [SplitCase.parse(text) for text in self._arguments.drafters]
        split = [case for case in cases if not case.colocated]
        self._serve([SplitCase("plain"), *split], batches, scarce=False)
        if self._arguments.scarce_tokens and split:
            self._serve(split, batches[-1:], scarce=True)
        for case in cases:
            if case.colocated:
                self._serve([case], batches, scarce=False)
                if self._arguments.scarce_tokens:
                    self._serve([case], batches[-1:], scarce=True)

    def _serve(self, cases: Sequence[SplitCase], batches: Sequence[int], scarce: bool) -> None:
        """Run on one verify service. Each drafter has its own draft service, unless verify drafts itself."""
        arguments = self._arguments
        exact = "--deterministic" if on_gpu(arguments) else "--dtype=float32"
        argv = [exact] if self.name == EXACT else []
        on_line = printer(arguments.verbose)
        remote = [case for case in cases if case.has_service]
        for case in cases:
            argv += case.verify_arguments(self._paths)
        options = verify_options(arguments, argv)
        if scarce:
            options = replace(options, max_total_tokens=arguments.scarce_tokens)
        with StartedTarget(options, [case.drafter for case in remote], on_line) as target:
            target.start()
            print(f"{self.name}: verify started in {target.start_seconds:.1f} s", flush=True)
            dtype = target.cluster.verify.ready_info["dtype"]
            self._dtype = SHORT_DTYPES.get(dtype, dtype)
            for case in cases:
                if case not in remote:
                    self._answer_in(target, case, batches, scarce)
                    continue
                common = [f"--device={arguments.draft_device}", f"--target-model-path={arguments.model}"]
                draft = StartedDraft(case.draft_options(self._paths, [*common, *arguments.draft_option]), on_line)
                try:
                    draft.start()
                    target.connect(case.drafter, draft)
                    self._answer_in(target, case, batches, scarce)
                finally:
                    draft.close()
                target.disconnect(case.drafter)

    def _answer_in(self, target: StartedTarget, case: SplitCase, batches: Sequence[int], scarce: bool) -> None:
        """Answer all prompts in each batch size, at each temperature."""
        address = target.cluster.gateway_address
        for batch in batches:
            warm_up(address, replace(case, batch=batch), [], self._arguments.warm_tokens)
            for temperature in TEMPERATURES:
                run = PromptRun(replace(case, batch=batch, temperature=temperature), scarce)
                before = target.page()
                answers = asyncio.run(answer_all(address, self._prompts, run.case, self._arguments.max_tokens))
                time.sleep(SNAPSHOT_SECONDS)
                preempted = target.page().since(before).total("outrider_verify_preemptions")
                self._judge(run, answers, preempted)

    def _judge(self, run: PromptRun, answers: CaseAnswers, preempted: float) -> None:
        """Compare answers with the first run's, and note the figures."""
        truth = self._truth.setdefault(run.case.temperature, answers.texts)
        equal = sum(one == other for one, other in zip(answers.texts, truth, strict=True))
        speed = answers.tokens / answers.seconds
        self.speeds[run.title(f"b{run.case.batch}")] = speed
        title = f"{self._arguments.label} {run.title(self.name, f'b{run.case.batch}', self._dtype)}"
        self.rows.append(Row(title, "equal_answers", equal, "answers"))
        self.rows.append(Row(title, "tokens_per_second", speed, "tokens/s"))
        accept_length = answers.tokens / max(answers.rounds, 1)
        if run.case.drafts:
            self.rows.append(Row(title, "accept_length", accept_length, "tokens"))
        if run.scarce:
            self.rows.append(Row(title, "preemptions", preempted, "requests"))
        text = f"{equal:3} of {len(truth)} equal, {speed:8.1f} tokens/s, {accept_length:.2f} a round"
        print(f"{title:70} {text}, {preempted:g} preempted", flush=True)
        if self.name == EXACT:
            found = {
                f"{len(truth) - equal} answers differ": equal < len(truth),
                "no draft token was accepted": run.case.drafts and not answers.accepted,
                "no request was preempted; lower --scarce-tokens": run.scarce and not preempted,
            }
            self.troubles += [f"{title}: {text}" for text, there in found.items() if there]


def on_gpu(arguments: argparse.Namespace) -> bool:
    """Whether verify runs on a GPU."""
    return torch.cuda.is_available() and not arguments.verify_device.startswith("cpu")


def cost(exact: Mode, fast: Mode, label: str) -> list[Row]:
    """Return the share of tokens per second that --deterministic keeps, run by run."""
    return [
        Row(f"{label} {title}", "deterministic_over_fast", speed / fast.speeds[title], "ratio")
        for title, speed in exact.speeds.items()
        if title in fast.speeds
    ]


def main() -> int:
    """Run all modes and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_service_arguments(parser, "smollm2-135m")
    parser.add_argument("--limit", type=int, default=80, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--warm-tokens", type=int, default=32, help="of answers before those that count")
    parser.add_argument("--draft", action="append", default=[], metavar="NAME=PATH", help="a drafter's model")
    parser.add_argument("--drafters", nargs="*", default=["ngram"])
    parser.add_argument("--modes", nargs="+", choices=(EXACT, FAST), default=[EXACT, FAST])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--scarce-tokens", type=int, default=8704, help="KV memory that preempts; 0: no such runs")
    arguments = parser.parse_args()
    prompts = read_prompts(arguments.prompts)[: arguments.limit]
    done: dict[str, Mode] = {}
    for name in arguments.modes:
        done[name] = Mode(name, prompts, arguments)
        done[name].run()
        rows = [row for mode in done.values() for row in mode.rows]
        rows += cost(done[EXACT], done[FAST], arguments.label) if len(done) == 2 else []
        if arguments.out:
            write_report(arguments.out, "deterministic", device_name(), rows, ("torch", "triton"))
    for row in rows:
        if row.metric == "deterministic_over_fast":
            print(f"{row.case:70} {row.value:.3f} of the speed without --deterministic")
    troubles = [text for mode in done.values() for text in mode.troubles]
    for text in troubles:
        print("FAILED", text)
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
