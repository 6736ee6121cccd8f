"""`outrider train`: a drafter for a target, from text that the target itself writes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from outrider.cli.options import whole_number
from outrider.errors import ConfigError
from outrider.models.store import DEFAULT_MODEL, resolve_model

# Sizes of a run that shows within about a minute on two cores that everything works; the head is worth nothing.
SMOKE_CORPUS = {
    "tokens": 500,
    "invented": 8,
    "question_tokens": 64,
    "answer_tokens": 24,
    "held_out": 2,
    "num_rows": 8,
}
SMOKE_TRAINER = {"steps": 6, "batch_tokens": 256, "unroll": 3}
SMOKE_TREE = {"nodes": 8, "depth": 3, "branching": 4}


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"The target: a name or folder. Default: {DEFAULT_MODEL}."
    )
    parser.add_argument("--out", required=True, type=Path, help="The head's folder; an interrupted run is taken up.")
    parser.add_argument("--prompts", type=Path, help="JSONL of questions to train on, beside those it invents.")
    parser.add_argument("--eval-prompts", type=Path, help="JSONL of questions to evaluate with; never trained on.")
    parser.add_argument("--tokens", type=whole_number(1, 10**10), help="Answer tokens to make. Default: 10 million.")
    parser.add_argument("--invented", type=whole_number(0, 10**8), help="Questions to invent. Default: 40000.")
    parser.add_argument("--text-minutes", type=float, help="Bound on questions, and on answers. Default: none.")
    parser.add_argument("--steps", type=whole_number(1, 10**8), help="Training steps; instead of --minutes.")
    parser.add_argument("--minutes", type=float, help="Minutes of training, text apart. Default: 2.")
    parser.add_argument("--batch-tokens", type=whole_number(64, 10**7), help="Tokens of a step. Default: 16384.")
    parser.add_argument("--unroll", type=whole_number(1, 32), help="Steps on own features. Default: 8.")
    parser.add_argument("--decay", type=float, help="Weight of such a step against the one before. Default: 1.")
    parser.add_argument("--learning-rate", type=float, help="Peak learning rate. Default: 0.001.")
    parser.add_argument(
        "--draft-vocab-size", type=whole_number(1, 10**6), default=8192, help="Tokens that it may guess. Default: 8192."
    )
    parser.add_argument("--feature-layers", help="Layers whose input it reads, as in 2,15,27 (the default of 30).")
    parser.add_argument("--num-rows", type=whole_number(1, 65536), help="Conversations at once. Default: 1024.")
    parser.add_argument("--seed", type=whole_number(0, 2**31), default=0, help="Of everything drawn. Default: 0.")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="Default: auto, a GPU if there is one."
    )
    parser.add_argument("--smoke", action="store_true", help="A tiny run that only shows that all of it works.")


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command."""
    folder = resolve_model(arguments.model)
    # By name: the command line imports without torch.
    module, torch = import_module("outrider.training.run"), import_module("torch")
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; choose cpu")
    options = module.RunOptions(
        prompts=arguments.prompts,
        eval_prompts=arguments.eval_prompts,
        draft_vocab_size=arguments.draft_vocab_size,
        feature_layers=_layers(arguments.feature_layers),
    )
    options = replace(
        options,
        corpus=_given(options.corpus, arguments, SMOKE_CORPUS),
        trainer=_given(options.trainer, arguments, SMOKE_TRAINER),
        tree=_given(options.tree, arguments, SMOKE_TREE),
        eval_new_tokens=16 if arguments.smoke else options.eval_new_tokens,
    )
    report = import_module("outrider.training.report").Report()
    module.train_eagle3(folder, arguments.out, torch.device(device), options, report)
    return 0


def _given(defaults: Any, arguments: argparse.Namespace, smoke: Mapping[str, int]) -> Any:
    """A dataclass of options: what the command line gives, else the sizes of a smoke run if it is one."""
    values = dict(smoke) if arguments.smoke else {}
    for field in fields(defaults):
        value = getattr(arguments, field.name, None)
        if value is not None:
            values[field.name] = value
    return replace(defaults, **values)


def _layers(text: str | None) -> tuple[int, ...]:
    if not text:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--feature-layers {text}: expected numbers with commas between them") from None
