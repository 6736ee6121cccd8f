"""The safetensors files of a model folder, read and written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.shards import INDEX_FILE, shard_paths


@contextmanager
def open_shard(path: Path) -> Iterator[Any]:
    """The file mapped for reading, as safetensors' own (untyped) handle.

    Raises:
        ConfigError: it cannot be read, or is damaged.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as safetensors: {error}") from None


class TensorReader:
    """Keeps a folder's safetensors files mapped; use it in a `with`.

    Raises:
        ConfigError: the folder has no weights, or a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._shards: dict[str, Any] = {}
        for path in shard_paths(folder):
            shard = self._stack.enter_context(open_shard(path))
            self._shards.update(dict.fromkeys(shard.keys(), shard))

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU, in the checkpoint's dtype. Raises ConfigError when there is none of that name."""
        if name not in self._shards:
            raise ConfigError(f"{self._folder}: tensor {name} missing from the checkpoint")
        found: Tensor = self._shards[name].get_tensor(name)
        return found


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous CPU tensors; file permissions follow the umask. Raises OSError where the disk does."""
    save_file(dict(tensors), path, {"format": "pt"})
    # safetensors writes through a temporary file that nobody else may read; another user may run the services.
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def write_shards(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    max_bytes: int,
    make: Callable[[str], Tensor],
    progress: Callable[[int], None],
) -> None:
    """Write tensors in the order of `shapes`, a new file wherever the next would make it larger than `max_bytes`.

    `make(name)` gives each, on any device; one file's are in memory at a time. `progress` is called with the bytes
    made so far. Raises OSError where the disk does.
    """
    files: list[list[str]] = [[]]
    size = done = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if files[-1] and size + num_bytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += num_bytes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensor = make(name)
            if tensor.dtype != dtype or tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"{name}: expected {dtype} {shapes[name]}, got {tensor.dtype} {tuple(tensor.shape)}")
            tensors[name] = tensor.cpu().contiguous()
            done += tensor.nbytes
            progress(done)
        save_tensors(tensors, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": done}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
