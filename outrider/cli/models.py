"""`outrider models`: fetch models, and see which are here."""

from __future__ import annotations

import argparse

from outrider.cli.terminal import aligned
from outrider.models.installed import installed_models
from outrider.models.store import DEFAULT_MODEL, resolve_model


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    commands = parser.add_subparsers(dest="models_command", required=True, metavar="pull | list")
    pull = commands.add_parser("pull", help="Fetch a model and print its folder.")
    pull.add_argument(
        "name",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"{DEFAULT_MODEL} (the default), a local folder, or a Hugging Face id as owner/name.",
    )
    commands.add_parser("list", help="List the models on this machine, as --model takes them.")


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command."""
    if arguments.models_command == "pull":
        print(resolve_model(arguments.name))
        return 0
    found = installed_models()
    rows = [("model", "MB", "folder")]
    rows += [(model.name, f"{model.num_bytes / 1e6:.0f}", str(model.folder)) for model in found]
    if found:
        print(aligned(rows, right=(1,)))
    if DEFAULT_MODEL not in {model.name for model in found}:
        print(f"{DEFAULT_MODEL} (the default) is not here yet: outrider models pull")
    return 0
