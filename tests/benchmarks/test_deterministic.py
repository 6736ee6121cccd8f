"""What the benchmark of exactness takes for a proof, and what services are told by its command line."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.common import add_service_arguments, draft_options, verify_options
from benchmarks.serving.deterministic import EXACT, FAST, Mode, PromptRun, cost
from benchmarks.split.cases import SplitCase
from benchmarks.split.load import CaseAnswers

TEXTS = [[1, 2], [3, 4]]
PLAIN = PromptRun(SplitCase("plain"), scarce=False)
DRAFTED = PromptRun(SplitCase("ngram", batch=4), scarce=False)
SCARCE = PromptRun(SplitCase("ngram", batch=4), scarce=True)


def answers(texts: list[list[int]] = TEXTS, seconds: float = 1.0, accepted: int = 1) -> CaseAnswers:
    return CaseAnswers(texts, seconds, rounds=4, accepted=accepted)


def mode(name: str, *runs: tuple[PromptRun, CaseAnswers, float]) -> Mode:
    made = Mode(name, ["a", "b"], argparse.Namespace(label="m", draft=[]))
    for run, given, preempted in runs:
        made._judge(run, given, preempted)
    return made


def test_equal_answers_of_runs_that_drafted_and_preempted_are_no_trouble() -> None:
    made = mode(EXACT, (PLAIN, answers(accepted=0), 0), (DRAFTED, answers(), 0), (SCARCE, answers(), 3))
    assert made.troubles == []
    assert [row.value for row in made.rows if row.metric == "equal_answers"] == [2, 2, 2]


@pytest.mark.parametrize(
    ("run", "given", "preempted", "word"),
    [
        (DRAFTED, answers([[1, 2], [3, 5]]), 0, "1 answers differ"),
        (DRAFTED, answers(accepted=0), 0, "accepted"),
        (SCARCE, answers(), 0, "preempted"),
    ],
)
def test_a_run_that_differs_or_proves_nothing_is_told(
    run: PromptRun, given: CaseAnswers, preempted: float, word: str
) -> None:
    (text,) = mode(EXACT, (PLAIN, answers(), 0), (run, given, preempted)).troubles
    assert word in text.split(": ")[1]
    assert mode(FAST, (PLAIN, answers(), 0), (run, given, preempted)).troubles == []


def test_the_cost_is_the_speed_that_is_left_run_by_run() -> None:
    exact = mode(EXACT, (PLAIN, answers(), 0), (DRAFTED, answers(seconds=2.0), 0))
    fast = mode(FAST, (DRAFTED, answers(), 0))
    (row,) = cost(exact, fast, "m")
    assert (row.case, row.metric, row.value) == ("m ngram b4 greedy", "deterministic_over_fast", 0.5)


def test_the_command_line_has_the_last_word_on_services() -> None:
    parser = argparse.ArgumentParser()
    add_service_arguments(parser, "m")
    arguments = parser.parse_args(["--model=a", "--verify-option=--page-size=8", "--draft-option=--capacity=4096"])
    verify = verify_options(arguments, ["--page-size=32", "--max-total-tokens=4096"])
    assert (verify.model, verify.page_size, verify.max_total_tokens) == ("a", 8, 4096)
    draft = draft_options(arguments, ["--capacity=8192"])
    assert draft.capacity == 4096 and draft.speculative_algorithm == ("NGRAM",), "no head ships for it"
