"""`outrider models`: fetch models, and list those on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.cli.terminal import aligned
from outrider.errors import ConfigError
from outrider.models.store import (
    DEFAULT_DISK_MB,
    DEFAULT_MODEL,
    DEFAULT_WHEEL,
    default_cache_dir,
    hub_cache_dir,
    resolve_model,
)
from outrider.models.store_folder import CONFIG_FILE, check_model_folder


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
    rows = [("model", "MB on disk", "folder")]
    rows += [(name, f"{num_bytes / 1e6:.0f}", str(folder)) for name, folder, num_bytes in found]
    if found:
        print(aligned(rows, right=(1,)))
    if DEFAULT_MODEL not in {name for name, _, _ in found}:
        sizes = f"{DEFAULT_WHEEL.num_bytes / 1e6:.0f} MB to download, {DEFAULT_DISK_MB} MB on disk"
        print(f"{DEFAULT_MODEL} (the default) is not here yet; {sizes}: outrider models pull")
    return 0


def installed_models() -> list[tuple[str, Path, int]]:
    """Return name, folder and size in bytes of each model on this machine.

    These are the converted default, other folders beside it, and language models in the hub's cache. A name is as
    `--model` takes it: the default's name, a hub id (with @revision if that is not main), or the folder.
    """
    own = default_cache_dir() / "models"  # first, since it raises for a missing home
    found = _of_hub()
    for config in own.glob(f"*/{CONFIG_FILE}"):
        folder = config.parent
        name = folder.name if folder.name == DEFAULT_MODEL else str(folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        found.append((name, folder, size))
    return sorted(found)


def _of_hub() -> list[tuple[str, Path, int]]:
    # Imported here: the import takes a second.
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache = scan_cache_dir(hub_cache_dir())
    except CacheNotFound:
        return []
    except (OSError, ValueError) as error:  # the hub's cache is a file, or not readable
        raise ConfigError(f"HF_HUB_CACHE: the hub's cache cannot be read: {error}") from None
    found = []
    for repo in cache.repos:
        for revision in repo.revisions if repo.repo_type == "model" else ():
            try:
                check_model_folder(revision.snapshot_path)
            except ConfigError:
                continue  # a head, or a part of a model
            name = "" if "main" in revision.refs else f"@{min(revision.refs, default=revision.commit_hash)}"
            found.append((repo.repo_id + name, revision.snapshot_path, revision.size_on_disk))
    return found
