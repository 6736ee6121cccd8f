"""`outrider models`: fetch models, and see which are here."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from outrider.cli.terminal import make_console
from outrider.models.store import DEFAULT_MODEL, default_cache_dir, resolve_model


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
    commands.add_parser("list", help="List the models in Outrider's cache.")


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command."""
    if arguments.models_command == "pull":
        print(resolve_model(arguments.name))
        return 0
    folder = default_cache_dir() / "models"
    found = sorted(path for path in folder.glob("*") if (path / "config.json").is_file())
    table = Table("model", "MB", "folder", box=None)
    table.columns[1].justify = "right"
    for path in found:
        table.add_row(path.name, f"{size_of(path) / 1e6:.0f}", str(path))
    console = make_console(color=not arguments.no_color)
    if found:
        console.print(table)
    if folder / DEFAULT_MODEL not in found:
        console.print(f"{DEFAULT_MODEL} (the default) is not here yet: outrider models pull")
    return 0


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
