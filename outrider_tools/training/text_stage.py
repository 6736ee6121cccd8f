"""The questions of a run, and its text: made, found where the run was interrupted, or taken from an earlier run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError
from outrider_tools.training.corpus import Corpus
from outrider_tools.training.parallel import Peers
from outrider_tools.training.prompts import ChatForm, Question, read_questions
from outrider_tools.training.report import Report
from outrider_tools.training.run_options import RunOptions
from outrider_tools.training.target import Target
from outrider_tools.training.texts import Texts

WORK_FOLDER = "work"
TEXTS, TEXTS_RECORD = "texts.safetensors", "texts.json"


@dataclass(frozen=True, slots=True)
class RunTexts:
    """What is trained on, and the questions that are evaluated with."""

    texts: Texts
    questions: list[Question]
    num_given: int
    """Questions that the text answers beside invented ones."""


def run_texts(
    target: Target, form: ChatForm, options: RunOptions, work: Path, report: Report, peers: Peers | None = None
) -> RunTexts:
    """Questions and text of a run, the same for all `peers`.

    Raises:
        ConfigError: prompts for training are also for the evaluation, or `options.text` holds no text for this target.
    """
    given, held_out = _questions(options)
    if options.text is not None:
        texts, own, num_given = _earlier(options.text, target)
    else:
        corpus = Corpus(target.model, form, options.corpus, work, report, peers)
        texts, own, num_given = corpus.texts(given), corpus.held_out, len(given)
    asked = held_out or [Question(form.decode(prompt)) for prompt in own]
    if not asked:
        raise ConfigError("there are no questions to evaluate with; give --eval-prompts")
    # Whatever text it is: what is evaluated with is not trained on.
    return RunTexts(texts.without(form.ask(question.text) for question in asked), asked, num_given)


def _questions(options: RunOptions) -> tuple[list[Question], list[Question]]:
    """Given questions to train on, and to evaluate with."""
    given = read_questions(options.prompts) if options.prompts else []
    held_out = read_questions(options.eval_prompts) if options.eval_prompts else []
    both = {question.text for question in given} & {question.text for question in held_out}
    if both:
        raise ConfigError(f"{len(both)} prompts are both trained on and evaluated with, {min(both)[:60]!r} for one")
    return given, held_out


def _earlier(folder: Path, target: Target) -> tuple[Texts, list[list[int]], int]:
    """Text, questions that were held back, and how many were given, of a run's folder or of the folder `work` in it."""
    if (folder / WORK_FOLDER / TEXTS).is_file():
        folder = folder / WORK_FOLDER
    path, record = folder / TEXTS, folder / TEXTS_RECORD
    if not path.is_file() or not record.is_file():
        raise ConfigError(f"--text {folder}: holds no {TEXTS} with its {TEXTS_RECORD}; give an earlier run's --out")
    texts = Texts.load(path)
    largest = int(texts.tokens.max(initial=0))
    if largest >= target.config.vocab_size:
        raise ConfigError(
            f"--text {folder}: holds token {largest}, and the target has {target.config.vocab_size}; "
            "it is another target's text"
        )
    found = json.loads(record.read_text("utf-8"))
    return texts, found["held_out"], int(found["options"]["given"])
