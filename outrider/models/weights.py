"""Reads and writes the safetensors files of a model folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.store_folder import INDEX_FILE, indexed_files, shard_paths, tensor_shapes

Progress = Callable[[int, int], None]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file; `name` is its name there."""

    path: Path
    name: str
    shape: tuple[int, ...]
    opened: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)
    """Open files, shared between the tensors of a checkpoint: opening a file reads its description of all tensors."""

    def read(self, spans: Sequence[Sequence[tuple[int, int]]] = ()) -> Tensor:
        """Return the tensor on the CPU, in its own dtype; only the `spans` of each dimension, joined, if given.

        Raises ConfigError if the file cannot be read.
        """
        try:
            if self.path not in self.opened:
                self.opened[self.path] = safe_open(self.path, framework="pt", device="cpu")
            shard = self.opened[self.path]
            if not spans or not self.shape:
                found: Tensor = shard.get_tensor(self.name)
            else:
                found = _join(shard.get_slice(self.name), spans)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{self.path}: cannot be read as safetensors: {error}") from None
        return found


def _join(stored: Any, spans: Sequence[Sequence[tuple[int, int]]], index: tuple[slice, ...] = ()) -> Tensor:
    if len(index) == len(spans):
        piece: Tensor = stored[index]
        return piece
    pieces = [_join(stored, spans, (*index, slice(*span))) for span in spans[len(index)]]
    return torch.cat(pieces, len(index)) if len(pieces) > 1 else pieces[0]


def stored_tensors(folder: Path, rename: Callable[[str], str | None] = str) -> dict[str, StoredTensor]:
    """Return all tensors that `rename` gives a name. Files that were read stay mapped while any of these tensors lives.

    Raises ConfigError if the folder has no safetensors, or two tensors of one name.
    """
    found: dict[str, StoredTensor] = {}
    opened: dict[Path, Any] = {}
    for path in shard_paths(folder):
        for name, shape in tensor_shapes(path).items():
            ours = rename(name)
            if ours is None:
                continue
            if ours in found:
                # If a tensor is in two shards, the index tells which one counts.
                counts = indexed_files(folder).get(name)
                if counts not in (path.name, found[ours].path.name) or path == found[ours].path:
                    raise ConfigError(f"{path}: tensor {name} is there twice, also as {found[ours].name}")
                if counts != path.name:
                    continue
            found[ours] = StoredTensor(path, name, shape, opened)
    return found


def check_tensors(
    stored: Mapping[str, StoredTensor], expected: Mapping[str, Tensor], folder: Path, config: str = "config.json"
) -> None:
    """Compare names and shapes; `config` is what messages call the file that `expected` follows from.

    Raises ConfigError, naming file, tensor and both shapes.
    """
    for name, tensor in stored.items():
        if name not in expected:
            raise ConfigError(f"{tensor.path}: unexpected tensor {tensor.name}; {config} does not call for it")
        # Some write a scalar with no dimension, others with one.
        if (tensor.shape or (1,)) != tuple(expected[name].shape):
            raise ConfigError(
                f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)}, {config} calls for "
                f"{list(expected[name].shape)}"
            )
    missing = sorted(expected.keys() - stored.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        tied = "; where the embedding is the output, too, tie_word_embeddings is true" if missing == [HEAD] else ""
        raise ConfigError(f"{folder}: tensor {missing[0]}{more} missing from the checkpoint{tied}")


def fill(targets: Mapping[str, Tensor], read: Callable[[str], Tensor], progress: Progress | None) -> None:
    """Copy what `read` returns for each name into `targets`; `progress(done_bytes, total_bytes)` counts their bytes.

    `progress` is called from this thread.
    """
    total = sum(tensor.nbytes for tensor in targets.values())
    done = 0
    for name, target in targets.items():
        target.copy_(read(name))
        done += target.nbytes
        if progress is not None:
            progress(done, total)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous CPU tensors; file permissions follow the umask. Raises OSError."""
    try:
        save_file(dict(tensors), path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    # safetensors writes through a temporary file that nobody else may read; another user may run the services.
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def write_shards(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int, progress: Callable[[int], None]
) -> int:
    """Write named tensors as they come, to a new file whenever the next one would make it larger than `max_bytes`.

    Tensors may be on any device; those of one file are in memory at a time. `progress` is called with the bytes so far.
    Returns the total bytes. Raises OSError.
    """
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def save() -> None:
        shards.append(list(shard))
        save_tensors(shard, folder / f"model-{len(shards):05d}.safetensors")
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_bytes:
            save()
            size = 0
        shard[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
        progress(total)
    save()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"model-{number:05d}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total
