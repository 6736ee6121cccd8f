"""Makes a checkpoint with quantized weights of one in 16 or 32 bits, by rounding to the nearest.

For tests and benchmarks: no data is used to calibrate. What is written has the names of compressed-tensors, or of the
hub's block-fp8, AWQ and GPTQ checkpoints. Embedding, output matrix, norms, and what is no projection stay as they are.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.errors import ConfigError
from outrider.models.fields import read_json
from outrider.models.store_folder import CONFIG_FILE, INDEX_FILE
from outrider.models.weights import StoredTensor, save_tensors, stored_tensors
from outrider_tools.files import whole_output

BLOCK = 128
E4M3_MAX, E2M1_MAX = 448.0, 6.0
_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Of a group's largest weight: what int4 reaches to, the best by squared error."""
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """`encode(matrix float32 [out, in], group)` gives tensors by the ends of their names; `config(group)` what
    config.json says of them."""

    encode: Callable[[Tensor, int], Tensors]
    config: Callable[[int], dict[str, Any]]


def quantize(
    source: Path,
    out: Path,
    name: str,
    group: int,
    device: torch.device,
    max_shard_bytes: int,
    progress: Callable[[str, int, int], None],
) -> int:
    """Write `source` in format `name` to the folder `out`, which must not exist; returns the bytes of its weights.

    Raises:
        ConfigError: the source is quantized already, a shape does not fit the format, or `out` cannot be written.
    """
    fields = read_json(source / CONFIG_FILE)
    if fields.get("quantization_config"):
        raise ConfigError(f"{source}: is quantized already; give the checkpoint that it was made of")
    stored = stored_tensors(source)
    for matrix in filter(is_quantized, stored):
        _check_shape(stored[matrix], name, group)
    fields["quantization_config"] = FORMATS[name].config(group)
    total = 2 * sum(math.prod(tensor.shape) for tensor in stored.values())
    with whole_output(out, f"--out {out}", total) as work:
        work.mkdir()
        (work / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        for path in source.iterdir():
            if path.suffix in (".json", ".jinja", ".txt", ".model") and path.name not in (CONFIG_FILE, INDEX_FILE):
                shutil.copyfile(path, work / path.name)
        done = 0
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(_shards(stored, name, group, device, max_shard_bytes), 1):
            file = f"model-{number:05d}.safetensors"
            save_tensors(shard, work / file)
            weight_map |= dict.fromkeys(shard, file)
            done += sum(tensor.nbytes for tensor in shard.values())
            progress(f"writing {out.name}", min(done, total), total)
        index = {"metadata": {"total_size": done}, "weight_map": weight_map}
        (work / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return done


def is_quantized(name: str) -> bool:
    """Whether the tensor is the matrix of a layer's projection."""
    return re.fullmatch(r"model\.layers\.\d+\..*(_proj|\.w[123])\.weight", name) is not None


def _shards(
    stored: Mapping[str, StoredTensor], name: str, group: int, device: torch.device, max_bytes: int
) -> Iterator[Tensors]:
    shard: Tensors = {}
    for key, tensor in stored.items():
        made = {key: tensor.read()}
        if is_quantized(key):
            # Widened there: on the way it would take twice as long.
            matrix = made[key].to(device).float()
            encoded = FORMATS[name].encode(matrix, group)
            made = {f"{key.removesuffix('weight')}{end}": value.cpu().contiguous() for end, value in encoded.items()}
        size = sum(value.nbytes for value in (*shard.values(), *made.values()))
        if shard and size > max_bytes:
            yield shard
            shard = {}
        shard |= made
    yield shard


def _check_shape(tensor: StoredTensor, name: str, group: int) -> None:
    num_out, size = tensor.shape
    group = 32 if name == "mxfp4" else group
    if name in ("int4", "awq", "gptq", "mxfp4") and (size % group or size % 32 or num_out % 8):
        raise ConfigError(
            f"{tensor.name}: {num_out} x {size} does not fit {name} in groups of {group}; --group-size must divide "
            f"{size}, for instance {math.gcd(size, 128)}"
        )


def _fp8(matrix: Tensor, group: int) -> Tensors:
    scale = _positive(matrix.abs().amax(1, keepdim=True) / E4M3_MAX)
    return {"weight": _e4m3(matrix / scale), "weight_scale": scale}


def _fp8_tensor(matrix: Tensor, group: int) -> Tensors:
    scale = _positive(matrix.abs().amax() / E4M3_MAX)
    return {"weight": _e4m3(matrix / scale), "weight_scale": scale.reshape(1)}


def _fp8_block(matrix: Tensor, group: int) -> Tensors:
    num_out, size = matrix.shape
    whole = functional.pad(matrix, (0, -size % BLOCK, 0, -num_out % BLOCK))
    blocks = whole.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = _positive(blocks.abs().amax((1, 3)) / E4M3_MAX)
    codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:num_out, :size]
    return {"weight": _e4m3(codes), "weight_scale_inv": scale}


def _int4_codes(matrix: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes from -8 to 7, int32 [out, in], and bfloat16 scales [out, groups]."""
    grouped = matrix.unflatten(1, (-1, group))
    largest = grouped.abs().amax(2, keepdim=True) / 7.5
    best_error, best_scale = torch.full_like(largest, math.inf), largest
    for clip in _CLIPS:
        scale = _positive((largest * clip).bfloat16().float())
        error = ((grouped / scale).round().clamp(-8, 7) * scale - grouped).square().sum(2, keepdim=True)
        best_scale = torch.where(error < best_error, scale, best_scale)
        best_error = torch.minimum(error, best_error)
    codes = (grouped / best_scale).round().clamp(-8, 7).int().flatten(1)
    return codes, best_scale.squeeze(2).bfloat16()


def _int4(matrix: Tensor, group: int) -> Tensors:
    codes, scales = _int4_codes(matrix, group)
    shape = torch.tensor(matrix.shape, dtype=torch.int64)
    return {"weight_packed": _words(codes + 8), "weight_scale": scales, "weight_shape": shape}


def _awq(matrix: Tensor, group: int) -> Tensors:
    codes, scales = _int4_codes(matrix, group)
    zeros = torch.full(scales.T.shape, 8, dtype=torch.int32, device=matrix.device)
    return {
        "qweight": _words((codes + 8).T, _AWQ_ORDER),
        "qzeros": _words(zeros, _AWQ_ORDER),
        "scales": scales.T.half(),
    }


def _gptq(matrix: Tensor, group: int) -> Tensors:
    codes, scales = _int4_codes(matrix, group)
    # Zeros are stored less one.
    zeros = torch.full(scales.T.shape, 7, dtype=torch.int32, device=matrix.device)
    order = torch.arange(matrix.shape[1], dtype=torch.int32) // group
    return {"qweight": _words(codes + 8).T, "qzeros": _words(zeros), "scales": scales.T.half(), "g_idx": order}


def _mxfp4(matrix: Tensor, group: int) -> Tensors:
    grouped = matrix.unflatten(1, (-1, 32))
    largest = grouped.abs().amax(2, keepdim=True)
    # The largest power of two that keeps the group's largest weight below 8, of which 6 is the last code.
    exponent = (_positive(largest).log2().floor() - 2).clamp(-127, 127)
    scaled = grouped / exponent.exp2()
    codes = torch.bucketize(scaled.abs(), torch.tensor(_E2M1_MIDDLES, device=matrix.device)).to(torch.uint8)
    codes = (codes | (scaled < 0).to(torch.uint8) << 3).flatten(1)
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    return {"weight_packed": pairs, "weight_scale": (exponent.squeeze(2) + 127).to(torch.uint8)}


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _positive(scale: Tensor) -> Tensor:
    """Of a group of zeros, too."""
    return torch.where(scale > 0, scale, 1.0)


def _words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 codes [..., 8 n] as words [..., n]; nibble i is column order[i] of eight."""
    eights = codes.unflatten(-1, (-1, 8)).long()
    words = sum(eights[..., column] << (4 * nibble) for nibble, column in enumerate(order))
    return torch.as_tensor(words).to(torch.int32)


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*\\.gate$"],
    }


def _fp8_config(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    return _compressed("float-quantized", weights, inputs)


def _int4_config(group: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": True}
    return _compressed("pack-quantized", weights, None)


def _mxfp4_config(group: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    return _compressed("mxfp4-pack-quantized", weights, None)


def _block_config(group: int) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def _awq_config(group: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


def _gptq_config(group: int) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True, "lm_head": False}


FORMATS: dict[str, QuantFormat] = {
    "fp8": QuantFormat(_fp8, lambda group: _fp8_config("channel")),
    "fp8-tensor": QuantFormat(_fp8_tensor, lambda group: _fp8_config("tensor")),
    "fp8-block": QuantFormat(_fp8_block, _block_config),
    "int4": QuantFormat(_int4, _int4_config),
    "awq": QuantFormat(_awq, _awq_config),
    "gptq": QuantFormat(_gptq, _gptq_config),
    "mxfp4": QuantFormat(_mxfp4, _mxfp4_config),
}
