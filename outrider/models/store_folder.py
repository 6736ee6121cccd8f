"""Model folders on disk: what a usable one holds, and the manifest of those converted here. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MANIFEST_FILE = "outrider.json"

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Manifest:
    """Where a converted folder came from. A folder with another one than the code would write is converted anew."""

    source: str
    sha256: str
    converter_version: int


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Describe the finished `folder`, files and sizes included, and have all of it on the disk before returning."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        flush(path)
    content = {**asdict(manifest), "files": {path.name: path.stat().st_size for path in files}}
    (folder / MANIFEST_FILE).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    flush(folder / MANIFEST_FILE)


def flush(path: Path) -> None:
    """Force a file's content to the disk, so that a rename after it cannot outlive it in a power cut."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def matches_manifest(folder: Path, manifest: Manifest) -> bool:
    """Whether `folder` was converted by exactly `manifest` and every file still has its size."""
    try:
        content = json.loads((folder / MANIFEST_FILE).read_text("utf-8"))
        sizes: dict[str, int] = content.pop("files")
        return content == asdict(manifest) and all((folder / name).stat().st_size == sizes[name] for name in sizes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def check_model_folder(folder: Path, needs_tokenizer: bool = True) -> None:
    """Raise ConfigError, naming what is missing or refused, unless `folder` holds a model that can be loaded.

    It needs config.json, tokenizer.json and weights as model.safetensors or as shards with their index.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; a local model is a folder in the Hugging Face layout")
    read_json(folder, CONFIG_FILE)
    check_weights(folder)
    if needs_tokenizer:
        _check_tokenizer(folder)


def _check_tokenizer(folder: Path) -> None:
    path = folder / TOKENIZER_FILE
    with_transformers = "with transformers, AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    if not path.is_file():
        raise ConfigError(f"{folder} has no {TOKENIZER_FILE}; save the tokenizer once {with_transformers}")
    if not path.stat().st_size:
        raise ConfigError(f"{path} is empty; save the tokenizer again {with_transformers}")
    read_json(folder, TOKENIZER_FILE)


def check_weights(folder: Path) -> None:
    """Raise ConfigError unless the weights are there as safetensors, every shard included."""
    if (folder / WEIGHTS_FILE).is_file():
        return
    if (folder / INDEX_FILE).is_file():
        shards = shard_names(folder)
        missing = sorted(name for name in shards if not (folder / name).is_file())
        if missing:
            raise ConfigError(f"{folder} misses {len(missing)} of its {len(shards)} shards, {missing[0]} for one")
        return
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        if name.endswith(PICKLE_SUFFIXES):
            raise ConfigError(
                f"{folder} has its weights as {name}, a pickle file, which can run code when it is opened and is "
                f"therefore not read; convert it to safetensors once: outrider convert {folder} OUT"
            )
        if name.endswith(".gguf"):
            raise ConfigError(f"{folder} has its weights as {name}; GGUF files are not read, {WEIGHTS_FILE} is needed")
    raise ConfigError(
        f"{folder} has no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE}; a head that its authors publish as a .bin "
        "file is converted once, from a folder of your own: outrider convert FOLDER OUT"
    )


def shard_names(folder: Path) -> set[str]:
    """The shards that the index names. Raises ConfigError when it names files elsewhere."""
    weight_map = read_json(folder, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{folder / INDEX_FILE} has no weight_map")
    names = {str(name) for name in weight_map.values()}
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(f"{folder / INDEX_FILE} names {name!r}, which is no safetensors file of the same folder")
    return names


def hash_tokenizer(folder: Path) -> str:
    """SHA-256 of the folder's tokenizer.json, hexadecimal; empty for a folder without one."""
    path = folder / TOKENIZER_FILE
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of `folder`. Raises ConfigError when it is missing or is no such thing."""
    try:
        value = json.loads((folder / name).read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} has no {name}; a model folder needs it") from error
    except ValueError as error:
        raise ConfigError(f"{folder / name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{folder / name} does not hold a JSON object")
    return value
