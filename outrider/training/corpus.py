"""The text that a drafter learns from: questions, given and invented, and the target's answers to them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from outrider.errors import ConfigError
from outrider.models.base import CausalLM
from outrider.training.generate import Generator, Job, greedy_answers
from outrider.training.prompts import ChatForm, Question
from outrider.training.report import Report
from outrider.training.texts import Texts

# Invented questions of fewer tokens are mere greetings, or nothing.
MIN_QUESTION = 4


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """How much text, of what kind."""

    tokens: int = 10_000_000
    """Answer tokens to make; a little more come, since answers that have begun are finished."""
    invented: int = 40_000
    """Questions that the target makes up; what does not end in time or repeats is left out."""
    given_repeats: int = 1
    """Answers to each given question."""
    question_tokens: int = 192
    answer_tokens: int = 512
    question_temperature: float = 1.0
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.8, 1.0)
    """Answers take these in turn."""
    held_out: int = 64
    """Invented questions that are left out, for the evaluation."""
    text_minutes: float = 0.0
    """After so long no more questions begin, and as long after that no more answers; 0 is no limit."""
    num_rows: int = 1024
    """Conversations at once."""
    seed: int = 0


class Corpus:
    """Makes the texts, or reads them where they were made with the same options before.

    Attributes:
        held_out: invented questions that are not trained on, as token ids. Set by `texts`.
    """

    def __init__(self, model: CausalLM, form: ChatForm, options: CorpusOptions, folder: Path, report: Report) -> None:
        self.held_out: list[list[int]] = []
        self._model = model
        self._form = form
        self._options = options
        self._folder = folder
        self._report = report

    def texts(self, given: Sequence[Question]) -> Texts:
        """Conversations that the target had with the `given` questions and its own.

        Raises:
            ConfigError: there are no questions at all.
        """
        wanted = {**asdict(self._options), "given": len(given)}
        wanted["temperatures"] = list(self._options.temperatures)
        record, path = self._folder / "texts.json", self._folder / "texts.safetensors"
        if record.exists() and path.exists():
            found = json.loads(record.read_text("utf-8"))
            if found["options"] == wanted:
                self.held_out = found["held_out"]
                return Texts.load(path)
        invented = self._invent()
        self.held_out = invented[: self._options.held_out]
        prompts = [self._form.ask(question.text) for question in given] * self._options.given_repeats
        prompts += [self._form.before + question + self._form.after for question in invented[self._options.held_out :]]
        texts = self._answer(prompts)
        texts.save(path)
        part = record.with_name(record.name + ".part")
        part.write_text(json.dumps({"options": wanted, "held_out": self.held_out}), "utf-8")
        os.replace(part, record)
        return texts

    @property
    def _seconds(self) -> float | None:
        return 60 * self._options.text_minutes or None

    def _invent(self) -> list[list[int]]:
        """Questions as token ids, each once, without what ends them."""
        options = self._options
        if not options.invented:
            return []
        before, stops = self._form.before, self._model.config.eos_token_ids
        generator = Generator(self._model, options.num_rows, len(before) + options.question_tokens, stops, options.seed)
        jobs = [Job(before, options.question_temperature, options.question_tokens)] * options.invented
        answers = generator.run(
            jobs, seconds=self._seconds, told=lambda done: self._report.generated("questions", done, 0)
        )
        whole = [answer[:-1] for answer in answers if answer[-1] in stops and len(answer) > MIN_QUESTION]
        return [list(question) for question in dict.fromkeys(map(tuple, whole))]

    def _answer(self, prompts: list[list[int]]) -> Texts:
        options = self._options
        longest = options.question_tokens + len(self._form.before) + len(self._form.after)
        prompts = [prompt for prompt in prompts if len(prompt) <= longest]
        if not prompts:
            raise ConfigError("there are no questions to train on; give a file of them, or let the target invent some")
        order = np.random.default_rng(options.seed).permutation(len(prompts))
        prompts = [prompts[i] for i in order]
        # A new generator, since its rows are longer; another seed, so that answers do not repeat questions' noise.
        generator = Generator(
            self._model,
            options.num_rows,
            longest + options.answer_tokens,
            self._model.config.eos_token_ids,
            options.seed + 1,
        )
        heats = options.temperatures
        jobs = [Job(prompt, heats[i % len(heats)], options.answer_tokens) for i, prompt in enumerate(prompts)]
        answers = generator.run(
            jobs,
            token_budget=options.tokens,
            seconds=self._seconds,
            told=lambda done: self._report.generated("answers", done, options.tokens),
        )
        return Texts.join(prompts[: len(answers)], answers)


def greedy_texts(
    model: CausalLM, form: ChatForm, questions: Sequence[Question], max_new_tokens: int, num_rows: int
) -> Texts:
    """The target's answers at temperature 0 to questions in a chat."""
    prompts = [form.ask(question.text) for question in questions]
    return Texts.join(prompts, greedy_answers(model, prompts, max_new_tokens, model.config.eos_token_ids, num_rows))
