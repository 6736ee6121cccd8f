"""Make a checkpoint with quantized weights from one in 16 or 32 bits.

Scales are those of the least squared error. Weights are rounded so that errors make up for each other in the model's
own products (outrider_tools.compensate), or to the nearest number. Names are those of compressed-tensors, or of the
hub's block-fp8, AWQ and GPTQ checkpoints. Embedding, output matrix, norms, and all else that is not a projection stay
as they are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.errors import ConfigError
from outrider.layers.formats import AWQ_ORDER, nibble_words
from outrider.models.config import text_fields
from outrider.models.fields import read_json
from outrider.models.loader import text_name
from outrider.models.store_folder import CONFIG_FILE
from outrider.models.weights import StoredTensor, stored_tensors, write_shards
from outrider_tools.compensate import InputMoments, calibration_moments, compensated
from outrider_tools.files import copy_files, whole_output

BLOCK = 128
FOUR_BITS = ("int4", "awq", "gptq", "mxfp4")
E4M3_MAX = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Candidate ranges of int4, as shares of a group's largest weight; the one with the least squared error is used."""
_STEPS = tuple(2 ** (step / 16) for step in range(16))
"""Factors to try on scales of e4m3: within an octave its numbers fall on other values, beyond it they repeat."""
Tensors = dict[str, Tensor]
Pack = Callable[[Tensor, Tensor, int], Tensors]


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """How a matrix float32 [out, in] becomes tensors: numbers, and a scale for each tile of `rows` x `columns` weights.

    0 `rows` or `columns` stand for all, `columns` None for those of a group. `tried(largest)` returns the scales to try
    for tiles with these largest weights. `nearest` rounds weights over scales to the closest numbers of the format.
    `pack(numbers, scales, group)` returns tensors by the ends of their names, `config(group)` config.json's entry.
    """

    rows: int
    columns: int | None
    tried: Callable[[Tensor], Sequence[Tensor]]
    nearest: Callable[[Tensor], Tensor]
    pack: Pack
    config: Callable[[int], dict[str, Any]]

    def fit(self, matrix: Tensor, group: int) -> Tensor:
        """Return the scales with the least squared error among those tried, the first of equal ones; [down, across]."""
        rows, columns = self._tile(matrix, group)
        whole = functional.pad(matrix, (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows))
        tiles = whole.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))

        def error_of(scale: Tensor) -> Tensor:
            errors: Tensor = self.nearest(tiles / scale).mul_(scale) - tiles
            return errors.square_().sum((1, 3), keepdim=True)

        best, *others = self.tried(tiles.abs().amax((1, 3), keepdim=True))
        least = error_of(best)
        for scale in others:
            error = error_of(scale)
            best = torch.where(error < least, scale, best)
            least = torch.minimum(error, least)
        return best[:, 0, :, 0]

    def spread(self, scales: Tensor, matrix: Tensor, group: int) -> Tensor:
        """Return the scale of each weight, [out, in]."""
        rows, columns = self._tile(matrix, group)
        num_out, size = matrix.shape
        return scales.repeat_interleave(rows, 0)[:num_out].repeat_interleave(columns, 1)[:, :size]

    def _tile(self, matrix: Tensor, group: int) -> tuple[int, int]:
        columns = group if self.columns is None else self.columns
        return self.rows or matrix.shape[0], columns or matrix.shape[1]

    def encode(self, matrix: Tensor, scales: Tensor, group: int) -> Tensors:
        """Return the matrix as tensors by the ends of their names."""
        return self.pack(self.nearest(matrix / self.spread(scales, matrix, group)), scales, group)


def quantize(
    source: Path,
    out: Path,
    name: str,
    group: int,
    device: torch.device,
    max_shard_bytes: int,
    progress: Callable[[str, int, int], None],
    calibration: str = "none",
) -> int:
    """Write `source` in format `name` to the folder `out`, which must not exist. Return the bytes of its weights.

    `calibration` names the text by which errors are compensated: a file's path, or "own" for text that the model writes
    itself; "none" rounds to the nearest number.

    Raises ConfigError if the source is quantized already, its experts share tensors, a shape does not fit the format,
    `out` cannot be written, or the source is no decoder of ours and so cannot be calibrated.
    """
    fields = read_json(source / CONFIG_FILE)
    if text_fields(fields).get("quantization_config"):
        raise ConfigError(f"{source}: is quantized already; give the checkpoint that it was made of")
    stored = stored_tensors(source)
    for key in stored:
        # gpt-oss stores its experts so. They would stay wide, while config.json says that they are quantized.
        if re.fullmatch(r"model\.layers\.\d+\..*_proj", text_name(key) or key):
            raise ConfigError(f"{source}: {key} holds all experts of a layer; only separate ones can be quantized")
    for matrix in filter(is_quantized, stored):
        _check_shape(stored[matrix], name, group)
    fields["quantization_config"] = FORMATS[name].config(group)
    sizes = {key: math.prod(tensor.shape) for key, tensor in stored.items()}
    width = sum(path.stat().st_size for path in {tensor.path for tensor in stored.values()}) / sum(sizes.values())
    packed = 0.5 if name in FOUR_BITS else 1
    total = int(sum(size * (packed if is_quantized(key) else width) for key, size in sizes.items()))
    with whole_output(out, f"--out {out}", total) as work:
        work.mkdir()
        moments = None
        if calibration != "none":
            progress(f"reading {'its own text' if calibration == 'own' else calibration}", 0, total)
            moments = calibration_moments(source, calibration, device)
        copy_files(source, work, ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*"))
        (work / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        stage = f"writing {out.name}"
        made = _quantized(stored, FORMATS[name], group, device, moments)
        return write_shards(work, made, max_shard_bytes, lambda done: progress(stage, min(done, total), total))


def is_quantized(name: str) -> bool:
    """Whether the tensor is the matrix of a layer's projection."""
    return re.fullmatch(r"model\.layers\.\d+\..*(_proj|\.w[123])\.weight", text_name(name) or name) is not None


def layer_of(name: str) -> int:
    """Return the number of the layer that a tensor belongs to; -1 for none."""
    found = re.match(r"model\.layers\.(\d+)\.", text_name(name) or name)
    return int(found[1]) if found else -1


def _quantized(
    stored: Mapping[str, StoredTensor],
    form: QuantFormat,
    group: int,
    device: torch.device,
    moments: InputMoments | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the new checkpoint, by layers."""
    layer, of_layer = -1, dict[str, Tensor]()
    for key in sorted(stored, key=layer_of):
        tensor = stored[key].read()
        if not is_quantized(key):
            yield key, tensor
            continue
        # Widened on the device: the transfer would take twice as long in float32.
        matrix = tensor.to(device).float()
        scales = form.fit(matrix, group)
        if moments is not None and layer_of(key) != layer:
            layer = layer_of(key)
            of_layer = moments.of(layer)
        name = key.split(".")[-2]
        # Experts see few rows each, so they are rounded to the nearest number.
        if name in of_layer and "expert" not in key:
            matrix = compensated(matrix, of_layer[name], form.spread(scales, matrix, group), form.nearest)
        for end, value in form.encode(matrix, scales, group).items():
            yield key.removesuffix("weight") + end, value


def _check_shape(tensor: StoredTensor, name: str, group: int) -> None:
    num_out, size = tensor.shape
    group = 32 if name == "mxfp4" else group
    if name in FOUR_BITS and (size % group or size % 32 or num_out % 8):
        raise ConfigError(
            f"{tensor.name}: {num_out} x {size} does not fit {name} in groups of {group}; --group-size must divide "
            f"{size}, for instance {math.gcd(size, 128)}"
        )


def _scales_e4m3(largest: Tensor) -> list[Tensor]:
    least = _positive(largest / E4M3_MAX)
    return [least * step for step in _STEPS]


def nearest_e4m3(values: Tensor) -> Tensor:
    """Return the closest numbers of float8_e4m3, in float32."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _eight(dtype: torch.dtype, name: str = "weight_scale") -> Pack:
    return lambda numbers, scales, group: {"weight": numbers.to(dtype), name: scales}


def _whole(least: int, most: int) -> Callable[[Tensor], Tensor]:
    return lambda values: values.round().clamp(least, most)


def _scales_int4(largest: Tensor) -> list[Tensor]:
    """Return the scales to try, as numbers that bfloat16 holds."""
    return [_positive((largest / 7.5 * clip).bfloat16().float()) for clip in _CLIPS]


def _int4(numbers: Tensor, scales: Tensor, group: int) -> Tensors:
    shape = torch.tensor(numbers.shape, dtype=torch.int64)
    return {"weight_packed": nibble_words(numbers.int() + 8), "weight_scale": scales.bfloat16(), "weight_shape": shape}


def _awq(numbers: Tensor, scales: Tensor, group: int) -> Tensors:
    zeros = torch.full(scales.T.shape, 8, dtype=torch.int32, device=numbers.device)
    return {
        "qweight": nibble_words((numbers.int() + 8).T, AWQ_ORDER),
        "qzeros": nibble_words(zeros, AWQ_ORDER),
        "scales": scales.T.half(),
    }


def _gptq(numbers: Tensor, scales: Tensor, group: int) -> Tensors:
    # GPTQ stores zero points less one.
    zeros = torch.full(scales.T.shape, 7, dtype=torch.int32, device=numbers.device)
    order = torch.arange(numbers.shape[1], dtype=torch.int32) // group
    return {
        "qweight": nibble_words(numbers.int() + 8).T,
        "qzeros": nibble_words(zeros),
        "scales": scales.T.half(),
        "g_idx": order,
    }


def _scales_mxfp4(largest: Tensor) -> list[Tensor]:
    """Return the least power of two over which the largest weight is below 8 (the last code is 6), and the next one."""
    exponent = (_positive(largest).log2().floor() - 2).clamp(-127, 126)
    return [exponent.exp2(), (exponent + 1).exp2()]


def _e2m1_codes(values: Tensor) -> Tensor:
    return torch.bucketize(values.abs(), torch.tensor(_E2M1_MIDDLES, device=values.device))


def _nearest_e2m1(values: Tensor) -> Tensor:
    numbers = torch.tensor(_E2M1, device=values.device)
    return torch.where(values < 0, -1.0, 1.0) * numbers[_e2m1_codes(values)]


def _mxfp4(numbers: Tensor, scales: Tensor, group: int) -> Tensors:
    codes = _e2m1_codes(numbers).to(torch.uint8) | torch.signbit(numbers).to(torch.uint8) << 3
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    return {"weight_packed": pairs, "weight_scale": (scales.log2() + 127).round().to(torch.uint8)}


def _positive(scale: Tensor) -> Tensor:
    """Return `scale` with 1 in place of 0, for groups that are all zeros."""
    return torch.where(scale > 0, scale, 1.0)


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*\\.gate$"],
    }


def _scales_int8(largest: Tensor) -> list[Tensor]:
    widest = _positive(largest / 127)
    return [widest * clip for clip in _CLIPS]


def _eight_bits(kind: str, strategy: str = "channel") -> dict[str, Any]:
    both = {"num_bits": 8, "type": kind, "symmetric": True}
    weights, inputs = {"strategy": strategy, "dynamic": False}, {"strategy": "token", "dynamic": True}
    return _compressed(f"{kind}-quantized", both | weights, both | inputs)


def _four_bits(kind: str, group: int, form: str) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": kind, "strategy": "group", "group_size": group, "symmetric": True}
    return _compressed(form, weights, None)


def _block_config(group: int) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def _awq_config(group: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


def _gptq_config(group: int) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True, "lm_head": False}


def _of_int4(pack: Pack, config: Callable[[int], dict[str, Any]]) -> QuantFormat:
    return QuantFormat(1, None, _scales_int4, _whole(-8, 7), pack, config)


_fp8 = _eight(torch.float8_e4m3fn)
FORMATS: dict[str, QuantFormat] = {
    "fp8": QuantFormat(1, 0, _scales_e4m3, nearest_e4m3, _fp8, lambda group: _eight_bits("float")),
    "fp8-tensor": QuantFormat(
        0,
        0,
        _scales_e4m3,
        nearest_e4m3,
        lambda numbers, scales, group: _fp8(numbers, scales.reshape(1), group),
        lambda group: _eight_bits("float", "tensor"),
    ),
    "fp8-block": QuantFormat(
        BLOCK, BLOCK, _scales_e4m3, nearest_e4m3, _eight(torch.float8_e4m3fn, "weight_scale_inv"), _block_config
    ),
    "int8": QuantFormat(1, 0, _scales_int8, _whole(-127, 127), _eight(torch.int8), lambda group: _eight_bits("int")),
    "int4": _of_int4(_int4, lambda group: _four_bits("int", group, "pack-quantized")),
    "awq": _of_int4(_awq, _awq_config),
    "gptq": _of_int4(_gptq, _gptq_config),
    "mxfp4": QuantFormat(
        1, 32, _scales_mxfp4, _nearest_e2m1, _mxfp4, lambda group: _four_bits("float", 32, "mxfp4-pack-quantized")
    ),
}
