"""The text that a drafter learns from: given and invented questions, and the target's answers to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError, count_of, under
from outrider.models.decoder import CausalLM
from outrider_tools.files import replacing, writing
from outrider_tools.training.figures import Report
from outrider_tools.training.generate import GenerationJob, Generator
from outrider_tools.training.options import WORK_FOLDER, CorpusOptions, RunOptions
from outrider_tools.training.parallel import RankGroup
from outrider_tools.training.prompts import (
    SYSTEM_OPENINGS,
    Beginnings,
    ChatForm,
    Question,
    all_openings,
    endings,
    read_questions,
)
from outrider_tools.training.target import TargetModel
from outrider_tools.training.texts import Texts

# Invented questions of fewer tokens are mere greetings, or empty.
MIN_QUESTION = 4
# Expected tokens of an answer, and expected share of invented questions that are kept. Both are low on purpose: too
# many questions waste a little time, too few give less text than was asked for.
ANSWER_TOKENS, KEPT_SHARE = 240, 0.8
# Seeds of neighbouring ranks differ by this, so that they draw different noise.
RANK_SEEDS = 7919


# One system message is invented for this many conversations with other beginnings, up to this many messages.
TEXTS_A_MESSAGE, MAX_MESSAGES = 16, 256

TEXTS, TEXTS_RECORD = "texts.safetensors", "texts.json"


@dataclass(frozen=True, slots=True)
class StoredTexts:
    """Text stored in a folder.

    Attributes:
        held_out: invented questions that were left out of the text, as token ids.
        options: options that the text was made with, and which target and questions; `given` is the number of given
            questions that it answers.
        beginnings: number of texts by the way they begin.
    """

    texts: Texts
    held_out: list[list[int]]
    options: dict[str, Any] = field(default_factory=dict)
    beginnings: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def are_in(folder: Path) -> bool:
        """Whether `folder` has texts to load."""
        return (folder / TEXTS).is_file() and (folder / TEXTS_RECORD).is_file()

    @classmethod
    def load(cls, folder: Path) -> StoredTexts:
        """Load texts that `save` wrote."""
        return cls(Texts.load(folder / TEXTS), **json.loads((folder / TEXTS_RECORD).read_text("utf-8")))

    def save(self, folder: Path) -> None:
        """Write both files, each whole or not at all. The record comes last: it marks the text as complete."""
        record = {name: getattr(self, name) for name in ("options", "beginnings", "held_out")}
        with writing("--out", folder):
            self.texts.save(folder / TEXTS)
            with replacing(folder / TEXTS_RECORD) as part:
                part.write_text(json.dumps(record), "utf-8")


@dataclass(frozen=True)
class Corpus:
    """Makes the texts, or loads them if they were made with the same options before.

    Each of `ranks` writes its share to the folder; then all of them read the whole. `target` is the model's
    fingerprint.
    """

    model: CausalLM
    form: ChatForm
    options: CorpusOptions
    folder: Path
    report: Report
    ranks: RankGroup = field(default_factory=RankGroup)
    target: str = ""

    @property
    def _seed(self) -> int:
        return self.options.seed + RANK_SEEDS * self.ranks.rank

    def texts(self, given: Sequence[Question]) -> StoredTexts:
        """Return the target's conversations about the `given` questions and about questions that it invented.

        Raises ConfigError if there are no questions at all, or the folder holds text that was made with other options.
        """
        wanted = {**asdict(self.options), "temperatures": list(self.options.temperatures), "given": len(given)}
        origin = {
            "target": self.target,
            "questions": hashlib.sha256(json.dumps([question.text for question in given]).encode()).hexdigest()[:16],
        }
        wanted |= origin
        is_made = StoredTexts.are_in(self.folder)
        if is_made:
            self._check_made({**origin, **StoredTexts.load(self.folder).options}, wanted)
        # The first rank decides, and no rank writes before all have looked.
        if not self.ranks.broadcast_int(int(is_made)):
            held_out = self._make_share(given)
            self.ranks.barrier()
            if self.ranks.is_main:
                parts = [self._part(rank) for rank in range(self.ranks.count)]
                texts = Texts.concat([Texts.load(part) for part in parts])
                texts = texts.without(ending for question in held_out for ending in endings(self.form, question))
                if not len(texts):
                    raise ConfigError("there are no questions to train on; give a file, or let the target invent more")
                counts = Beginnings(self.form, self.options.beginnings).counts(texts)
                StoredTexts(texts, held_out, wanted, counts).save(self.folder)
                for part in parts:
                    part.unlink()
            self.ranks.barrier()
        return StoredTexts.load(self.folder)

    def _check_made(self, options: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Raise ConfigError if the text was made with other `options`: it took long, and a state belongs to it.

        Older text, without a note of its target and questions, is taken for theirs.
        """
        for name, value in wanted.items():
            if options.get(name) != value:
                raise ConfigError(
                    f"{self.folder / TEXTS} is text that was made with another {name} ({options.get(name)}, not "
                    f"{value}); choose another --out, take the text as it is by --text, or remove it"
                )

    def _make_share(self, given: Sequence[Question]) -> list[list[int]]:
        """Write this rank's share to its own file. Return the questions that the first rank holds out."""
        ranks, options = self.ranks, self.options
        invented = self._invent(len(given))
        num_held_out = options.held_out if ranks.is_main else 0
        questions: list[str | list[int]] = [question.text for question in given[ranks.rank :: ranks.count]]
        questions *= options.given_repeats
        questions += invented[num_held_out:]
        messages = self._invent_messages(len(questions))
        beginnings = Beginnings(self.form, options.beginnings, messages, self._seed)
        prompts = [beginnings.prompt(question) for question in questions]
        texts = self._answer(prompts, options.question_tokens + beginnings.room)
        with writing("--out", self.folder):
            texts.save(self._part(ranks.rank))
        return invented[:num_held_out]

    def _part(self, rank: int) -> Path:
        return self.folder / f"texts.{rank}.safetensors"

    def _invent(self, num_given: int) -> list[list[int]]:
        """Return invented questions as token ids, without repeats and stop tokens."""
        options = self.options
        count = options.invented
        if count < 0:
            wanted = options.tokens / ANSWER_TOKENS - num_given * options.given_repeats
            count = options.held_out + max(0, int(wanted / KEPT_SHARE))
        count = self.ranks.ceil_share(count)
        if not count:
            return []
        openings = [self.form.words(text) for text in all_openings()]
        # A share of the questions starts with random first words; each rank has its own seed.
        random = np.random.default_rng(self._seed)
        chosen = random.integers(0, len(openings), count)
        firsts = [openings[i] if u < options.opened else [] for i, u in zip(chosen, random.random(count), strict=True)]
        return self._invented_texts(self.form.before, firsts, options.question_tokens, "questions")

    def _invent_messages(self, num_texts: int) -> list[str]:
        """Return invented system messages, each one meant for several of the conversations that get one."""
        options = self.options
        count = min(MAX_MESSAGES, int(options.beginnings * num_texts / TEXTS_A_MESSAGE))
        try:
            before = self.form.system_form().before
        except ConfigError:
            return []
        openings = [self.form.words(text) for text in SYSTEM_OPENINGS]
        firsts = [openings[number % len(openings)] for number in range(count)]
        return [
            self.form.decode(token_ids)
            for token_ids in self._invented_texts(before, firsts, options.system_tokens, "system messages")
        ]

    def _invented_texts(
        self, before: list[int], firsts: list[list[int]], num_tokens: int, what: str
    ) -> list[list[int]]:
        """Return the texts that the target generates after `before` and each of `firsts` (first words): only complete
        ones, without repeats and stop tokens."""
        if not firsts:
            return []
        options, stops = self.options, self.model.config.eos_token_ids
        # The target has positions for no more tokens.
        num_tokens = min(num_tokens, self.model.config.max_positions - len(before))
        if num_tokens <= MIN_QUESTION:
            return []
        firsts = [first[: num_tokens - 1] for first in firsts]
        jobs = [
            GenerationJob([*before, *first], options.question_temperature, num_tokens - len(first)) for first in firsts
        ]
        answers = self._generated(what, f"inventing {len(jobs)}", jobs, len(before) + num_tokens, self._seed)
        whole = [
            [*first, *answer[:-1].tolist()]
            for first, answer in zip(firsts, answers, strict=False)
            if answer[-1] in stops and len(first) + len(answer) > MIN_QUESTION
        ]
        return [list(token_ids) for token_ids in dict.fromkeys(map(tuple, whole))]

    def _answer(self, prompts: list[list[int]], longest: int) -> Texts:
        options, positions = self.options, self.model.config.max_positions
        count, longest = len(prompts), min(longest, positions - 1)
        prompts = [prompt for prompt in prompts if len(prompt) <= longest]
        if len(prompts) < count:
            self.report.line(f"left out: {count_of(count - len(prompts), 'prompt')} of more than {longest} tokens")
        if not prompts:
            return Texts.join([], [])
        order = np.random.default_rng(self._seed).permutation(len(prompts))
        prompts = [prompts[i] for i in order]
        heats = options.temperatures
        jobs = [
            GenerationJob(prompt, heats[i % len(heats)], min(options.answer_tokens, positions - len(prompt)))
            for i, prompt in enumerate(prompts)
        ]
        # Another seed, so that answers do not repeat the questions' noise.
        longest, seed = min(longest + options.answer_tokens, positions), self._seed + 1
        answers = self._generated(
            "answers", f"to {count_of(len(jobs), 'question')}", jobs, longest, seed, options.tokens
        )
        return Texts.join(prompts[: len(answers)], answers)

    def _generated(
        self, what: str, action: str, jobs: list[GenerationJob], longest: int, seed: int, budget: int = 0
    ) -> list[NDArray[np.int32]]:
        """Return answers, each of at most `longest` tokens with its prompt, and drawn with its own seed, made from
        `seed`. No more begin once all ranks together have `budget` tokens (0: no limit), or time is over."""
        rows = min(self.options.num_rows, len(jobs))
        self.report.line(f"{what}: {action}, {rows} at once")
        return Generator(self.model, rows, longest, self.model.config.eos_token_ids).run(
            [replace(job, seed=(seed << 32) + number) for number, job in enumerate(jobs)],
            token_budget=self.ranks.ceil_share(budget) or None,
            seconds=60 * self.options.text_minutes or None,
            on_progress=lambda done: self.report.generated(what, done * self.ranks.count, budget),
        )


def run_texts(
    target: TargetModel, form: ChatForm, options: RunOptions, work: Path, report: Report, ranks: RankGroup
) -> tuple[Texts, list[Question], StoredTexts]:
    """Return the text to train on, the questions for the evaluation, and the text before those questions were taken
    out. All `ranks` get the same.

    Raises:
        ConfigError: prompts for training are also for the evaluation, or `options.text` holds no text for this target.
    """
    if options.text is not None and options.prompts is not None:
        raise ConfigError(
            f"--prompts {options.prompts}: no text is generated with --text {options.text}; leave one out"
        )
    with under("--prompts"):
        given = read_questions(options.prompts) if options.prompts else []
    with under("--eval-prompts"):
        asked = read_questions(options.eval_prompts) if options.eval_prompts else []
    both = {question.text for question in given} & {question.text for question in asked}
    if both:
        raise ConfigError(
            f"{count_of(len(both), 'prompt')} for both training and evaluation, such as {min(both)[:60]!r}"
        )
    if options.text is not None:
        found = _earlier(options.text, target)
    else:
        corpus = Corpus(target.model, form, options.corpus, work, report, ranks, target.fingerprint)
        found = corpus.texts(given)
    # Leave out questions without text (special tokens only): every prompt would count as ending with one.
    asked = asked or [Question(text) for text in map(form.decode, found.held_out) if text.strip()]
    if not asked:
        raise ConfigError("there are no questions to evaluate with; give --eval-prompts")
    # Whatever the text's origin, questions of the evaluation are not trained on.
    texts = found.texts.without(ending for question in asked for ending in endings(form, question.text))
    return texts, asked, found


def _earlier(folder: Path, target: TargetModel) -> StoredTexts:
    """Return the text in a run's folder, or in the folder `work` inside it."""
    if StoredTexts.are_in(folder / WORK_FOLDER):
        folder = folder / WORK_FOLDER
    if not StoredTexts.are_in(folder):
        raise ConfigError(f"--text {folder}: holds no {TEXTS} with its {TEXTS_RECORD}; give an earlier run's --out")
    found = StoredTexts.load(folder)
    largest = int(found.texts.tokens.max(initial=0))
    if largest >= target.config.vocab_size:
        raise ConfigError(
            f"--text {folder}: holds token {largest}, and the target has {target.config.vocab_size}; "
            "it is another target's text"
        )
    return found
