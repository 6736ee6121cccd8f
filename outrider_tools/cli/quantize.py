"""`outrider quantize`: write a checkpoint with weights of eight or four bits, for tests and benchmarks."""

from __future__ import annotations

import argparse
from importlib import import_module

from outrider.cli.options import number
from outrider.config.base import expand
from outrider.errors import ConfigError, under
from outrider.models.progress import ConsoleProgress
from outrider.models.store import DEFAULT_MODEL, resolve_model

GROUPED = ("int4", "awq", "gptq")
FORMATS = ("fp8", "fp8-tensor", "fp8-block", "int8", "int4", "awq", "gptq", "mxfp4")


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"The source: a name or folder. Default: {DEFAULT_MODEL}."
    )
    parser.add_argument("--format", choices=FORMATS, required=True, help="Format of the stored weights.")
    parser.add_argument(
        "--group-size",
        type=int,
        choices=(16, 32, 64, 128),
        help=f"Weights that share a scale, for {', '.join(GROUPED)}. Default: 128.",
    )
    parser.add_argument("--out", type=expand, required=True, help="Folder to make; it must not exist.")
    parser.add_argument(
        "--calibration",
        default="own",
        metavar="TEXT",
        help="Text file for calibration, so that rounding errors cancel out in the products that the model computes on "
        "it; own: text that the model writes itself; none: round to nearest, in a tenth of the time. Default: "
        "own.",
    )
    parser.add_argument(
        "--shard-gb", type=number(0.001, 1000), default=2.0, help="Largest size of a weight file, in GB. Default: 2."
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="Device to compute on. Default: auto."
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.group_size is not None and arguments.format not in GROUPED:
        raise ConfigError(f"--group-size: applies to {', '.join(GROUPED)}, not {arguments.format}; leave it out")
    with under("--model"):
        source = resolve_model(arguments.model, needs_tokenizer=False)
    # Imported by name: the command line must import without torch.
    module = import_module("outrider_tools.quantize")
    device = import_module("outrider.device").choose_device(arguments.device)
    with ConsoleProgress() as progress:
        num_bytes = module.quantize(
            source,
            arguments.out,
            arguments.format,
            arguments.group_size or 128,
            device,
            int(arguments.shard_gb * 1e9),
            progress,
            arguments.calibration,
        )
    print(f"{arguments.out}: {num_bytes / 1e9:.2f} GB of weights")
    return 0
