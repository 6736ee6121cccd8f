"""`outrider inflate`: make a small model cost as much as a large one, to measure speed with real text."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from outrider.cli.options import number, whole_number
from outrider.config.base import expand
from outrider.errors import ConfigError, OutriderError, under
from outrider.models.progress import ConsoleProgress
from outrider.models.store import DEFAULT_MODEL, resolve_model
from outrider_tools.files import check_new
from outrider_tools.inflate.shapes import SHAPES, parse_shape

DTYPES = ("bfloat16", "float16", "float32")

# Read by the check. Any text will do that is like what the model was trained on.
CHECK_TEXT = "The capital of France is Paris. In 1969, two men walked on the moon for 2 hours and 31 minutes."


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"The source: a name or folder. Default: {DEFAULT_MODEL}."
    )
    parser.add_argument(
        "--shape",
        required=True,
        help=f"{', '.join(SHAPES)}, any of them with changes (llama-1b,layers=30), or all sizes (hidden=640,...).",
    )
    parser.add_argument("--out", type=expand, help="Folder to make; it must not exist.")
    parser.add_argument("--draft", help="A head of any kind for the source: a folder or hub id.")
    parser.add_argument("--random-draft", action="store_true", help="Make an EAGLE-3 head with random weights instead.")
    parser.add_argument(
        "--draft-vocab-size",
        type=whole_number(1, 1 << 24),
        help="Vocabulary of a random head. Default: 32000, or the target's.",
    )
    parser.add_argument("--draft-out", type=expand, help="Folder to make for the head; --out is then optional.")
    parser.add_argument(
        "--seed", type=whole_number(0, (1 << 31) - 1), default=0, help="Seed of the random filling. Default: 0."
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="Number format of the weights. Default: bfloat16."
    )
    parser.add_argument(
        "--shard-gb", type=number(0.001, 1000), default=2.0, help="Largest size of a weight file, in GB. Default: 2."
    )
    parser.add_argument(
        "--vocab-size", type=whole_number(1, 1 << 24), help="Pad the vocabulary with tokens that are never chosen."
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="Device that fills and checks. Default: auto."
    )
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Compare the result's logits with the source's, layer by layer. On by default.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    _check(arguments)
    shape = parse_shape(arguments.shape)
    with under("--model"):
        source = resolve_model(arguments.model)
    # Imported by name: the command line must import without torch.
    folder = import_module("outrider_tools.inflate.folder")
    options = folder.InflateOptions(
        shape,
        dtype=getattr(import_module("torch"), arguments.dtype),
        device=import_module("outrider.device").choose_device(arguments.device),
        seed=arguments.seed,
        max_shard_bytes=int(arguments.shard_gb * 1e9),
        vocab_size=arguments.vocab_size,
    )
    if arguments.draft_out is not None:
        _make_draft(arguments, source, options)
    if arguments.out is None:
        return 0
    with ConsoleProgress() as progress:
        num_bytes = folder.inflate(source, arguments.out, options, progress)
    print(f"{arguments.out}: {num_bytes / 1e9:.2f} GB of weights")
    if not arguments.check:
        return 0
    result = folder.compare(source, arguments.out, folder.tokenize(source, CHECK_TEXT), options.device)
    print(f"logits against {arguments.model}: {result}")
    if not result.passes(options.dtype):
        raise OutriderError(f"{arguments.out} does not compute what {arguments.model} does: {result}")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError, before anything is made, if options contradict each other or an output exists."""
    wants_draft = arguments.draft is not None or arguments.random_draft
    if wants_draft != (arguments.draft_out is not None):
        raise ConfigError(
            "--draft-out: must be set if and only if --draft or --random-draft is; it names the folder of the head"
        )
    if arguments.draft is not None and arguments.random_draft:
        raise ConfigError("--random-draft: makes a head, and --draft names one; choose one of them")
    if arguments.draft_vocab_size is not None and not arguments.random_draft:
        raise ConfigError("--draft-vocab-size: applies only to --random-draft; leave it out")
    if arguments.out is not None and arguments.out == arguments.draft_out:
        raise ConfigError("--draft-out: is the folder of --out; the head needs one of its own")
    if arguments.out is None and not wants_draft:
        raise ConfigError("--out: not set; give the folder to make")
    for flag, path in (("--out", arguments.out), ("--draft-out", arguments.draft_out)):
        if path is not None:
            check_new(path, f"{flag} {path}")


def _make_draft(arguments: argparse.Namespace, source: Path, options: Any) -> None:
    """Make the head for the inflated model."""
    heads = import_module("outrider_tools.inflate.head")
    if arguments.draft is not None:
        with under("--draft"):
            head = resolve_model(arguments.draft, needs_tokenizer=False)
        with ConsoleProgress() as progress:
            num_bytes = heads.inflate_head(head, source, arguments.draft_out, options, progress)
    else:
        num_bytes = heads.random_eagle3_head(arguments.draft_out, source, arguments.draft_vocab_size, options)
    print(f"{arguments.draft_out}: {num_bytes / 1e9:.2f} GB of weights")
