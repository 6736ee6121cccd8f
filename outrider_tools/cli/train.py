"""`outrider train`: a drafter for a target, from text that the target itself writes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from outrider.cli.options import number, whole_number
from outrider.errors import ConfigError
from outrider.models.store import DEFAULT_MODEL, resolve_model

ALGORITHMS = ("EAGLE3", "EAGLE", "NEXTN", "STANDALONE")

# Sizes of a run that shows within about a minute on two cores that everything works; the drafter is worth nothing.
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
    parser.add_argument("--out", required=True, type=Path, help="The drafter's folder; an interrupted run is taken up.")
    parser.add_argument(
        "--algorithm",
        type=str.upper,
        choices=ALGORITHMS,
        default="EAGLE3",
        help="What to train, in the words of --speculative-algorithm. Default: EAGLE3.",
    )
    _add_text(parser.add_argument_group("text"))
    _add_training(parser.add_argument_group("training"))
    _add_drafter(parser.add_argument_group("drafter"))
    parser.add_argument("--seed", type=whole_number(0, 2**31), default=0, help="Of everything drawn. Default: 0.")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="Default: auto, a GPU if there is one."
    )
    parser.add_argument("--smoke", action="store_true", help="A tiny run that only shows that all of it works.")


def _add_text(group: Any) -> None:
    group.add_argument("--prompts", type=Path, help="JSONL of questions to train on, beside those it invents.")
    group.add_argument("--eval-prompts", type=Path, help="JSONL of questions to evaluate with; never trained on.")
    group.add_argument("--text", type=Path, help="Take the text that an earlier run left in this --out; make none.")
    group.add_argument("--tokens", type=whole_number(1, 10**10), help="Answer tokens to make. Default: 10 million.")
    group.add_argument(
        "--invented", type=whole_number(0, 10**8), help="Questions to invent. Default: enough for --tokens."
    )
    group.add_argument("--opened", type=float, help="Share of them whose first words are given. Default: 0.6.")
    group.add_argument("--temperatures", type=_numbers, help="Answers take these in turn. Default: 0,0,0.8,1.")
    group.add_argument("--text-minutes", type=float, help="Bound on questions, and on answers. Default: none.")
    group.add_argument("--num-rows", type=whole_number(1, 65536), help="Conversations at once. Default: 1024.")


def _add_training(group: Any) -> None:
    group.add_argument("--steps", type=whole_number(1, 10**8), help="Training steps; instead of --minutes.")
    group.add_argument("--minutes", type=float, help="Minutes of training, text apart. Default: 2.")
    group.add_argument(
        "--batch-tokens", type=whole_number(64, 10**7), help="Tokens of a step, on each GPU. Default: 16384."
    )
    group.add_argument("--unroll", type=whole_number(1, 32), help="Steps on own features. Default: 8.")
    group.add_argument(
        "--hit-weight",
        type=number(0, 1),
        help="EAGLE3: share of the hit loss, which aims at answers drawn at temperature 1, beside the cross-entropy, "
        "0 to 1. Default: 0.",
    )
    group.add_argument("--decay", type=float, help="Weight of such a step against the one before. Default: 1.")
    group.add_argument("--learning-rate", type=float, help="Peak learning rate. Default: 0.001.")
    group.add_argument("--optimizer", choices=("adamw", "muon"), help="What moves new matrices. Default: muon.")
    group.add_argument("--muon-learning-rate", type=float, help="Muon's peak learning rate. Default: 0.005.")
    group.add_argument("--average", type=float, help="Export a running average that keeps this share, as 0.999.")
    group.add_argument(
        "--no-packed", dest="packed", action="store_false", default=None, help="Batches of any shape on a GPU."
    )
    group.add_argument("--no-compile", dest="compile", action="store_false", default=None, help="Compile nothing.")
    group.add_argument(
        "--gpus", type=whole_number(1, 64), help="Processes, one a GPU. Default: all that are visible; 1 on a CPU."
    )


def _add_drafter(group: Any) -> None:
    group.add_argument(
        "--init-from",
        help="EAGLE3: begin as this head of the same target, a folder or hub id, with its sizes and vocabulary.",
    )
    group.add_argument(
        "--draft-vocab-size",
        type=whole_number(1, 10**6),
        default=0,
        help="EAGLE3: tokens that it may guess. Default: 8192, or as --init-from.",
    )
    group.add_argument(
        "--intermediate-size",
        type=whole_number(0, 10**6),
        default=0,
        help="EAGLE3: width of its MLP. Default: the target's, or as --init-from.",
    )
    group.add_argument("--feature-layers", help="EAGLE3: layers whose input it reads, as in 2,15,27 (30's default).")
    group.add_argument(
        "--feature-weight",
        type=float,
        help="EAGLE, NEXTN: weight of the distance to the target's features in the loss. Default: EAGLE 0.5, NEXTN 0.",
    )
    group.add_argument("--layers", type=whole_number(1, 1000), default=4, help="STANDALONE: its layers. Default: 4.")
    group.add_argument(
        "--hidden",
        type=whole_number(0, 10**6),
        default=0,
        help="STANDALONE: its hidden size; the target's heads keep their size. Default: the target's.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command."""
    # What follows takes seconds, and the first figures come behind it.
    print(f"train: {arguments.algorithm} for {arguments.model} into {arguments.out}", file=sys.stderr, flush=True)
    folder = resolve_model(arguments.model)
    # By name: the command line imports without torch.
    module, torch = import_module("outrider_tools.training.run"), import_module("torch")
    device = pick_device(arguments.device, torch)
    options = module.RunOptions(
        algorithm=arguments.algorithm,
        prompts=arguments.prompts,
        eval_prompts=arguments.eval_prompts,
        text=arguments.text,
        init_from=resolve_model(arguments.init_from, needs_tokenizer=False) if arguments.init_from else None,
        draft_vocab_size=arguments.draft_vocab_size,
        feature_layers=_layers(arguments.feature_layers),
        intermediate_size=arguments.intermediate_size,
        own_feature_weight=arguments.feature_weight,
        layers=arguments.layers,
        hidden=arguments.hidden,
    )
    options = replace(
        options,
        corpus=_given(options.corpus, arguments, SMOKE_CORPUS),
        trainer=_given(options.trainer, arguments, SMOKE_TRAINER),
        tree=_given(options.tree, arguments, SMOKE_TREE),
        eval_new_tokens=16 if arguments.smoke else options.eval_new_tokens,
    )
    count = arguments.gpus or (torch.cuda.device_count() if device.type == "cuda" else 1)
    if device.type == "cuda" and count > torch.cuda.device_count():
        raise ConfigError(f"--gpus {count}: torch finds {torch.cuda.device_count()} here")
    if count > 1:
        parallel = import_module("outrider_tools.training.parallel")
        parallel.run_ranks(count, device.type, "outrider_tools.training.run:train_rank", folder, arguments.out, options)
        return 0
    with import_module("outrider_tools.training.report").Report() as report:
        module.train(folder, arguments.out, device, options, report)
    return 0


def pick_device(name: str, torch: Any) -> Any:
    """A torch device: `auto` is a GPU if there is one.

    Raises:
        ConfigError: there is none, and one was asked for.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; choose cpu")
    return torch.device(name)


def _given(defaults: Any, arguments: argparse.Namespace, smoke: Mapping[str, int]) -> Any:
    """A dataclass of options: what the command line gives, else the sizes of a smoke run if it is one."""
    values = dict(smoke) if arguments.smoke else {}
    for field in fields(defaults):
        value = getattr(arguments, field.name, None)
        if value is not None:
            values[field.name] = value
    return replace(defaults, **values)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _layers(text: str | None) -> tuple[int, ...]:
    if not text:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--feature-layers {text}: expected numbers with commas between them") from None
