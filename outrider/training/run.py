"""All of a training: questions, text, vocabulary, head, evaluation. Stages that are done are not done again."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.errors import ConfigError
from outrider.training.corpus import Corpus, CorpusOptions, greedy_texts
from outrider.training.eagle3 import Eagle3Head, HeadShape, default_feature_layers
from outrider.training.evaluate import Evaluation, evaluate
from outrider.training.export import export_head
from outrider.training.prompts import ChatForm, Question, read_questions
from outrider.training.report import Report
from outrider.training.target import Target
from outrider.training.trainer import Trainer, TrainerOptions
from outrider.training.tree import TreeShape
from outrider.training.vocabulary import choose_vocabulary, coverage

WORK_FOLDER = "work"
RECORD_FILE = "training.json"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `outrider train` was asked for. Paths and devices apart, all of it goes into the record."""

    prompts: Path | None = None
    eval_prompts: Path | None = None
    draft_vocab_size: int = 8192
    feature_layers: tuple[int, ...] = ()
    """Empty takes the default ones."""
    eval_new_tokens: int = 256
    corpus: CorpusOptions = field(default_factory=CorpusOptions)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    tree: TreeShape = field(default_factory=TreeShape)


def train_eagle3(model_folder: Path, out: Path, device: torch.device, options: RunOptions, report: Report) -> None:
    """Train a head and write it to `out`; what can be taken up again later lies in its folder `work`.

    Raises:
        ConfigError: something given does not fit, or prompts for training are also for the evaluation.
    """
    work = out / WORK_FOLDER
    work.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    clock = _Clock(seconds)
    target = Target(model_folder, device)
    form = ChatForm(model_folder)
    given, held_out = _questions(options)
    clock.lap("load")

    corpus = Corpus(target.model, form, options.corpus, work, report)
    texts = corpus.texts(given)
    clock.lap("text")
    report.line(f"{len(texts)} answers, {texts.num_answer_tokens} tokens")

    stops = target.config.eos_token_ids
    chosen = choose_vocabulary(texts, target.config.vocab_size, options.draft_vocab_size, stops)
    known = coverage(texts, chosen, target.config.vocab_size)
    layers = options.feature_layers or default_feature_layers(target.config.num_layers)
    shape = HeadShape(target.config, options.draft_vocab_size, layers)
    # Here, so that the head begins the same whether the text was there or has drawn its own numbers before.
    torch.manual_seed(options.trainer.seed)
    head = Eagle3Head(shape, torch.from_numpy(chosen)).to(device)
    target.start(head)
    trainer = Trainer(target, head, texts, options.trainer, work / "state.safetensors")
    history = trainer.run(report.point)
    clock.lap("training")
    num_bytes = export_head(head, model_folder, out)

    asked = held_out or [Question(form.decode(prompt)) for prompt in corpus.held_out]
    evaluated = greedy_texts(target.model, form, asked, options.eval_new_tokens, options.corpus.num_rows)
    clock.lap("text for evaluation")
    result = evaluate(target, head, evaluated, tree=options.tree, told=report.evaluated)
    clock.lap("evaluation")
    record = {
        "target": model_folder.name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "answers": len(texts),
        "answer_tokens": texts.num_answer_tokens,
        "vocabulary_coverage": known,
        "weight_bytes": num_bytes,
        "options": _plain(asdict(options)),
        "seconds": seconds,
        "training": asdict(history),
        "evaluation": asdict(result),
    }
    (out / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    report.table(_rows(record, result))


class _Clock:
    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._seconds[name] = round(now - self._last, 2)
        self._last = now


def _questions(options: RunOptions) -> tuple[list[Question], list[Question]]:
    """Given questions to train on, and to evaluate with."""
    given = read_questions(options.prompts) if options.prompts else []
    held_out = read_questions(options.eval_prompts) if options.eval_prompts else []
    both = {question.text for question in given} & {question.text for question in held_out}
    if both:
        raise ConfigError(f"{len(both)} prompts are both trained on and evaluated with, {min(both)[:60]!r} for one")
    return given, held_out


def _rows(record: dict[str, Any], result: Evaluation) -> list[tuple[str, str]]:
    rates = result.rates
    rows = [
        ("answers, tokens", f"{record['answers']}, {record['answer_tokens']}"),
        ("steps, last loss", f"{record['training']['total_steps']}, {_last_loss(record):.3f}"),
        ("tokens in the draft vocabulary", f"{record['vocabulary_coverage']:.4f}"),
        ("weights", f"{record['weight_bytes'] / 1e6:.1f} MB"),
        ("seconds", ", ".join(f"{name} {value:.0f}" for name, value in record["seconds"].items())),
        ("accept rate, depth 1 to " + str(len(rates)), " ".join(f"{rate:.3f}" for rate in rates)),
        ("accept length, chain", f"{result.chain:.3f}"),
        ("accept length, tree", f"{result.tree:.3f}"),
    ]
    if len(rates) >= 6:
        rows.insert(-2, ("depth 6 against depth 1", f"{rates[5] / max(rates[0], 1e-9):.3f}"))
    return rows


def _last_loss(record: dict[str, Any]) -> float:
    points = record["training"]["points"]
    return float(points[-1]["loss"]) if points else float("nan")


def _plain(value: Any) -> Any:
    """The same as JSON holds it; of paths the name alone."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return value.item()
    return value.name if isinstance(value, Path) else value
