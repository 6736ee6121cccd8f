"""Quantized weights in the layout of humming-kernels, an optional library (github.com/vllm-project/humming)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kernels.quant_weight import QuantWeight, unpacked
from outrider.errors import ConfigError
from outrider.layers.formats import nibble_words

STEP = 128
"""Rows and columns must be multiples of it."""
GROUPS = (32, 64, 128)
"""Columns of int4 that may share a scale; also all of a row."""
BLOCK = (128, 128)
"""Columns and rows of fp8 that may. With a scale a row, trees of 32 tokens take ours 0.92 of the time."""
ROW_LIMITS = (8, 16, 32, 64, 128, 256, 1024)
"""Rows up to which a kernel is used, and the last beyond. Humming has one for every eight, which is too much to
compile: four shapes of matrices would take a minute on sixteen cores."""
_ANY_ROWS = 1 << 30
_LOCKS = 2048


@dataclass(frozen=True, slots=True)
class HummingWeight:
    """W [N, K] of a QuantWeight, and its bias: `weight(rows)` is rows W^T + bias.

    On an H100 all int4 products of an 8B model take 0.76 to 0.82 of what kernels.linear takes for 1 to 64 rows. Scales
    of int4 are rounded to the dtype of rows, sums are taken in float32 and rounded once. A row's result depends on the
    number of rows beside it.
    """

    _tensors: dict[str, Tensor]
    _kernels: Future[Tensor]
    _locks: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """[M, K] of the dtype that it was made for to [M, N], on the current stream; waits for kernels to compile."""
        from humming.ops import launch_kernel

        configs = self._kernels.result()
        found: Tensor = launch_kernel(configs=configs, inputs=rows.contiguous(), locks=self._locks, **self._tensors)
        return found


def humming_weight(weight: QuantWeight, bias: Tensor | None, dtype: torch.dtype) -> HummingWeight | None:
    """The matrix with its `bias` [N] for rows of `dtype`; None: the library is missing or does not take this one.

    Kernels are compiled in threads from here on, once a shape. Raises ConfigError: what they need is missing.
    """
    device = weight.codes.device
    if device.type != "cuda" or not _fits(weight) or find_spec("humming") is None:
        return None
    with _explained():
        return _made(weight, bias, dtype, device.index or 0)


def _made(weight: QuantWeight, bias: Tensor | None, dtype: torch.dtype, device: int) -> HummingWeight:
    from humming.transform import transform_humming_tensors

    config = _layer_config(weight, bias is not None, dtype)
    codes = unpacked(weight.codes, weight.kind, weight.piece)
    scales = weight.scales.t().to(torch.float32 if weight.span > 1 else dtype).contiguous()
    tensors = {"weight": _words(codes, weight.kind), "weight_scale": scales}
    if weight.zeros is not None:
        tensors["zero_point"] = _words(weight.zeros, weight.kind).t().contiguous()
    if bias is not None:
        tensors["bias"] = bias
    kernels = _compiled(config.to_str(), device)
    locks = torch.zeros(_LOCKS, dtype=torch.int32, device=weight.codes.device)
    return HummingWeight(transform_humming_tensors(config, tensors), kernels, locks)


def _fits(weight: QuantWeight) -> bool:
    if weight.num_out % STEP or weight.size % STEP:
        return False
    if weight.kind == "fp8":
        return (weight.group, weight.span) == BLOCK
    return weight.kind == "int4" and weight.group in (*GROUPS, weight.size)


def _words(codes: Tensor, kind: str) -> Tensor:
    """Codes uint8 [..., n] as int32 [..., n / codes of a word], the first in the lowest bits."""
    return nibble_words(codes) if kind == "int4" else codes.contiguous().view(torch.int32)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"humming-kernels cannot compile its products with quantized weights ({said}); give it "
            "CUDA's compiler and headers (pip install 'humming-kernels[cu13]'), or uninstall it to use ours"
        ) from error


def _layer_config(weight: QuantWeight, has_bias: bool, dtype: torch.dtype) -> Any:
    from humming.schema import HummingWeightSchema
    from humming.transform import prepare_layer_config

    schema = HummingWeightSchema(
        b_dtype={"int4": "uint4", "fp8": "float8e4m3"}[weight.kind],
        weight_scale_group_size=0 if weight.group == weight.size and weight.span == 1 else weight.group,
        weight_scale_group_size_n=weight.span if weight.span > 1 else 0,
        has_zero_point=weight.zeros is not None,
    )
    return prepare_layer_config(weight.num_out, weight.size, schema, has_bias=has_bias, torch_dtype=dtype)


@cache
def _compiled(config: str, device: int) -> Future[Tensor]:
    """Which kernel multiplies how many rows, as the library's launcher wants it."""
    return _threads().submit(_compile, config, device)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(8, "humming")


def _compile(config: str, device: int) -> Tensor:
    from humming.kernel import HummingKernel
    from humming.tune import get_heuristics_config

    tuned, first = [], 0
    with _explained():
        for limit in ROW_LIMITS:
            chosen = get_heuristics_config(json.loads(config), shape_m=limit, device=device)
            tuned.append([first, _ANY_ROWS if limit == ROW_LIMITS[-1] else limit, chosen])
            first = limit
        found: Tensor = HummingKernel.prepare_kernels(config, None, json.dumps(tuned), device)
    return found
