"""Counts and figures of an evaluation, and reports on evaluations and trainings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outrider.cli.terminal import aligned
from outrider.models.progress import StageBars
from outrider_tools.training.trainer import CurvePoint

LOOP_TOKENS = 64
LOOP_PERIOD = 32


def loops(answer: Sequence[int]) -> bool:
    """Whether the last 64 tokens of an answer repeat with a period of at most 32 tokens.

    That is, for some period, each of these tokens equals the one a period before it, if that is among the last 64, too.
    A shorter answer does not loop.
    """
    tail = list(answer[-LOOP_TOKENS:])
    if len(tail) < LOOP_TOKENS:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD + 1))


Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]

# Depths whose accept rates are compared, to see how well a drafter keeps up on its own features.
DEEP = 6

LENGTHS = (
    "chain, tree: tokens that a round commits (accepted + 1) with chains and with trees of draft tokens; "
    f"depth {DEEP} / 1: accept rate at depth {DEEP} over that at depth 1; loops: answers that end in repetition"
)
RATES = (
    "accept rate: how often the drafter's best token at this depth is the target's; "
    "chains, trees that reach it: share of rounds that accept at least this many tokens"
)
"""Explanation of the words in both tables."""


@dataclass(frozen=True, slots=True)
class ReplayedRounds:
    """Decoding in rounds, replayed over known answers.

    Attributes:
        accept_length: tokens a round: accepted ones + 1.
        rounds: number of rounds over all answers.
        reached: by depth from 1 on, the share of rounds that accepted so many tokens or more.
    """

    accept_length: float
    rounds: int
    reached: list[float]


@dataclass(frozen=True, slots=True)
class Figures:
    """A drafter's figures over some answers.

    Attributes:
        answers: number of answers.
        tokens: tokens of all answers.
        rates: by depth d from 1 on, the share of places where the drafter's best token is the target's if the target's
            features end d tokens before it. The tokens between are the target's, the features the drafter's own. Tokens
            outside the draft vocabulary count as missed.
        deep_over_first: the rate at depth 6 over that at depth 1; 0 without one.
        chain: rounds with chains of the tree's depth.
        tree: rounds with trees.
    """

    answers: int
    tokens: int
    rates: list[float]
    deep_over_first: float
    chain: ReplayedRounds
    tree: ReplayedRounds


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures at one temperature: of all answers, of those without and with loops, and by category.

    `without_loops` and `loops` are None if there are no such answers. `beginning` says how questions began if it was
    not the target's usual way.
    """

    temperature: float
    all: Figures
    without_loops: Figures | None
    loops: Figures | None
    categories: dict[str, Figures]
    beginning: str = ""


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """Counts of one answer.

    Attributes:
        tokens: tokens of the answer.
        hits: by depth, the number of places where the guess is right.
        possible: by depth, the number of all places.
        chain: accepted tokens of each round with a chain.
        tree: accepted tokens of each round with a tree.
    """

    tokens: int
    hits: list[int]
    possible: list[int]
    chain: list[int]
    tree: list[int]

    @classmethod
    def of(cls, agree: Flags, tree_accepts: Counts, first: int, depth: int, rounds_depth: int) -> AnswerCounts:
        """Count from teacher_forced's `agree`, bool [at least both depths, T], and accepted nodes [T] of trees.

        The answer is tokens `first` to T - 1, and only guesses of these count. `depth` is that of the rates,
        `rounds_depth` that of chains.
        """
        length = agree.shape[1]
        roots = [slice(max(1, first - 1 - step), length - step - 1) for step in range(depth)]
        return cls(
            tokens=length - first,
            hits=[int(agree[step, places].sum()) for step, places in enumerate(roots)],
            possible=[max(0, places.stop - places.start) for places in roots],
            # From each root, count right guesses up to the first wrong one.
            chain=replay(np.cumprod(agree[:rounds_depth], axis=0).sum(0), first),
            tree=replay(tree_accepts, first),
        )


def replay(accepts: Counts, first: int) -> list[int]:
    """Return the accepted tokens of each round. `accepts` [T] has them for each root; the answer is `first` to T - 1.

    The first round's root is the prompt's last token. The last round ends with the answer.
    """
    accepted, root = [], first - 1
    while root < len(accepts) - 1:
        accepted.append(int(accepts[root]))
        root += accepted[-1] + 1
    return accepted


def figures_of(answers: Sequence[AnswerCounts], rounds_depth: int) -> Figures:
    """Return the figures of at least one answer."""
    tokens = sum(answer.tokens for answer in answers)
    hits, possible = (np.sum([getattr(answer, name) for answer in answers], 0) for name in ("hits", "possible"))
    rates: list[float] = (hits / np.maximum(possible, 1)).tolist()
    return Figures(
        answers=len(answers),
        tokens=tokens,
        rates=rates,
        deep_over_first=rates[DEEP - 1] / rates[0] if len(rates) >= DEEP and rates[0] > 0 else 0.0,
        chain=_rounds([count for answer in answers for count in answer.chain], tokens, rounds_depth),
        tree=_rounds([count for answer in answers for count in answer.tree], tokens, rounds_depth),
    )


def _rounds(accepted: list[int], tokens: int, depth: int) -> ReplayedRounds:
    num_rounds = max(1, len(accepted))
    reached = [sum(count > step for count in accepted) / num_rounds for step in range(depth)]
    return ReplayedRounds(tokens / num_rounds, len(accepted), reached)


def decoding(temperature: float) -> str:
    """Return `greedy`, or `t1` and the like."""
    return f"t{temperature:g}" if temperature > 0 else "greedy"


def _asked(evaluation: Evaluation) -> str:
    """Return how the answers were decoded, and how the questions began if it was not the usual way."""
    return ", ".join(filter(None, (decoding(evaluation.temperature), evaluation.beginning)))


def groups(evaluation: Evaluation) -> Iterator[tuple[str, Figures]]:
    """Yield all figures of an evaluation with their names, those of all answers first."""
    yield "all", evaluation.all
    if evaluation.loops is not None:
        yield "loops", evaluation.loops
        if evaluation.without_loops is not None:
            yield "without loops", evaluation.without_loops
    yield from evaluation.categories.items()


def length_table(evaluations: Sequence[Evaluation]) -> list[list[str]]:
    """Return answers, tokens and accept lengths, with a row for each group of answers."""
    rows = [["", "answers", "tokens", "chain", "tree", f"depth {DEEP} / 1"]]
    for evaluation in evaluations:
        for name, found in groups(evaluation):
            shares = (found.chain.accept_length, found.tree.accept_length, found.deep_over_first)
            counts = [str(found.answers), str(found.tokens)]
            rows.append([f"{_asked(evaluation)}, {name}", *counts, *(f"{share:.2f}" for share in shares)])
    return rows


def rate_table(evaluations: Sequence[Evaluation]) -> list[list[str]]:
    """Return accept rates by depth over all answers, and shares of rounds that accepted so many tokens."""
    depth = max(len(evaluation.all.rates) for evaluation in evaluations)
    rows = [["depth", *(str(number + 1) for number in range(depth))]]
    for evaluation in evaluations:
        found, name = evaluation.all, _asked(evaluation)
        for what, values in (
            ("accept rate", found.rates),
            ("chains that reach it", found.chain.reached),
            ("trees that reach it", found.tree.reached),
        ):
            cells = [f"{value:.2f}" for value in values[:depth]]
            rows.append([f"{name}, {what}", *cells, *[""] * (depth - len(cells))])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as a Markdown table, the first row as its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


# Without a bar, at least this long between two lines of a kind.
EVERY_SECONDS = 5.0
# From this number on, tokens are counted in millions.
MANY = 100_000


class Report(StageBars):
    """Bars on a terminal, elsewhere lines every few seconds; tables go to standard output. Use it in a `with`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        names, notes = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
        super().__init__(stream, lambda: (names, BarColumn(), notes, TimeElapsedColumn(), TimeRemainingColumn()))
        self._start = time.monotonic()
        self._last: dict[str, float] = {}

    def line(self, text: str) -> None:
        """Print a line, with the seconds since the start in front."""
        text = f"{time.monotonic() - self._start:7.1f} s  {text}"
        if self.bars is not None:
            # The bars' console prints above them.
            self.bars.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self.stream, flush=True)

    def progress(self, what: str, done: float, total: float, note: str) -> None:
        """Show that `done` of `total` (0: unknown) of a piece of work is done; `note` says the same in words."""
        if self.bars is not None:
            self.draw(self.bars, what, done, total, note=note)
            return
        now = time.monotonic()
        is_due = now - self._last.get(what, -EVERY_SECONDS) >= EVERY_SECONDS
        if is_due:
            self._last[what] = now
        if is_due or (total and done >= total):
            self.line(f"{what}: {note}")

    def generated(self, what: str, done: int, total: int) -> None:
        """Show that there are `done` tokens of `what`, of `total` (0: unknown)."""
        size, unit = (1e6, "million tokens") if total >= MANY else (1, "tokens")
        digits = 2 if size > 1 else 0
        share = f" of {total / size:.{digits}f}" if total else ""
        self.progress(what, done, total, f"{done / size:.{digits}f}{share} {unit}")

    def point(self, step: int, total: int, point: CurvePoint) -> None:
        """Show a point of the loss curve."""
        rates = " ".join(f"{rate:.2f}" for rate in point.rates)
        note = f"step {step} of {total or '?'}, loss {point.loss:.3f}, agreement by depth {rates}"
        self.progress("training", step, total, note)

    def counted(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` answers are finished."""
        self.progress(what, done, total, f"{done} of {total} answers")

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Print rows of equal length to standard output; the first column has names."""
        print(aligned(rows, right=range(1, len(rows[0])) if len(rows[0]) > 2 else ()))

    def evaluations(self, found: Sequence[Evaluation]) -> None:
        """Print both tables of the evaluations, each with a line that explains its words."""
        for rows, meaning in ((length_table(found), LENGTHS), (rate_table(found), RATES)):
            self.table(rows)
            print(meaning)
