"""`outrider convert`: convert pickled models, heads and token maps to safetensors and JSON, once."""

from __future__ import annotations

import argparse
from importlib import import_module

from outrider.config.base import expand


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "source",
        type=expand,
        help="A folder with config.json and .bin weights (a model or draft head), or a .pt or .bin file of token ids.",
    )
    parser.add_argument("out", type=expand, help="Folder to make, or .json file for token ids; it must not exist.")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    # Imported by name: the command line must import without torch.
    print(import_module("outrider_tools.convert").convert(arguments.source, arguments.out))
    return 0
