"""A whole training: questions, text, drafter, evaluation, record, and the card and plots made from the record.

Finished stages are not repeated.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import outrider
from outrider.config.draft import BLOCK_ALGORITHMS
from outrider.errors import count_of
from outrider.models.drafters.kinds import FREQUENT_TOKENS
from outrider_tools.files import writing
from outrider_tools.training.corpus import run_texts
from outrider_tools.training.drafters import DRAFT_VOCAB_SIZE, export_drafter, make_learner, resolved, round_output
from outrider_tools.training.evaluate import load_drafter, measure
from outrider_tools.training.figures import Evaluation, Report, decoding, length_table, markdown, rate_table
from outrider_tools.training.options import RECORD_FILE, STATE_FILE, WORK_FOLDER, RunOptions
from outrider_tools.training.parallel import RankGroup
from outrider_tools.training.prompts import Beginnings, ChatForm
from outrider_tools.training.target import TargetModel
from outrider_tools.training.texts import choose_vocabulary, coverage
from outrider_tools.training.trainer import Trainer


def train_rank(model_folder: Path, out: Path, options: RunOptions, device: torch.device, ranks: RankGroup) -> None:
    """Call `train` in one of several processes. Only the first one reports."""
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
    """Train a drafter and write it to `out`. What an interrupted run continues from lies in its folder `work`.

    With several processes, the first one alone does what follows the training.

    Raises ConfigError if an option does not fit, or prompts for training are also for the evaluation.
    """
    ranks = ranks or RankGroup()
    processes = ranks.count
    work = out / WORK_FOLDER
    with writing("--out", work):
        work.mkdir(exist_ok=True)
    laps = [("", time.monotonic())]
    report.line(f"loading {model_folder.name} on {device}")
    target = TargetModel(model_folder, device)
    options = resolved(options, target.config)
    form = ChatForm(model_folder)
    laps.append(("load", time.monotonic()))

    texts, questions, found = run_texts(target, form, options, work, report, ranks)
    laps.append(("text", time.monotonic()))
    report.line(f"{count_of(len(texts), 'answer')}, {count_of(texts.num_answer_tokens, 'token')}")

    report.line("preparing the drafter, and its first step")
    learner = make_learner(target, texts, options)
    module, ids = learner.module, learner.module.target_ids
    must_fit = {**options.of_drafter, "target": target.fingerprint, "text": found.texts.digest()}
    trainer = Trainer(learner, texts, options.trainer, work / STATE_FILE, ranks, must_fit)
    history = trainer.run(report.point)
    ranks.close()
    if not ranks.is_main:
        return
    laps.append(("training", time.monotonic()))
    # Text of an earlier run has that run's answer length.
    longest = int(found.options.get("answer_tokens", options.corpus.answer_tokens))
    window = 0 if options.algorithm in ("STANDALONE", "NEXTN") else longest
    output_dtype = None
    if options.output_dtype == "float8_e4m3":
        output_dtype = torch.float8_e4m3fn
        round_output(learner, next(trainer.stream()))
    with writing("--out", out):
        num_bytes = export_drafter(module, model_folder, out, window=window, output_dtype=output_dtype)
        if ids is not None and ids.numel() > DRAFT_VOCAB_SIZE:
            size, stops = target.config.vocab_size, target.config.eos_token_ids
            frequent = choose_vocabulary(texts, size, DRAFT_VOCAB_SIZE, stops)
            (out / FREQUENT_TOKENS).write_text(json.dumps(frequent.tolist()) + "\n", "utf-8")

    drafter = load_drafter(options.algorithm, out, model_folder, target.model)
    evaluations = measure(
        target.model,
        form,
        drafter,
        questions,
        report,
        temperatures=options.eval_temperatures,
        max_new_tokens=options.eval_new_tokens,
        tree=options.tree,
        num_rows=min(options.corpus.num_rows, len(questions)),
    )
    laps.append(("evaluation", time.monotonic()))
    record = {
        "target": model_folder.name,
        "algorithm": options.algorithm,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "processes": processes,
        "versions": {"outrider": outrider.__version__, "torch": torch.__version__},
        "questions_given": int(found.options.get("given", 0)),
        "answers": len(texts),
        "answer_tokens": texts.num_answer_tokens,
        # Counted over the texts that were trained on, which lack the questions of the evaluation.
        "beginnings": Beginnings(form, options.corpus.beginnings).counts(texts),
        "trained_parameters": sum(parameter.numel() for parameter in module.parameters()),
        "weight_bytes": num_bytes,
        "vocabulary_coverage": 1.0 if ids is None else coverage(texts, ids.cpu().numpy(), target.config.vocab_size),
        # Text of an earlier run was made with that run's options.
        "options": asdict(options) | ({"corpus": found.options} if options.text is not None else {}),
        "seconds": {name: round(now - before, 2) for (_, before), (name, now) in pairwise(laps)},
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


CARD = "README.md"

KINDS = {
    "EAGLE3": "an EAGLE-3 head (arXiv 2503.01840)",
    "EAGLE": "an EAGLE-2 head (arXiv 2406.16858)",
    "DFLASH": "a DFLASH head (arXiv 2602.06036), which guesses a block of tokens in one forward",
    "DSPARK": "a DSPARK head, which guesses a block of tokens in one forward, and how each token affects the next",
    "NEXTN": "a multi-token prediction module in MiMo's layout",
    "STANDALONE": "a small language model, trained to write as its target does",
}
# Other engines that read such a folder. Untested claims are not made.
OTHER_ENGINES = {
    "EAGLE3": "The folder has the key names and config of public EAGLE-3 heads (`LlamaForCausalLMEagle3`), which "
    "SGLang and vLLM read. It holds no embedding: these engines take the target's.",
    "EAGLE": "The folder has the key names of public EAGLE and EAGLE-2 heads, which SGLang reads as `EAGLE`. It holds "
    "neither an embedding nor an output matrix: both are taken from the target.",
    **dict.fromkeys(
        ("DFLASH", "DSPARK"),
        "The tensors have the names of DeepSpec's heads (`Qwen3DSparkModel`). The head has a vocabulary of its own "
        "(`d2t`), as in vLLM's speculators, and no embedding: it takes the target's. No other engine was tried.",
    ),
    "NEXTN": "The tensors have MiMo's names (`model.mtp_layers.0.`). Engines that serve MiMo expect them in the "
    "checkpoint of a MiMo target; only Outrider reads them from a folder of their own, for a target of another family.",
    "STANDALONE": "The folder is an ordinary model of its target's architecture with the target's tokenizer. Every "
    "engine that supports draft models reads it, and it can also be served on its own.",
}


def write_card(record: dict[str, Any], evaluations: Sequence[Evaluation], folder: Path, plots: Sequence[str]) -> None:
    """Write README.md to `folder`. `record` is what training.json holds; `plots` are files in the folder."""
    algorithm, target = record["algorithm"], record["target"]
    parts = [
        f"---\nlibrary_name: outrider\nbase_model: {target}\ntags:\n- speculative-decoding\n---",
        f"# {algorithm} drafter for {target}\n\nThis is {KINDS[algorithm]}, for speculative decoding of {target}. "
        "The target checks every guess, so the drafter changes the speed and never the answer.",
        "## Results\n\n" + _how_measured(record) + "\n\n" + markdown(length_table(evaluations)),
        markdown(rate_table(evaluations)),
        *(f"![{Path(name).stem.replace('_', ' ')}]({name})" for name in plots),
        "## Training\n\n" + markdown([["", ""], *_training(record)]),
        "## Use\n\n" + _use(record),
        "## Text and licence\n\n" + _licence(record),
    ]
    (folder / CARD).write_text("\n\n".join(parts) + "\n", "utf-8")


def _how_measured(record: dict[str, Any]) -> str:
    options, tree = record["options"], record["options"]["tree"]
    asked = options["eval_prompts"] or "questions that the target invented and that were held out from training"
    return (
        f"Measured on the target's own answers to {asked}, up to {options['eval_new_tokens']} tokens, ended by the "
        "end-of-sequence token. *chain* and *tree* are accept lengths, accepted tokens + 1 per round, with chains of "
        f"{tree['depth']}, and with trees of {tree['nodes']} nodes and depth {tree['depth']}. The *accept rate* at a "
        "depth is the rate at which the drafter's likeliest token is accepted, over all positions, after the target's "
        "tokens and the drafter's own features. At a temperature above 0, target and drafter both rank tokens by the "
        "shared noise. *Loops* are answers whose last 64 tokens repeat with a period of at most 32. "
        "`outrider evaluate-draft` measures the same."
    )


def _training(record: dict[str, Any]) -> list[list[str]]:
    trainer, training, seconds = record["options"]["trainer"], record["training"], record["seconds"]
    points, vocabulary = training["points"], ""
    if record["algorithm"] in ("EAGLE3", *BLOCK_ALGORITHMS):
        size, share = record["options"]["draft_vocab_size"], record["vocabulary_coverage"]
        vocabulary = f"{size} tokens, {100 * share:.2f} % of the answers'"
    rows = {
        "target": record["target"],
        "begun as": record["options"].get("init_from"),
        "answers": str(record["answers"]),
        "tokens of answers": str(record["answer_tokens"]),
        "texts by what they begin with": ", ".join(f"{name} {count}" for name, count in record["beginnings"].items()),
        "questions given": str(record["questions_given"] or "none"),
        "steps": str(training["total_steps"]),
        "tokens a step": str(trainer["batch_tokens"] * record["processes"]),
        "steps on own features": "" if record["algorithm"] == "STANDALONE" else str(trainer["unroll"]),
        "peak learning rate": _rates(trainer),
        "seed": str(trainer["seed"]),
        "last loss": f"{points[-1]['loss']:.3f}" if points else "none",
        "parameters trained": str(record["trained_parameters"]),
        "weights": f"{record['weight_bytes'] / 1e6:.1f} MB",
        "draft vocabulary": vocabulary,
        "device": f"{record['processes']} x {record['device']}" if record["processes"] > 1 else record["device"],
        "minutes of training": f"{training['seconds'] / 60:.1f}",
        "minutes of the run that wrote this": f"{sum(seconds.values()) / 60:.1f}",
        "made with": ", ".join(f"{name} {number}" for name, number in record["versions"].items()),
        "all options": "`training.json`",
    }
    return [[name, value] for name, value in rows.items() if value]


def _use(record: dict[str, Any]) -> str:
    algorithm = record["algorithm"]
    return (
        "```console\n"
        f"outrider up --model {record['target']} --speculative-algorithm {algorithm},NGRAM \\\n"
        "    --speculative-draft-model-path THIS_FOLDER\n"
        f"outrider evaluate-draft --model {record['target']} --draft THIS_FOLDER --prompts QUESTIONS.jsonl\n"
        f"```\n\n{OTHER_ENGINES[algorithm]}"
    )


def _rates(trainer: dict[str, Any]) -> str:
    if trainer["optimizer"] == "muon":
        return f"{trainer['muon_learning_rate']:g} (Muon), {trainer['learning_rate']:g} (AdamW)"
    return f"{trainer['learning_rate']:g}"


def _licence(record: dict[str, Any]) -> str:
    count = record["questions_given"]
    asked = (
        f" and to {count_of(count, 'question')} that it was given, which have a licence of their own" if count else ""
    )
    begun = record["options"].get("init_from")
    before = f" Training started from {begun}, which has a text and a licence of its own." if begun else ""
    return (
        f"The drafter learned from text that {record['target']} wrote itself, in answer to questions that it "
        f"invented{asked}. No other text was used.{before} The drafter's weights derive from the target's, and "
        "training started from some of these, so the target's licence applies to the drafter, including its terms on a "
        "model's output and on derived works."
    )


CURVE, DEPTHS = "training.png", "accept_rate.png"
SIZE, DPI = (9.0, 3.6), 110
# Depths that get a line of their own in the curve.
SHOWN_DEPTHS = (1, 2, 4, 6, 8)


def write_plots(record: dict[str, Any], folder: Path, report: Report) -> list[str]:
    """Draw a training's record. Return the files' names, none if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        report.line("no plots: matplotlib is not installed (pip install matplotlib)")
        return []
    names = []
    for name, draw in ((CURVE, _curve), (DEPTHS, _depths)):
        # Not pyplot, which looks for a display.
        figure = import_module("matplotlib.figure").Figure(figsize=SIZE, layout="constrained")
        if draw(figure, record):
            figure.savefig(folder / name, dpi=DPI)
            names.append(name)
    return names


def _curve(figure: Any, record: dict[str, Any]) -> bool:
    """Draw loss, and agreement by depth, over the steps. Return whether there is anything to draw."""
    points = record["training"]["points"]
    if not points:
        return False
    steps = [point["step"] for point in points]
    loss, rates = figure.subplots(1, 2)
    loss.plot(steps, [point["loss"] for point in points])
    loss.set(xlabel="step", ylabel="loss", title="loss")
    for depth in SHOWN_DEPTHS:
        if depth <= len(points[0]["rates"]):
            rates.plot(steps, [point["rates"][depth - 1] for point in points], label=f"depth {depth}")
    rates.set(xlabel="step", ylabel="share of places", title="agreement in training", ylim=(0, None))
    rates.legend()
    for axes in (loss, rates):
        axes.grid(alpha=0.3)
    return True


def _depths(figure: Any, record: dict[str, Any]) -> bool:
    """Draw accept rates at the end, and how far rounds get."""
    rates, rounds = figure.subplots(1, 2, sharex=True)
    for evaluation in record["evaluation"]:
        found, name = evaluation["all"], decoding(evaluation["temperature"])
        places = range(1, len(found["rates"]) + 1)
        rates.plot(places, found["rates"], marker="o", label=name)
        for kind in ("chain", "tree"):
            reached = found[kind]["reached"]
            rounds.plot(range(1, len(reached) + 1), reached, marker="o", label=f"{name}, {kind}")
    rates.set(xlabel="depth", ylabel="accept rate", title="accept rate, teacher-forced", ylim=(0, None))
    rounds.set(xlabel="depth", ylabel="share of rounds", title="rounds that accept so many", ylim=(0, 1))
    for axes in (rates, rounds):
        axes.grid(alpha=0.3)
        axes.legend()
    return True
