"""Which of the target's tokens a draft model may guess: d2t of reduced vocabularies, and token maps (FR-Spec)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.store_folder import tensor_shapes
from outrider.models.weights import StoredTensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
MAX_FILE_BYTES = 64 << 20
OPTION = "--speculative-token-map"


def read_token_map(path: Path, vocab_size: int) -> Tensor:
    """int64 target ids, rising and each once, from a JSON list or a safetensors file of one tensor.

    Raises ConfigError: names the file and what is wrong with it.
    """
    if not path.is_file():
        raise ConfigError(f"{OPTION} {path}: no such file")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"{OPTION} {path}: is larger than {MAX_FILE_BYTES >> 20} MiB; that is no list of token ids")
    if path.suffix == ".json":
        ids = _from_json(path)
    elif path.suffix == ".safetensors":
        ids = _from_safetensors(path)
    else:
        raise ConfigError(
            f"{OPTION} {path}: must be .json or .safetensors; for a .pt file: outrider convert {path} OUT.json"
        )
    rising: Tensor = torch.unique(ids)
    if not rising.numel():
        raise ConfigError(f"{OPTION} {path}: holds no token ids")
    first, last = int(rising[0]), int(rising[-1])
    if first < 0 or last >= vocab_size:
        outside = first if first < 0 else last
        raise ConfigError(f"{OPTION} {path}: token id {outside} is outside the vocabulary of {vocab_size}")
    return rising


def _from_json(path: Path) -> Tensor:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{OPTION} {path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, list) or not all(type(value) is int and abs(value) < 1 << 31 for value in values):
        raise ConfigError(f"{OPTION} {path}: must be a list of token ids")
    return torch.tensor(values, dtype=torch.int64)


def _from_safetensors(path: Path) -> Tensor:
    shapes = tensor_shapes(path)
    if len(shapes) != 1:
        raise ConfigError(f"{OPTION} {path}: must hold one tensor, and holds {len(shapes)}")
    name, shape = shapes.popitem()
    tensor = StoredTensor(path, name, shape).read()
    if tensor.dim() != 1 or tensor.dtype not in INTEGERS:
        raise ConfigError(
            f"{OPTION} {path}: tensor {name} must be a list of integers, and is {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor.long()


def ids_of_offsets(offsets: Tensor, draft_vocab_size: int, vocab_size: int, where: str) -> Tensor:
    """int64 target ids [draft_vocab_size] from a head's `d2t`, which holds target id minus draft id.

    Raises ConfigError: a wrong shape or dtype, or ids outside the vocabulary or twice; says `where`.
    """
    if tuple(offsets.shape) != (draft_vocab_size,) or offsets.dtype not in INTEGERS:
        raise ConfigError(
            f"{where}: tensor d2t is {offsets.dtype} {list(offsets.shape)}, config.json calls for integers "
            f"[{draft_vocab_size}]"
        )
    ids = torch.arange(draft_vocab_size) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ConfigError(f"{where}: tensor d2t leads outside the vocabulary of {vocab_size}")
    if ids.unique().numel() != draft_vocab_size:
        raise ConfigError(f"{where}: tensor d2t leads to one token from two draft ids")
    return ids


def cut_output(ids: Tensor | None, vocab_size: int, allowed: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Which rows of an output matrix to keep, and the target ids of those: int64 both, None for all and for the same.

    `ids` are the target ids of its rows as they are, `allowed` a token map.

    Raises ConfigError: nothing is left.
    """
    if ids is not None and ids.numel() == vocab_size and torch.equal(ids, torch.arange(vocab_size)):
        ids = None
    if allowed is None:
        return None, ids
    if ids is None:
        return allowed, allowed
    rows = torch.isin(ids, allowed).nonzero().flatten()
    if not rows.numel():
        raise ConfigError(f"{OPTION}: none of its tokens is in the draft's own vocabulary")
    return rows, ids[rows]
