"""Models that are on this machine, under the names by which `--model` finds them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError
from outrider.models.store import DEFAULT_MODEL, default_cache_dir, hub_cache_dir
from outrider.models.store_folder import CONFIG_FILE, check_model_folder


@dataclass(frozen=True)
class InstalledModel:
    """A model that needs no download."""

    name: str
    """What `--model` takes: the default's name, a hub id, with @revision where that is not main, or else the folder."""
    folder: Path
    num_bytes: int


def installed_models() -> list[InstalledModel]:
    """The converted default, other folders beside it, and language models of the hub's cache, by their names."""
    return sorted([*_converted(), *_of_hub()], key=lambda model: model.name)


def _converted() -> list[InstalledModel]:
    home = default_cache_dir() / "models"
    folders = [folder for folder in home.glob("*") if (folder / CONFIG_FILE).is_file()]
    return [
        InstalledModel(folder.name if folder.name == DEFAULT_MODEL else str(folder), folder, _size_of(folder))
        for folder in folders
    ]


def _of_hub() -> list[InstalledModel]:
    # Imported here: it takes a second.
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache = scan_cache_dir(hub_cache_dir())
    except CacheNotFound:
        return []
    found = []
    for repo in cache.repos:
        for revision in repo.revisions if repo.repo_type == "model" else ():
            if not _is_usable(revision.snapshot_path):
                continue
            name = "" if "main" in revision.refs else f"@{min(revision.refs, default=revision.commit_hash)}"
            found.append(InstalledModel(repo.repo_id + name, revision.snapshot_path, revision.size_on_disk))
    return found


def _is_usable(folder: Path) -> bool:
    try:
        check_model_folder(folder)
    except ConfigError:
        return False
    return True


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
