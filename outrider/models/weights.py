"""The safetensors files of a model folder, read and written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.shards import INDEX_FILE, shard_paths

DTYPE_WORDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

# Of each copy from the device: enough for full speed, small enough to be nothing beside a tensor.
CHUNK_BYTES = 32 << 20


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


@dataclass(frozen=True, slots=True)
class Shard:
    """A file to be written, and names and shapes of the tensors in it, in order."""

    name: str
    tensors: dict[str, tuple[int, ...]]


def split_shards(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_bytes: int) -> list[Shard]:
    """Tensors in the order of `shapes`, a new file wherever the next one would make it larger than `max_bytes`."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and size + num_bytes > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = shape
        size += num_bytes
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    return [Shard(name, group) for name, group in zip(names, groups, strict=True)]


def write_shards(
    folder: Path,
    shards: list[Shard],
    dtype: torch.dtype,
    make: Callable[[str], Tensor],
    progress: Callable[[int], None],
) -> None:
    """Write the shards and their index. `make(name)` gives each tensor, on any device, when its turn comes.

    `progress` is called with the bytes written so far. Raises OSError where the disk does.
    """
    done = 0
    weight_map: dict[str, str] = {}
    for shard in shards:
        with (folder / shard.name).open("wb", buffering=0) as stream:
            stream.write(_header(shard, dtype))
            for name, shape in shard.tensors.items():
                tensor = make(name)
                if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                    raise ValueError(f"{name}: expected {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
                for chunk in _bytes_of(tensor).split(CHUNK_BYTES):
                    _write_all(stream.write, memoryview(chunk.cpu().numpy()))
                    done += chunk.numel()
                    progress(done)
                weight_map[name] = shard.name
    index = {"metadata": {"total_size": done}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _header(shard: Shard, dtype: torch.dtype) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shard.tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_WORDS[dtype], "shape": shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The format wants its data aligned to 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _write_all(write: Callable[[memoryview], int | None], data: memoryview) -> None:
    """Write all of `data`: an unbuffered file may take less at once."""
    while data:
        data = data[write(data) or 0 :]
