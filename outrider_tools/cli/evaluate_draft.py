"""`outrider evaluate-draft`: measure how well a drafter guesses a target's text, offline and without services."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from typing import Any

from outrider.cli.options import number, whole_number
from outrider.config.base import expand
from outrider.errors import ConfigError, under
from outrider.models.store import DEFAULT_MODEL, resolve_model
from outrider_tools.files import check_writable, writing
from outrider_tools.training.options import ALGORITHMS, TreeShape

# Characters of a system message that the report shows.
SYSTEM_SHOWN = 48


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"The target: a name or folder. Default: {DEFAULT_MODEL}."
    )
    parser.add_argument("--draft", required=True, help="The drafter: a head's or model's folder, or a hub id.")
    parser.add_argument(
        "--algorithm",
        type=str.upper,
        choices=ALGORITHMS,
        help="Kind of the drafter, as named by --speculative-algorithm. Default: as its tensors tell.",
    )
    parser.add_argument(
        "--prompts",
        required=True,
        type=expand,
        help="JSONL file of questions: prompt or turns, and optionally a category.",
    )
    parser.add_argument(
        "--system",
        action="append",
        default=[],
        metavar="TEXT",
        help="Also ask after this system message; empty: none. May be repeated.",
    )
    parser.add_argument(
        "--raw", action="store_true", help="Also ask without a chat: the target continues the question."
    )
    parser.add_argument("--limit", type=whole_number(1, 10**9), help="Use this many questions, spread over the file.")
    parser.add_argument(
        "--temperature",
        type=number(0, 100),
        nargs="+",
        default=[0.0, 1.0],
        help="One or several temperatures. Default: 0 1.",
    )
    parser.add_argument(
        "--max-new-tokens", type=whole_number(1, 10**6), default=256, help="Most tokens of an answer. Default: 256."
    )
    parser.add_argument("--nodes", type=whole_number(1, 1024), default=32, help="Nodes of a tree. Default: 32.")
    parser.add_argument("--depth", type=whole_number(1, 64), default=8, help="Depth of chains and trees. Default: 8.")
    parser.add_argument("--branching", type=whole_number(1, 64), default=8, help="Most children of a node. Default: 8.")
    parser.add_argument(
        "--num-rows", type=whole_number(1, 65536), default=256, help="Answers generated at once. Default: 256."
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, 2**62),
        default=0,
        help="Seed of the first answer; the others follow from it. Default: 0.",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="Device to compute on. Default: auto, a GPU if there is one.",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="Number format. Default: bfloat16 on a GPU.",
    )
    parser.add_argument("--json", type=expand, help="JSON file to write everything to.")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.json is not None:
        check_writable("--json", arguments.json)
    # Imported by name: the command line must import without torch.
    torch, stage = import_module("torch"), import_module("outrider_tools.training.evaluate")
    prompts = import_module("outrider_tools.training.prompts")
    with under("--prompts"):
        questions = prompts.read_questions(arguments.prompts)
    if arguments.limit is not None and arguments.limit < len(questions):
        questions = [questions[i * len(questions) // arguments.limit] for i in range(arguments.limit)]
    with under("--model"):
        target_folder = resolve_model(arguments.model)
    with under("--draft"):
        draft_folder = resolve_model(arguments.draft, needs_tokenizer=False)
    algorithm = arguments.algorithm or import_module("outrider.models.drafters.kinds").algorithm_of(draft_folder)
    device = import_module("outrider.device").choose_device(arguments.device)
    dtype = arguments.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    target = import_module("outrider.models.loader").load_model(target_folder, getattr(torch, dtype), device)
    try:
        drafter = stage.load_drafter(algorithm, draft_folder, target_folder, target)
    except ConfigError as error:  # its message names a draft service's options
        words = error.message.replace("--speculative-algorithm", "--algorithm")
        words = words.replace("--speculative-draft-model-path", "--draft")
        raise ConfigError(words if words.startswith("--") else f"--draft {arguments.draft}: {words}") from error
    tree = TreeShape(arguments.nodes, arguments.depth, arguments.branching)
    chat = prompts.ChatForm(target_folder)
    # Each way to ask the questions, with its name in the report; the plain chat template comes first.
    forms = [("", chat)]
    for text in arguments.system:
        forms.append(
            (f"system {shorten(text, SYSTEM_SHOWN)!r}" if text else "no system message", chat.with_system(text))
        )
    if arguments.raw:
        forms.append(("raw", chat.raw()))
    with import_module("outrider_tools.training.figures").Report() as report:
        evaluations = [
            evaluation
            for beginning, form in forms
            for evaluation in stage.measure(
                target,
                form,
                drafter,
                questions,
                report,
                temperatures=arguments.temperature,
                max_new_tokens=arguments.max_new_tokens,
                tree=tree,
                num_rows=arguments.num_rows,
                seed=arguments.seed,
                beginning=beginning,
            )
        ]
    report.evaluations(evaluations)
    if arguments.json is not None:
        record = _record(arguments, algorithm, dtype, device, torch)
        record["evaluation"] = [asdict(evaluation) for evaluation in evaluations]
        with writing("--json", arguments.json):
            arguments.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 0


def _record(arguments: argparse.Namespace, algorithm: str, dtype: str, device: Any, torch: Any) -> dict[str, Any]:
    """Return what was asked for. Of paths it has only the names."""
    return {
        "target": Path(arguments.model).name,
        "draft": Path(arguments.draft).name,
        "algorithm": algorithm,
        "prompts": arguments.prompts.name,
        "system": arguments.system,
        "limit": arguments.limit,
        "max_new_tokens": arguments.max_new_tokens,
        "tree": {"nodes": arguments.nodes, "depth": arguments.depth, "branching": arguments.branching},
        "seed": arguments.seed,
        "dtype": dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }
