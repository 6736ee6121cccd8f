"""`outrider convert`: turn models, heads and token maps saved by torch into files that run no code when read.

Only this module opens such files. It uses torch's `weights_only` reader, which builds tensors and plain containers
and refuses everything else. It takes only torch's uncompressed zip format, so that no file can take more memory than
its own size.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError, count_of
from outrider.models.fields import read_json
from outrider.models.weights import save_tensors
from outrider_tools.files import copy_files, whole_output

SUFFIXES = (".bin", ".pt", ".pth")
INDEX_FILE = "pytorch_model.bin.index.json"
# Files of a head's folder that are worth keeping, beside its weights.
COPIED = ("*.json", "*.jinja", "tokenizer.model", "*.txt", "LICENSE*", "README.md")
MAX_TOKEN_IDS = 1 << 24
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)


def convert(source: Path, out: Path) -> str:
    """Convert a folder (a head or model) or a file (a token map). Return a line that says what was made.

    `out` must not exist; it appears complete, by one rename.

    Raises ConfigError, which names the faulty file and the reason.
    """
    with whole_output(out, str(out)) as work:
        if source.is_dir():
            line = _convert_folder(source, work)
        elif source.is_file():
            line = _convert_token_map(source, work)
        else:
            raise ConfigError(f"{source}: no such file or folder")
    return f"{out}: {line}"


def _convert_folder(source: Path, work: Path) -> str:
    read_json(source / "config.json")
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(source):
        for name, tensor in _tensors_of(_load(path), path).items():
            if name in tensors:
                raise ConfigError(f"{path}: tensor {name} is in two files")
            tensors[name] = tensor
    work.mkdir()
    copy_files(source, work, COPIED)
    save_tensors(tensors, work / "model.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return f"{count_of(len(tensors), 'tensor')}, {num_bytes / 1e6:.1f} MB"


def _weight_files(source: Path) -> list[Path]:
    if (source / INDEX_FILE).is_file():
        weight_map = read_json(source / INDEX_FILE).get("weight_map")
        names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        # A plain file name: an index must not reach outside its folder.
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ConfigError(f"{source / INDEX_FILE}: weight_map must name files beside it")
        return [source / name for name in sorted(names)]
    found = sorted(path for path in source.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if not found:
        raise ConfigError(f"{source}: has no {', '.join(SUFFIXES)} file; there is nothing to convert")
    if len(found) > 1:
        names = {path.name for path in found}
        if "pytorch_model.bin" in names:
            return [source / "pytorch_model.bin"]
        raise ConfigError(f"{source}: has {len(found)} files of weights and no {INDEX_FILE}; leave one")
    return found


def _load(path: Path) -> Any:
    """Return the content of a file of torch.save: tensors, containers, numbers and strings."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, OSError) as error:
        raise ConfigError(
            f"{path}: is not in the zip format that torch.save has written since version 1.6 ({error})"
        ) from None
    if packed:
        raise ConfigError(f"{path}: has compressed entries, which torch.save does not write")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # noqa: TID251 - no pickles
    except Exception as error:  # The reader raises many kinds for damaged or refused content.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"{path}: holds more than tensors and plain containers, or is damaged: {reason}") from None


def _tensors_of(content: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not content:
        raise ConfigError(f"{path}: must hold named tensors, and holds {type(content).__name__}")
    found = {}
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ConfigError(f"{path}: must hold named tensors, and {name!r} is {type(tensor).__name__}")
        found[name] = _checked(tensor, f"{path}: tensor {name}")
    return found


def _checked(tensor: Tensor, where: str) -> Tensor:
    """Return a copy with its own storage. Tensors of a file may be views of one another, or repeat a few bytes."""
    if tensor.is_sparse or tensor.is_quantized or tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        raise ConfigError(f"{where} is {tensor.dtype}, {tensor.layout}; only plain tensors are converted")
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ConfigError(f"{where} is larger than what the file holds of it")
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _convert_token_map(source: Path, work: Path) -> str:
    if work.suffix != ".json":
        raise ConfigError(f"a token map is converted to JSON; choose a name that ends in .json for {source}")
    content = _load(source)
    if isinstance(content, Tensor):
        tensor = _checked(content, str(source))
        if tensor.dim() != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
            raise ConfigError(f"{source}: must be a list of token ids, and is {tensor.dtype} {list(tensor.shape)}")
        content = tensor.tolist()
    if not isinstance(content, list) or not content or len(content) > MAX_TOKEN_IDS:
        raise ConfigError(f"{source}: must be a list of token ids, and is {type(content).__name__}")
    for value in content:
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise ConfigError(f"{source}: must be a list of token ids, and holds {value!r}")
    work.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return count_of(len(content), "token id")
