"""Which safetensors files a model folder has, and what their headers say. Torch-free."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from outrider.errors import ConfigError
from outrider.models.config import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def shard_paths(folder: Path) -> list[Path]:
    """The weight files of `folder`, in name order.

    Raises:
        ConfigError: there are none, or the index names a file that is missing or outside the folder.
    """
    if (folder / INDEX_FILE).exists():
        return _indexed_paths(folder)
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    raise ConfigError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors weights are supported")


def _indexed_paths(folder: Path) -> list[Path]:
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{folder / INDEX_FILE}: weight_map is missing")
    names = set(weight_map.values())
    for name in names:
        # A plain file name: an index must not reach outside its folder.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(f"{folder / INDEX_FILE}: {name!r} is not the name of a safetensors file")
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / name}: no such file, but {INDEX_FILE} names it")
    return [folder / name for name in sorted(names)]


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes from the file's header; no weights are read.

    Raises:
        ConfigError: it cannot be read, or is damaged.
    """
    try:
        with safe_open(path, framework="np") as shard:
            return {name: tuple(shard.get_slice(name).get_shape()) for name in shard.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as safetensors: {error}") from None
