"""Writes a checkpoint as sharded safetensors, tensor by tensor: no more than one tensor is in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.models.weights import INDEX_FILE

DTYPE_WORDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

# Of each copy from the device: enough for full speed, small enough to be nothing beside a tensor.
CHUNK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Shard:
    """A file to be written and the tensors in it, in order."""

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

    `progress` is told the bytes written so far. Raises OSError where the disk does.
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
    """A raw file may take less than it is given."""
    while data:
        data = data[write(data) or 0 :]
