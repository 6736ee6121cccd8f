"""Drafting on one GPU while another one verifies: speed, accept length, hits, and the parts of a round's time.

python -m benchmarks.split --model /models/llama-8b --prompts mt_bench.jsonl --verify-device cuda:0 \
    --draft-device cuda:1 --draft standalone=/models/noisy-0.10 --draft eagle3=/models/eagle3 \
    --cases plain standalone standalone,lockstep,steps=4,topk=1 standalone,lockstep,steps=8,topk=4,nodes=32 ngram \
    eagle3 standalone,t=0.8 standalone,t=0.8,rank_by_noise=false plain,b=16 standalone,b=16 \
    --out benchmarks/results/split_h200.json

A case is `plain`, or drafters as in --speculative-algorithm in lower case, joined by `+`, each with `@LABEL` if it
takes another model than the one given as --draft NAME=PATH. Further words follow after commas: `lockstep`, `colocated`
or both, `json` for answers of a schema, `b=` requests at once, `t=` temperature, `ctx=` tokens of a prompt, `out=`
tokens of an answer, `n=` prompts, and options of the draft service (`steps`, `topk`, `nodes` for the speculative ones),
or of verify if it drafts itself.

Colocated cases draft inside verify's rounds: each such drafter has a verify service, and a draft service only serves
n-grams and further models (`eagle3+ngram,colocated`); in lockstep, too, they always grow as much as their options
allow. One verify service answers all cases that it can; lockstep needs another one, and so does each drafter inside
rounds. They start on the same GPU one after the other, or `--targets-at-once` together if they fit. Draft services are
started anew for every case, several at a time, but nothing starts while a case is measured.

The first `--limit` prompts are answered, at least two for each place of a batch; `--max-tokens` tokens each, past the
end of sequence, through the gateway. Texts are compared with those of plain decoding in the same batch: on a GPU
without --deterministic, rounding may make them differ.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.common import Cost, add_service_arguments, cost_of, device_name, printer, verify_options
from benchmarks.split.cases import SplitCase
from benchmarks.split.figures import Measured, compare, table, work_out
from benchmarks.split.load import answer_all, prompts_for, read_prompts, warm_up
from benchmarks.split.services import Lines, StartedDraft, StartedTarget, start_together
from outrider.errors import OutriderError
from outrider.models.store import resolve_model
from outrider.models.store_folder import TOKENIZER_FILE
from outrider_tools.bench.report import write_report


class SplitBench:
    """All cases, on services that it starts."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.cases = [SplitCase.parse(text) for text in arguments.cases]
        self.paths = {label: Path(path) for label, _, path in (text.partition("=") for text in arguments.draft)}
        self.runs: list[Measured] = []
        self.failed: list[str] = []
        self._questions = read_prompts(arguments.prompts)
        self._tokenizer = Tokenizer.from_file(str(resolve_model(arguments.model) / TOKENIZER_FILE))
        self._targets: dict[str, StartedTarget] = {}
        self._end = time.monotonic() + arguments.stop_after

    def run(self) -> None:
        """Run all cases, and note in `failed` those that fail."""
        names = list(dict.fromkeys(case.target for case in self.cases))
        at_once = self.arguments.targets_at_once
        for start in range(0, len(names), at_once):
            with ExitStack() as stack:
                self._start_targets(names[start : start + at_once], len(names) > 1, stack)
                self._run_with_targets(stack)
            self._targets.clear()

    def _run_with_targets(self, stack: ExitStack) -> None:
        """Run the cases of the verify services that are up."""
        cases = [case for case in self.cases if case.target in self._targets]
        for case in cases:
            if not case.has_service:
                self._attempt(case, None)
        drafting, at_once = [case for case in cases if case.has_service], self.arguments.drafts_at_once
        for start in range(0, len(drafting), at_once):
            for case, draft in self._started(drafting[start : start + at_once], stack):
                self._attempt(case, draft)

    def _start_targets(self, names: Sequence[str], sized: bool, stack: ExitStack) -> None:
        """Start these verify services together. If `sized`, their KV caches do not take all free memory."""
        targets = {}
        for name in names:
            cases = [case for case in self.cases if case.target == name]
            argv = ["--disable-radix-cache", *cases[0].verify_arguments(self.paths)]
            if sized:
                # The same size for all, enough for every batch that is measured here.
                argv.append("--max-total-tokens=65536")
            keys = sorted({_key(case) for case in cases if case.has_service})
            target = StartedTarget(verify_options(self.arguments, argv), keys, self._printer(f"verify {name}".strip()))
            targets[name] = stack.enter_context(target)
        for (name, target), error in zip(targets.items(), start_together(list(targets.values())), strict=True):
            if error is None:
                print(f"verify {name or 'split'} started in {target.start_seconds:.1f} s", flush=True)
                self._targets[name] = target
            else:
                for case in self.cases:
                    if case.target == name:
                        self._fail(case, error)

    def _started(self, cases: Sequence[SplitCase], stack: ExitStack) -> Iterator[tuple[SplitCase, StartedDraft]]:
        """Yield the draft services of these cases, one after the other, once all of them have been started."""
        if time.monotonic() > self._end:
            self.failed += [f"{self._title(case)}: no time left" for case in cases]
            return
        arguments = self.arguments
        share = 0.5 / min(arguments.drafts_at_once, len(cases))
        common = [f"--device={arguments.draft_device}", f"--target-model-path={arguments.model}"]
        common += [f"--mem-fraction-static={share:.3f}", *arguments.draft_option]
        drafts = []
        for case in cases:
            try:
                options = case.draft_options(self.paths, common)
            except OutriderError as refusal:
                self._fail(case, refusal)
            else:
                drafts.append((case, StartedDraft(options, self._printer(f"draft {self._title(case)}"))))
        for _, draft in drafts:
            stack.callback(draft.close)
        errors = start_together([draft for _, draft in drafts])
        for (case, draft), error in zip(drafts, errors, strict=True):
            if error is None:
                yield case, draft
            else:
                self._fail(case, error)

    def _attempt(self, case: SplitCase, draft: StartedDraft | None) -> None:
        if time.monotonic() > self._end:
            self.failed.append(f"{self._title(case)}: no time left")
            return
        target = self._targets[case.target]
        try:
            if draft is not None:
                target.connect(_key(case), draft)
            measured = self._measure(case, target, draft)
        except Exception as error:
            self._fail(case, error)
        else:
            self.runs.append(measured)
            compare(self.runs)
            print(table([measured]), flush=True)
            self._report()
        if draft is not None:
            draft.close()
            target.disconnect(_key(case))

    def _measure(self, case: SplitCase, target: StartedTarget, draft: StartedDraft | None) -> Measured:
        arguments, address = self.arguments, target.cluster.gateway_address
        prompts = prompts_for(case, self._questions, arguments.limit, self._tokenizer)
        warm_up(address, case, prompts, arguments.warm_tokens)
        verify, page = target.page(), draft.page() if draft else None
        used = cost_of(draft.pid) if draft else None
        answers = asyncio.run(answer_all(address, prompts, case, case.num_tokens or arguments.max_tokens))
        # Verify reports its last rounds with a snapshot, at most a quarter of a second later.
        time.sleep(0.3)
        measured = Measured(case, self._title(case), answers, target.page().since(verify))
        if draft is not None and page is not None and used is not None:
            now = cost_of(draft.pid)
            measured.draft = draft.page().since(page)
            measured.draft_cost = Cost(now.cpu_seconds - used.cpu_seconds, now.resident_mib, now.gpu_mib)
            measured.start_seconds = draft.start_seconds
        work_out(measured)
        return measured

    def _report(self) -> None:
        if self.arguments.out:
            rows = [row for run in self.runs for row in run.rows()]
            write_report(self.arguments.out, "split", device_name(), rows, ("torch", "grpcio", "numpy"))

    def _title(self, case: SplitCase) -> str:
        return case.title(self.arguments.label, self.arguments.dtype)

    def _fail(self, case: SplitCase, error: Exception) -> None:
        text = f"{self._title(case)}: {type(error).__name__}: {error}"
        self.failed.append(text.splitlines()[0])
        print(f"FAILED {text}", flush=True)

    def _printer(self, name: str) -> Lines:
        print_line = printer(self.arguments.verbose)
        return lambda _, line: print_line(name, line)


def _key(case: SplitCase) -> str:
    """Return what verify learns about separately: drafters, and rules of ranking, give scores different meanings."""
    return f"{case.drafter} {case.options.get('rank_by_noise', '')}"


def parse_arguments(argv: Iterable[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16", help="the number format's name in results")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--warm-tokens", type=int, default=96)
    parser.add_argument("--draft", action="append", default=[], metavar="LABEL=PATH")
    parser.add_argument("--cases", nargs="+", default=["plain", "ngram"])
    parser.add_argument("--targets-at-once", type=int, default=1, help="verify services that are up together")
    parser.add_argument("--drafts-at-once", type=int, default=1, help="draft services started together")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds after which no case begins")
    add_service_arguments(parser, "llama-8b")
    return parser.parse_args(None if argv is None else list(argv))


def main() -> int:
    """Run all cases and report."""
    bench = SplitBench(parse_arguments())
    start = time.perf_counter()
    bench.run()
    print(f"\n{table(bench.runs)}\n{time.perf_counter() - start:.0f} s in all")
    for text in bench.failed:
        print("FAILED", text[:300])
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
