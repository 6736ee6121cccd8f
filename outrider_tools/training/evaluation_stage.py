"""A drafter in a folder, measured on questions: `outrider evaluate-draft`, and the end of `outrider train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from outrider.config.draft import DraftOptions
from outrider.errors import ConfigError
from outrider.models.decoder import CausalLM
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.loader import load_draft_model
from outrider_tools.training.answers import answer_questions
from outrider_tools.training.evaluate import DEPTH, evaluate
from outrider_tools.training.figures import Evaluation
from outrider_tools.training.prompts import ChatForm, Question
from outrider_tools.training.report import Report
from outrider_tools.training.tree import TreeShape


def load_drafter(algorithm: str, folder: Path, target_folder: Path, target: CausalLM) -> DraftModel:
    """The draft model as the draft service loads it, on the target's device and in its dtype."""
    options = replace(
        DraftOptions(),
        speculative_algorithm=(algorithm,),
        speculative_draft_model_path=str(folder),
        target_model_path=str(target_folder),
    )
    return load_draft_model(options, target.device, target.dtype)


def measure(
    target: CausalLM,
    form: ChatForm,
    drafter: DraftModel,
    questions: Sequence[Question],
    report: Report,
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    tree: TreeShape,
    num_rows: int = 256,
    depth: int = DEPTH,
    seed: int = 0,
) -> list[Evaluation]:
    """Have the target answer at each temperature, and evaluate the drafter on that.

    Answers end where the target or the drafter knows no more positions; questions that leave no room are left out.
    """
    longest = min(target.config.max_positions, drafter.max_positions) - max_new_tokens
    kept = [question for question in questions if len(form.ask(question.text)) <= longest]
    if len(kept) < len(questions):
        report.line(f"{len(questions) - len(kept)} questions are too long for models of {longest + max_new_tokens}")
    if not kept:
        raise ConfigError("no question leaves room for an answer; lower the number of new tokens")
    found = []
    for temperature in temperatures:
        name = f"answers, temperature {temperature:g}"
        answers = answer_questions(
            target,
            form,
            kept,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            num_rows=num_rows,
            seed=seed,
            told=partial(report.generated, name, total=0),
        )
        name = f"evaluation, temperature {temperature:g}"
        found.append(evaluate(target, drafter, answers, depth=depth, tree=tree, told=partial(report.counted, name)))
    return found
