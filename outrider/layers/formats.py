"""Layouts of quantized matrices in checkpoints: the tensors of each, and their conversion for our kernels.

A layout is two functions: one gives its tensors by the ends of their names, one converts these to a QuantWeight. To add
a layout, write both, add its name to FORMATS, and let `outrider.models.quantization` recognize it in config.json. All
tensors may have leading dimensions, for stacked experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kernels.quant_weight import QuantWeight, packed, piece_of
from outrider.device import check_fp8
from outrider.errors import ConfigError
from outrider.models.quantization import Scheme

# The eight nibbles of a word in AWQ are these columns.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def weight_tensors(scheme: Scheme, num_out: int, size: int, device: torch.device, *leading: int) -> dict[str, Tensor]:
    """Return a matrix's empty tensors, by the ends of their names, for a loader to fill; `leading` sizes stack them.

    Raises ConfigError for a shape that the format or kernels do not support, or a GPU without such numbers.
    """
    group = scheme.group or size
    if scheme.bits == 8:
        if scheme.kind == "fp8":
            check_fp8(device, f"config.json: {scheme.name}")
        if size % 2:
            raise ConfigError(
                f"config.json: {scheme.name}: a layer of {size} columns is not supported; 2 must divide it"
            )
    else:
        if size % group:
            raise ConfigError(
                f"config.json: {scheme.name}: a layer of {size} columns is no multiple of its group {group}"
            )
        if size % 32 or num_out % 8:
            raise ConfigError(
                f"config.json: {scheme.name}: a layer of {num_out} x {size} is not supported; 8 rows and 32 columns "
                "must divide it"
            )
    tensors, _ = FORMATS[scheme.layout]
    shapes = tensors(scheme, num_out, size)
    return {
        name: torch.empty((*leading, *shape), dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()
    }


def decode(scheme: Scheme, tensors: Mapping[str, Tensor]) -> QuantWeight:
    """Return the matrix that filled tensors stand for."""
    _, decode = FORMATS[scheme.layout]
    return decode(scheme, tensors)


def _bytes_tensors(scheme: Scheme, num_out: int, size: int) -> Shapes:
    groups = -(-size // scheme.group) if scheme.group else 1
    shape = (-(-num_out // scheme.block), groups) if scheme.block else (1,)
    scale = "weight_scale_inv" if scheme.layout == "fp8-inverse" else "weight_scale"
    dtype = torch.int8 if scheme.kind == "int8" else torch.float8_e4m3fn
    found: Shapes = {"weight": ((num_out, size), dtype), scale: (shape, torch.float32)}
    if scheme.input_scale:
        found["input_scale"] = ((1,), torch.float32)
    return found


def _bytes_decode(scheme: Scheme, tensors: Mapping[str, Tensor]) -> QuantWeight:
    codes = tensors["weight"]
    scales = tensors["weight_scale"] if "weight_scale" in tensors else tensors["weight_scale_inv"]
    if not scheme.block:
        scales = scales.unsqueeze(-1).expand(*codes.shape[:-1], 1)
    group, size = scheme.group or codes.shape[-1], codes.shape[-1]
    piece = piece_of(scheme.kind, size, group)
    codes = packed(codes.view(torch.uint8), scheme.kind, piece)
    return QuantWeight(scheme.kind, codes, scales.transpose(-1, -2).contiguous(), group, piece, max(scheme.block, 1))


_ROWS_AT_ONCE = 4096
"""Rows of a matrix in 16 bits that are rounded at a time."""


def _wide_tensors(scheme: Scheme, num_out: int, size: int) -> Shapes:
    return {"weight": ((num_out, size), torch.bfloat16)}


def _wide_decode(scheme: Scheme, tensors: Mapping[str, Tensor]) -> QuantWeight:
    """Return the weight rounded to e4m3. A row's scale is a power of two, so that fractions keep their bits."""
    matrix, codes, scales = tensors["weight"], [], []
    # In float32 a large output matrix would take gigabytes.
    for part in matrix.split(_ROWS_AT_ONCE):
        rows = part.float()
        _, exponents = torch.frexp(rows.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max)
        scales.append(torch.ldexp(torch.ones_like(rows[:, :1]), exponents))
        codes.append((rows / scales[-1]).to(torch.float8_e4m3fn).view(torch.uint8))
    size = matrix.shape[-1]
    piece = piece_of(scheme.kind, size, size)
    return QuantWeight(
        scheme.kind, packed(torch.cat(codes), scheme.kind, piece), torch.cat(scales).mT.contiguous(), size, piece
    )


def _packed_tensors(scheme: Scheme, num_out: int, size: int) -> Shapes:
    groups = size // (scheme.group or size)
    found: Shapes = {
        "weight_packed": ((num_out, size // 8), torch.int32),
        "weight_scale": ((num_out, groups), torch.float32),
        "weight_shape": ((2,), torch.int64),
    }
    if not scheme.symmetric:
        found["weight_zero_point"] = ((num_out // 8, groups), torch.int32)
    return found


def _packed_decode(scheme: Scheme, tensors: Mapping[str, Tensor]) -> QuantWeight:
    codes = _nibbles(tensors["weight_packed"])
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        zeros = _nibbles(zeros.transpose(-1, -2))
    return _int4(codes, tensors["weight_scale"].transpose(-1, -2), zeros)


def _awq_tensors(scheme: Scheme, num_out: int, size: int) -> Shapes:
    groups = size // (scheme.group or size)
    return {
        "qweight": ((size, num_out // 8), torch.int32),
        "qzeros": ((groups, num_out // 8), torch.int32),
        "scales": ((groups, num_out), torch.float32),
    }


def _awq_decode(scheme: Scheme, tensors: Mapping[str, Tensor]) -> QuantWeight:
    codes = _nibbles(tensors["qweight"], AWQ_ORDER).transpose(-1, -2)
    return _int4(codes, tensors["scales"], _nibbles(tensors["qzeros"], AWQ_ORDER))


def _gptq_tensors(scheme: Scheme, num_out: int, size: int) -> Shapes:
    groups = size // (scheme.group or size)
    return {
        "qweight": ((size // 8, num_out), torch.int32),
        "qzeros": ((groups, num_out // 8), torch.int32),
        "scales": ((groups, num_out), torch.float32),
        "g_idx": ((size,), torch.int32),
    }


def _gptq_decode(scheme: Scheme, tensors: Mapping[str, Tensor]) -> QuantWeight:
    codes = _nibbles(tensors["qweight"].transpose(-1, -2))
    size = codes.shape[-1]
    groups = torch.arange(size, device=codes.device) // (scheme.group or size)
    if bool((tensors["g_idx"] != groups).any()):
        raise ConfigError("a GPTQ matrix's g_idx reorders its columns (act-order), which is not supported")
    # Added to whole words, as it was subtracted when they were written: a zero of 0 borrowed from its neighbour.
    zeros = tensors["qzeros"] + scheme.zero_offset * 0x11111111
    return _int4(codes, tensors["scales"], _nibbles(zeros))


def _mxfp4_tensors(scheme: Scheme, num_out: int, size: int) -> Shapes:
    return {"weight_packed": ((num_out, size // 2), torch.uint8), "weight_scale": ((num_out, size // 32), torch.uint8)}


def _mxfp4_block_tensors(scheme: Scheme, num_out: int, size: int) -> Shapes:
    return {"blocks": ((num_out, size // 32, 16), torch.uint8), "scales": ((num_out, size // 32), torch.uint8)}


def _mxfp4_decode(scheme: Scheme, tensors: Mapping[str, Tensor]) -> QuantWeight:
    pairs, exponents = tensors.get("weight_packed"), tensors.get("weight_scale")
    if pairs is None or exponents is None:
        pairs, exponents = tensors["blocks"].flatten(-2), tensors["scales"]
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    # The exponent is put into the bits of a float32, without rounding; 0 is 2^-127, which is a subnormal number.
    scales = torch.where(exponents == 0, 2**22, exponents.int() << 23).view(torch.float32)
    piece = piece_of("mxfp4", codes.shape[-1], 32)
    scales = scales.transpose(-1, -2).to(torch.bfloat16).contiguous()
    return QuantWeight("mxfp4", packed(codes, "mxfp4", piece), scales, 32, piece)


def _int4(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> QuantWeight:
    """Return the weight of codes, uint8 [num_out, size], with scales and zeros [groups, num_out]."""
    size = codes.shape[-1]
    group = size // scales.shape[-2]
    if zeros is not None and bool((zeros == 8).all()):
        zeros = None
    piece = piece_of("int4", size, group)
    zeros = None if zeros is None else zeros.contiguous()
    return QuantWeight("int4", packed(codes, "int4", piece), _narrowed(scales), group, piece, zeros=zeros)


def _nibbles(words: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Unpack int32 [..., n] to uint8 [..., 8 n]; nibble i of a word is column order[i] of its eight."""
    found = words.new_empty((*words.shape, 8), dtype=torch.uint8)
    for nibble, column in enumerate(order):
        found[..., column] = (words >> (4 * nibble) & 15).to(torch.uint8)
    return found.flatten(-2)


def nibble_words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack codes below 16, any integers [..., 8 n], into words int32 [..., n]; nibble i is column order[i] of eight."""
    eights = codes.to(torch.uint8).unflatten(-1, (-1, 8))[..., list(order)].flatten(-2)
    pairs: Tensor = eights[..., ::2] | eights[..., 1::2] << 4
    return pairs.contiguous().view(torch.int32)


def _narrowed(scales: Tensor) -> Tensor:
    """Return scales in the first dtype of two bytes that holds them all exactly, as the checkpoint did."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(scales.to(dtype).float(), scales):
            return scales.to(dtype).contiguous()
    return scales.contiguous()


Tensors = Callable[[Scheme, int, int], Shapes]
"""Shape and dtype of each tensor of a matrix [num_out, size], by the end of its name in a checkpoint."""
Decode = Callable[[Scheme, Mapping[str, Tensor]], QuantWeight]
"""The matrix of these tensors, on their device."""
FORMATS: dict[str, tuple[Tensors, Decode]] = {
    "fp8": (_bytes_tensors, _bytes_decode),
    "int8": (_bytes_tensors, _bytes_decode),
    "fp8-inverse": (_bytes_tensors, _bytes_decode),
    "wide": (_wide_tensors, _wide_decode),
    "packed": (_packed_tensors, _packed_decode),
    "awq": (_awq_tensors, _awq_decode),
    "gptq": (_gptq_tensors, _gptq_decode),
    "packed-mxfp4": (_mxfp4_tensors, _mxfp4_decode),
    "mxfp4-blocks": (_mxfp4_block_tensors, _mxfp4_decode),
}
