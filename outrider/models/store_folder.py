"""Model folders on disk: whether they are usable, their weight files, and the manifest of those converted here.

Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from outrider.errors import ConfigError, panics_as_errors
from outrider.models.fields import LFS_POINTER, read_json, refuse_pointer

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MANIFEST_FILE = "outrider.json"

ADAPTER_FILE = "adapter_config.json"

_WITH_TRANSFORMERS = "with transformers, AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


Manifest = Mapping[str, str | int]
"""Where a converted folder came from. A folder is converted again unless its manifest is the one we would write."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of the finished `folder`, with its files and their sizes, and flush all of it to the disk."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        flush(path)
    content = {**manifest, "files": {path.name: path.stat().st_size for path in files}}
    (folder / MANIFEST_FILE).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    flush(folder / MANIFEST_FILE)


def flush(path: Path) -> None:
    """Force a file's content to the disk, so that a later rename cannot survive a power cut without it."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def matches_manifest(folder: Path, manifest: Manifest) -> bool:
    """Whether `folder` was converted by exactly `manifest` and every file still has its size."""
    try:
        content = json.loads((folder / MANIFEST_FILE).read_text("utf-8"))
        sizes: dict[str, int] = content.pop("files")
        return content == manifest and all((folder / name).stat().st_size == sizes[name] for name in sizes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def check_model_folder(folder: Path, needs_tokenizer: bool = True) -> None:
    """Raise ConfigError, naming what is missing or refused, unless `folder` holds a model that can be loaded.

    It needs config.json, tokenizer.json and weights as model.safetensors or as shards with their index.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; a local model is a folder in the Hugging Face layout")
    # Trainers put the base model's config.json beside an adapter.
    if (folder / ADAPTER_FILE).is_file() and not any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
        raise ConfigError(f"{folder} holds an adapter ({ADAPTER_FILE}); merge it into its model, and give that folder")
    read_json(folder / CONFIG_FILE)
    for shard in shard_paths(folder):
        _check_readable(shard)
    if not needs_tokenizer:
        return
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ConfigError(f"{folder} has no {TOKENIZER_FILE}; save the tokenizer once {_WITH_TRANSFORMERS}")
    if not path.stat().st_size:
        raise ConfigError(f"{path} is empty; save the tokenizer again {_WITH_TRANSFORMERS}")
    _check_readable(path)


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer in a model's folder. Raises ConfigError if it cannot be read."""
    path = folder / TOKENIZER_FILE
    try:
        with panics_as_errors():
            return Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"the tokenizer cannot be read: {path}: {error.strerror}") from None
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{path} is not a tokenizer: {error}; save it again {_WITH_TRANSFORMERS}") from None


@cache
def count_tokens(folder: Path) -> int:
    """Return the vocabulary size of the tokenizer in a model's folder. Raises ConfigError if it cannot be read."""
    return int(read_tokenizer(folder).get_vocab_size())


def _check_readable(path: Path) -> None:
    """Raise ConfigError for a file that this user may not read, which safetensors would report as missing, and for the
    pointer that git without LFS leaves in a file's place."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(LFS_POINTER))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    refuse_pointer(path, begin)


def shard_paths(folder: Path) -> list[Path]:
    """Return the weight files of `folder`, in name order.

    Raises ConfigError if there are no safetensors, or the index names a file that is missing or outside the folder.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if files := indexed_files(folder):
        return _indexed_paths(folder, files)
    for name in sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else ():
        if name.endswith(PICKLE_SUFFIXES):
            raise ConfigError(
                f"{folder} has its weights as {name}, a pickle file, which can run code when it is opened and is "
                f"therefore not read; only safetensors are: convert it once: outrider convert {folder} OUT"
            )
        if name.endswith(".gguf"):
            raise ConfigError(f"{folder} has its weights as {name}; GGUF files are not read, {WEIGHTS_FILE} is needed")
        if name.endswith(".safetensors"):
            raise ConfigError(
                f"{folder} has {name}, but no {INDEX_FILE}, which names its shards; put it there, too, or "
                f"name a file that has all weights {WEIGHTS_FILE}"
            )
    raise ConfigError(
        f"{folder} has no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE}; put them there, or fetch all of it: "
        "outrider models pull OWNER/NAME; if its authors publish only .bin files, convert them once, from a folder of "
        "your own: outrider convert FOLDER OUT"
    )


def indexed_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor from the index; empty if there is no index to follow. Raises ConfigError."""
    # Like transformers: a single file beside an index is what was saved last.
    if (folder / WEIGHTS_FILE).is_file() or not (folder / INDEX_FILE).is_file():
        return {}
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{folder / INDEX_FILE} has no weight_map")
    return weight_map


def _indexed_paths(folder: Path, files: Mapping[str, str]) -> list[Path]:
    names = sorted({str(name) for name in files.values()})
    for name in names:
        # A plain file name: an index must not reach outside its folder.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(f"{folder / INDEX_FILE} names {name!r}, which is no safetensors file of the same folder")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} of its {len(names)} shards, for example {missing[0]}")
    return [folder / name for name in names]


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes from the header of a safetensors file; no weights are read.

    Raises ConfigError if the file cannot be read or is damaged.
    """
    # Imported here: the gateway, which only hashes tokenizers, does not need it.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as shard:
            return {name: tuple(shard.get_slice(name).get_shape()) for name in shard.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path}: cannot be read as safetensors: {error}; it is damaged or incomplete: fetch it again"
        ) from None


def hash_tokenizer(folder: Path) -> str:
    """Return the SHA-256 of the folder's tokenizer.json, hexadecimal; empty for a folder without one."""
    path = folder / TOKENIZER_FILE
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def hash_token_ids(folder: Path) -> str:
    """Return the SHA-256 of what defines token ids in tokenizer.json: target and draft exchange nothing else.

    A file that was saved again may differ in its template, truncation, form of merges, and options that are off.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return ""
    stat = path.stat()
    return _hash_of(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=8)
def _hash_of(path: Path, _as_it_is: tuple[int, ...]) -> str:
    data = path.read_bytes()
    try:
        content = json.loads(data)
        model, added = content["model"], content.get("added_tokens") or []
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges") or []]
        # Options that are off or empty may be left out.
        set_up = {name: value for name, value in model.items() if value and name not in ("vocab", "merges")}
        tokens = sorted(
            (token["id"], sorted((name, value) for name, value in token.items() if value)) for token in added
        )
        steps = [content.get("normalizer"), content.get("pre_tokenizer")]
        data = json.dumps([model["vocab"], merges, set_up, tokens, steps], sort_keys=True).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # An unknown form is compared by its bytes.
    return hashlib.sha256(data).hexdigest()
