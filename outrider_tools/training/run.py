"""All of a training: questions, text, drafter, evaluation, card. Stages that are done are not done again."""

from __future__ import annotations

import io
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import outrider
from outrider_tools.files import writing
from outrider_tools.training.card import write_card, write_plots
from outrider_tools.training.corpus import run_texts
from outrider_tools.training.drafters import export_drafter, make_learner, resolved
from outrider_tools.training.evaluate import load_drafter, measure
from outrider_tools.training.figures import Report
from outrider_tools.training.options import RECORD_FILE, STATE_FILE, WORK_FOLDER, RunOptions
from outrider_tools.training.parallel import RankGroup
from outrider_tools.training.prompts import ChatForm
from outrider_tools.training.target import TargetModel
from outrider_tools.training.texts import coverage
from outrider_tools.training.trainer import Trainer


def train_rank(model_folder: Path, out: Path, options: RunOptions, device: torch.device, ranks: RankGroup) -> None:
    """`train` in one of several processes; the first one speaks."""
    with Report() if ranks.is_main else Report(io.StringIO()) as report:
        train(model_folder, out, device, options, report, ranks)


def train(
    model_folder: Path,
    out: Path,
    device: torch.device,
    options: RunOptions,
    report: Report,
    ranks: RankGroup | None = None,
) -> None:
    """Train a drafter and write it to `out`; what can be taken up again later lies in its folder `work`.

    Of several processes the first one does what follows the training.

    Raises ConfigError: something given does not fit, or prompts for training are also for the evaluation.
    """
    ranks = ranks or RankGroup()
    processes = ranks.count
    work = out / WORK_FOLDER
    with writing("--out", work):
        work.mkdir(exist_ok=True)
    clock = _Clock()
    report.line(f"loading {model_folder.name} on {device}")
    target = TargetModel(model_folder, device)
    options = resolved(options, target.config)
    form = ChatForm(model_folder)
    clock.lap("load")

    found = run_texts(target, form, options, work, report, ranks)
    texts = found.texts
    clock.lap("text")
    report.line(f"{len(texts)} answers, {texts.num_answer_tokens} tokens")

    report.line("preparing the drafter, and its first step")
    learner = make_learner(target, texts, options)
    module, ids = learner.module, learner.module.target_ids
    must_fit = {**options.of_drafter, "target": target.fingerprint, "text": found.digest}
    trainer = Trainer(learner, texts, options.trainer, work / STATE_FILE, ranks, must_fit)
    history = trainer.run(report.point)
    ranks.close()
    if not ranks.is_main:
        return
    clock.lap("training")
    window = 0 if options.algorithm in ("STANDALONE", "NEXTN") else options.corpus.answer_tokens
    with writing("--out", out):
        num_bytes = export_drafter(module, model_folder, out, window=window)

    drafter = load_drafter(options.algorithm, out, model_folder, target.model)
    evaluations = measure(
        target.model,
        form,
        drafter,
        found.questions,
        report,
        temperatures=options.eval_temperatures,
        max_new_tokens=options.eval_new_tokens,
        tree=options.tree,
        num_rows=min(options.corpus.num_rows, len(found.questions)),
    )
    clock.lap("evaluation")
    record = {
        "target": model_folder.name,
        "algorithm": options.algorithm,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "processes": processes,
        "versions": {"outrider": outrider.__version__, "torch": torch.__version__},
        "questions_given": int(found.options.get("given", 0)),
        "answers": len(texts),
        "answer_tokens": texts.num_answer_tokens,
        "beginnings": found.beginnings,
        "trained_parameters": sum(parameter.numel() for parameter in module.parameters()),
        "weight_bytes": num_bytes,
        "vocabulary_coverage": 1.0 if ids is None else coverage(texts, ids.cpu().numpy(), target.config.vocab_size),
        # Text of an earlier run was made with that run's.
        "options": asdict(options) | ({"corpus": found.options} if options.text is not None else {}),
        "seconds": clock.seconds,
        "training": asdict(history),
        "evaluation": [asdict(evaluation) for evaluation in evaluations],
    }
    text = json.dumps(record, indent=1, default=lambda path: path.name)
    record = json.loads(text)
    with writing("--out", out):
        (out / RECORD_FILE).write_text(text + "\n", "utf-8")
        plots = write_plots(record, out, report)
        write_card(record, evaluations, out, plots)
    report.table(_summary(record))
    report.evaluations(evaluations)


class _Clock:
    """Seconds that each stage took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = round(now - self._last, 2)
        self._last = now


def _summary(record: dict[str, Any]) -> list[tuple[str, str]]:
    points = record["training"]["points"]
    loss = f"{points[-1]['loss']:.3f}" if points else "none"
    return [
        ("answers, tokens", f"{record['answers']}, {record['answer_tokens']}"),
        ("steps, last loss", f"{record['training']['total_steps']}, {loss}"),
        ("tokens in the draft vocabulary", f"{record['vocabulary_coverage']:.4f}"),
        ("weights", f"{record['weight_bytes'] / 1e6:.1f} MB"),
        ("seconds", ", ".join(f"{name} {value:.0f}" for name, value in record["seconds"].items())),
    ]
