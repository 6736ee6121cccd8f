"""Evaluations as rows of text, for the terminal and the card. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider_tools.training.figures import DEEP, Evaluation, Figures


def decoding(temperature: float) -> str:
    """`greedy`, or `t1` and the like."""
    return f"t{temperature:g}" if temperature > 0 else "greedy"


def groups(evaluation: Evaluation) -> Iterator[tuple[str, Figures]]:
    """All figures of an evaluation with their names, those of all answers first."""
    yield "all", evaluation.all
    if evaluation.loops is not None:
        yield "loops", evaluation.loops
        if evaluation.without_loops is not None:
            yield "without loops", evaluation.without_loops
    yield from evaluation.categories.items()


def length_table(evaluations: Sequence[Evaluation]) -> list[list[str]]:
    """Answers, tokens and accept lengths, a row for each group of answers."""
    rows = [["", "answers", "tokens", "chain", "tree", f"depth {DEEP} / 1"]]
    for evaluation in evaluations:
        for name, found in groups(evaluation):
            rows.append(
                [
                    f"{decoding(evaluation.temperature)}, {name}",
                    str(found.answers),
                    str(found.tokens),
                    f"{found.chain.accept_length:.2f}",
                    f"{found.tree.accept_length:.2f}",
                    f"{found.deep_over_first:.2f}",
                ]
            )
    return rows


def rate_table(evaluations: Sequence[Evaluation]) -> list[list[str]]:
    """Accept rates by depth over all answers, and the shares of rounds that accepted so many tokens."""
    depth = max(len(evaluation.all.rates) for evaluation in evaluations)
    rows = [["depth", *(str(number + 1) for number in range(depth))]]
    for evaluation in evaluations:
        found, name = evaluation.all, decoding(evaluation.temperature)
        for what, values in (
            ("accept rate", found.rates),
            ("chains that reach it", found.chain.reached),
            ("trees that reach it", found.tree.reached),
        ):
            cells = [f"{value:.2f}" for value in values[:depth]]
            rows.append([f"{name}, {what}", *cells, *[""] * (depth - len(cells))])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The same as a table of Markdown, the first row its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
