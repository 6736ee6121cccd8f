"""`outrider train`: train a drafter for a target, on text that the target itself writes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from importlib import import_module
from typing import Any, TypeVar

from outrider.cli.options import whole_number
from outrider.config.base import expand
from outrider.errors import ConfigError, under
from outrider.models.store import DEFAULT_MODEL, resolve_model
from outrider_tools.training.options import (
    ALGORITHMS,
    FLAGS,
    RECORD_FILE,
    WORK_FOLDER,
    CorpusOptions,
    RunOptions,
    TrainerOptions,
    TreeShape,
)

OptionsT = TypeVar("OptionsT", RunOptions, CorpusOptions, TrainerOptions, TreeShape)

# Sizes of a smoke run, which shows within about a minute on two cores that everything works; its drafter is useless.
SMOKE_CORPUS = {"tokens": 500, "invented": 8, "question_tokens": 64, "answer_tokens": 24, "held_out": 2, "num_rows": 8}
SMOKE_TRAINER = {"steps": 6, "batch_tokens": 256, "unroll": 3}
SMOKE_TREE = {"nodes": 8, "depth": 3, "branching": 4}


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"The target: a name or folder. Default: {DEFAULT_MODEL}."
    )
    parser.add_argument(
        "--out", required=True, type=expand, help="Folder of the drafter; an interrupted run is continued."
    )
    parser.add_argument(
        "--algorithm",
        type=str.upper,
        choices=ALGORITHMS,
        default="EAGLE3",
        help="Kind of drafter to train, as named by --speculative-algorithm. Default: EAGLE3.",
    )
    _add_flags(parser.add_argument_group("text"))
    training = parser.add_argument_group("training")
    _add_flags(training)
    training.add_argument(
        "--gpus",
        type=whole_number(1, 64),
        help="Number of processes, one per GPU. Default: one for each visible GPU; 1 on a CPU.",
    )
    _add_flags(parser.add_argument_group("drafter"))
    parser.add_argument("--seed", type=whole_number(0, 2**31), default=0, help="Seed of everything random. Default: 0.")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="Device to compute on. Default: auto, a GPU if there is one.",
    )
    parser.add_argument("--smoke", action="store_true", help="Make a tiny run that only shows that everything works.")


def _add_flags(group: Any) -> None:
    """Add the options of this group to the parser. An option that is not given is None."""
    for kind, title in ((RunOptions, "drafter"), (CorpusOptions, "text"), (TrainerOptions, "training")):
        for field in fields(kind):
            how = dict(field.metadata)
            if how and how.pop("group", title) == group.title:
                name = FLAGS.get(field.name, field.name).replace("_", "-")
                group.add_argument(f"--{name}", dest=field.name, default=None, **how)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if not arguments.out.name:
        raise ConfigError(f"--out: {str(arguments.out)!r} names no folder of the drafter's own; give one")
    _check(arguments)
    # The next steps take seconds, and the first figures come only after them.
    print(f"train: {arguments.algorithm} for {arguments.model} into {arguments.out}", file=sys.stderr, flush=True)
    with under("--model"):
        folder = resolve_model(arguments.model)
    init_from = None
    if arguments.init_from:
        with under("--init-from"):
            init_from = resolve_model(arguments.init_from, needs_tokenizer=False)
    for flag, path in (("--model", folder), ("--init-from", init_from)):
        if path is not None and path.resolve() == arguments.out.resolve():
            raise ConfigError(f"--out: is the folder of {flag}, whose files it would replace; choose another")
    # Imported by name: the command line must import without torch.
    module, torch = import_module("outrider_tools.training.run"), import_module("torch")
    device = import_module("outrider.device").choose_device(arguments.device)
    options = _given(RunOptions(), arguments)
    options = replace(
        options,
        init_from=init_from,
        corpus=_given(options.corpus, arguments, SMOKE_CORPUS),
        trainer=_given(options.trainer, arguments, SMOKE_TRAINER),
        tree=_given(options.tree, arguments, SMOKE_TREE),
        eval_new_tokens=16 if arguments.smoke else options.eval_new_tokens,
    )
    most = torch.cuda.device_count() if device.type == "cuda" else 1
    count = arguments.gpus or most
    if count > most:
        found = f"torch finds {most} here" if device.type == "cuda" else "on a CPU one process trains; leave it out"
        raise ConfigError(f"--gpus {count}: {found}")
    try:
        if count > 1:
            parallel, rank = import_module("outrider_tools.training.parallel"), "outrider_tools.training.run:train_rank"
            parallel.run_ranks(count, device.type, rank, folder, arguments.out, options)
        else:
            with import_module("outrider_tools.training.figures").Report() as report:
                module.train(folder, arguments.out, device, options, report)
    except ConfigError:
        # A refused run leaves no empty folders.
        for made in (arguments.out / WORK_FOLDER, arguments.out):
            with suppress(OSError):
                made.rmdir()
        raise
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if the folder holds another model, or options have no effect beside others."""
    out = arguments.out
    with under("--out"):
        others = (out / "config.json").exists() or any(out.glob("*.safetensors"))
        if others and not (out / WORK_FOLDER).is_dir() and not (out / RECORD_FILE).exists():
            raise ConfigError(f"{out} holds a model that no training has written; choose a new folder")
    if arguments.steps is not None and arguments.minutes is not None:
        raise ConfigError("--minutes: cannot be combined with --steps; leave one of the two out")
    if arguments.muon_learning_rate is not None and arguments.optimizer == "adamw":
        raise ConfigError("--muon-learning-rate: --optimizer adamw does not use it; leave one of the two out")
    if arguments.text is not None:
        for field in fields(CorpusOptions):
            # The number of rows matters for the evaluation, too.
            if field.metadata and field.name != "num_rows" and getattr(arguments, field.name) is not None:
                flag = field.name.replace("_", "-")
                raise ConfigError(
                    f"--{flag}: no text is generated with --text {arguments.text}; leave one of the two out"
                )


def _given(defaults: OptionsT, arguments: argparse.Namespace, smoke: Mapping[str, int] | None = None) -> OptionsT:
    """Return `defaults` with what the command line gives, or else with the sizes of a smoke run if it is one."""
    values: dict[str, Any] = dict(smoke or {}) if arguments.smoke else {}
    given = {field.name: getattr(arguments, field.name, None) for field in fields(defaults)}
    return replace(defaults, **values | {name: value for name, value in given.items() if value is not None})
