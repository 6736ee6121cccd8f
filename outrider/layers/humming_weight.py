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

from kernels.expert_tiles import Routes
from kernels.experts import in_tiles
from kernels.quant_weight import QuantWeight, unpacked
from outrider.errors import ConfigError
from outrider.layers.formats import nibble_words

STEP = 128
"""Rows and columns must be multiples of this."""
GROUPS = (32, 64, 128)
"""Columns of int4 that may share a scale; so may all columns of a row."""
BLOCK = (128, 128)
"""Columns and rows of fp8 that may share a scale. With a scale per row, our kernels take 0.92 of the library's time for
trees of 32 tokens."""
ROW_LIMITS = (8, 16, 32, 64, 128, 256, 1024)
"""Most rows for which each kernel is used; the last one is also used beyond. Humming has a kernel for every eight rows,
which would take too long to compile: a minute on sixteen cores for four shapes of matrices."""
PAIR_LIMITS = (8, 32, 64, 128, 256, 512, 1024, 4096)
"""The same for pairs of a row and one of its experts."""
EXPERT_GROUPS = {"int4": GROUPS, "mxfp4": (32,)}
"""Columns of experts that may share a scale, by kind, if the library multiplies. In fp8 it takes as long as ours."""
EXPERT_STEP = 64
"""Rows and columns of experts' matrices must be multiples of this."""
_ANY_ROWS = 1 << 30
_LOCKS = 2048


@dataclass(frozen=True, slots=True)
class HummingWeight:
    """W [N, K] of a QuantWeight, and its bias: `weight(rows)` is rows W^T + bias.

    On an H100 all int4 products of an 8B model take 0.76 to 0.82 of the time of kernels.linear for 1 to 64 rows. Scales
    of int4 are rounded to the dtype of rows; sums are computed in float32 and rounded once. A row's result depends on
    the number of rows beside it.
    """

    _tensors: dict[str, Tensor]
    _kernels: Future[Tensor]
    _locks: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """Map rows [M, K] of the weight's dtype to [M, N], on the current stream; waits for kernels to compile."""
        from humming.ops import launch_kernel

        configs = self._kernels.result()
        found: Tensor = launch_kernel(configs=configs, inputs=rows.contiguous(), locks=self._locks, **self._tensors)
        return found


@dataclass(frozen=True, slots=True)
class HummingExperts:
    """The same for stacked matrices [E, N, K]: `experts(rows, routes)` is kernels.experts.expert_linear, not gated.

    On an H100 both products of a layer take 0.76 to 0.89 of our kernels' time in int4 and 0.35 to 0.70 in MXFP4, for 1
    to 64 tokens.

    `tiles`: each item has a largest number of pairs, and the places that a tile of routes has up to that number.
    """

    _tensors: dict[str, Tensor]
    _kernels: Future[Tensor]
    _locks: Tensor
    tiles: tuple[tuple[int, int], ...]

    def tile(self, num_pairs: int) -> int:
        """Return how many places a tile of routes must have so that routes need not be laid out again."""
        return next(tile for last, tile in self.tiles if num_pairs <= last)

    def __call__(self, rows: Tensor, routes: Routes) -> Tensor:
        """Map rows of tokens, or of pairs, to rows of pairs; waits for kernels to compile."""
        from humming.ops import launch_kernel

        num_pairs, tile = routes.experts.numel(), self.tile(routes.experts.numel())
        if routes.tile != tile:
            routes = in_tiles(routes, self._tensors["weight"].shape[0], tile)
        found: Tensor = launch_kernel(
            configs=self._kernels.result(), inputs=rows, top_k=num_pairs // rows.shape[0], sorted_ids=routes.places,
            expert_ids=routes.tile_experts, num_tokens_padded=routes.num_places, locks=self._locks, **self._tensors,
        )  # fmt: skip
        return found


def humming_weight(weight: QuantWeight, bias: Tensor | None, dtype: torch.dtype) -> HummingWeight | None:
    """Return the matrix with its `bias` [N] for rows of `dtype`; None if the library is missing or does not support it.

    This starts compiling kernels in threads, once for each shape. Raises ConfigError if what they need is missing.
    """
    device = weight.codes.device
    if device.type != "cuda" or not _fits(weight) or find_spec("humming") is None:
        return None
    with _as_config_errors():
        config = _layer_config(weight, bias is not None, dtype)
        kernels = _compiled(config.to_str(), device.index or 0)
        return HummingWeight(_transformed(config, weight, bias, dtype), kernels, _new_locks(device))


def humming_experts(weight: QuantWeight, bias: Tensor | None, dtype: torch.dtype) -> HummingExperts | None:
    """Do as `humming_weight` for stacked matrices [E, N, K] and biases [E, N]."""
    device = weight.codes.device
    if device.type != "cuda" or not _fits_experts(weight) or find_spec("humming") is None:
        return None
    with _as_config_errors():
        config = _layer_config(weight, bias is not None, dtype)
        cuts = _cuts(config.to_str(), device.index or 0, True)
        kernels = _compiled(config.to_str(), device.index or 0, indexed=True)
        tiles = tuple((last, cut["block_shape"][0]) for _, last, cut in cuts)
        return HummingExperts(_transformed(config, weight, bias, dtype), kernels, _new_locks(device), tiles)


def _transformed(config: Any, weight: QuantWeight, bias: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors that kernels read, in the library's own layout."""
    from humming.transform import transform_humming_tensors

    codes = unpacked(weight.codes, weight.kind, weight.piece)
    scales = weight.scales.mT
    if weight.kind == "mxfp4":
        scales = (scales.float().log2() + 127).to(torch.uint8).contiguous().view(torch.float8_e8m0fnu)
    else:
        scales = scales.to(torch.float32 if weight.span > 1 else dtype).contiguous()
    tensors = {"weight": _words(codes, weight.kind), "weight_scale": scales}
    if weight.zeros is not None:
        tensors["zero_point"] = _words(weight.zeros, weight.kind).mT.contiguous()
    if bias is not None:
        tensors["bias"] = bias
    found: dict[str, Tensor] = transform_humming_tensors(config, tensors)
    return found


def _new_locks(device: torch.device) -> Tensor:
    """Return the memory by which programs of a kernel wait for each other."""
    return torch.zeros(_LOCKS, dtype=torch.int32, device=device)


def _fits(weight: QuantWeight) -> bool:
    if weight.num_out % STEP or weight.size % STEP:
        return False
    if weight.kind == "fp8":
        return (weight.group, weight.span) == BLOCK
    return weight.kind == "int4" and weight.group in (*GROUPS, weight.size)


def _fits_experts(weight: QuantWeight) -> bool:
    fits_step = weight.num_out % EXPERT_STEP == 0 and weight.size % EXPERT_STEP == 0
    return fits_step and weight.span == 1 and weight.group in EXPERT_GROUPS.get(weight.kind, ())


def _words(codes: Tensor, kind: str) -> Tensor:
    """Return codes uint8 [..., n] as int32 [..., n / codes of a word], the first in the lowest bits."""
    return codes.contiguous().view(torch.int32) if kind == "fp8" else nibble_words(codes)


@contextmanager
def _as_config_errors() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"humming-kernels cannot compile its products with quantized weights ({reason}); give it "
            "CUDA's compiler and headers (pip install 'humming-kernels[cu13]'), or uninstall it to use ours"
        ) from error


def _layer_config(weight: QuantWeight, has_bias: bool, dtype: torch.dtype) -> Any:
    """Return the library's description of the matrix, or of stacked ones."""
    from humming.schema import HummingWeightSchema
    from humming.transform import prepare_layer_config

    schema = HummingWeightSchema(
        b_dtype={"int4": "uint4", "fp8": "float8e4m3", "mxfp4": "float4e2m1"}[weight.kind],
        bs_dtype="float8e8m0" if weight.kind == "mxfp4" else None,
        weight_scale_group_size=0 if weight.group == weight.size and weight.span == 1 else weight.group,
        weight_scale_group_size_n=weight.span if weight.span > 1 else 0,
        has_zero_point=weight.zeros is not None,
    )
    experts = weight.codes.shape[0] if weight.codes.dim() == 3 else 0
    return prepare_layer_config(
        weight.num_out, weight.size, schema, num_experts=experts, pad_n_to_multiple=STEP if experts else 1,
        has_bias=has_bias, torch_dtype=dtype,
    )  # fmt: skip


@cache
def _compiled(config: str, device: int, indexed: bool = False) -> Future[Tensor]:
    """Start compiling; the result tells the library's launcher which kernel takes how many rows. `indexed`: experts."""
    return _threads().submit(_compile, config, device, indexed)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(8, "humming")


@cache
def _cuts(config: str, device: int, indexed: bool) -> list[list[Any]]:
    """Return [first, last, cut] items: the cut that the library chooses for more than `first`, up to `last` rows."""
    from humming.tune import get_heuristics_config

    limits, gemm_type = (PAIR_LIMITS, "indexed") if indexed else (ROW_LIMITS, "dense")
    cuts, first = [], 0
    for limit in limits:
        chosen = get_heuristics_config(json.loads(config), shape_m=limit, gemm_type=gemm_type, device=device)
        cuts.append([first, _ANY_ROWS if limit == limits[-1] else limit, chosen])
        first = limit
    return cuts


def _compile(config: str, device: int, indexed: bool) -> Tensor:
    from humming.kernel import HummingKernel

    with _as_config_errors():
        cuts = _cuts(config, device, indexed)
        kind = json.dumps({"gemm_type": "indexed"}) if indexed else None
        found: Tensor = HummingKernel.prepare_kernels(config, kind, json.dumps(cuts), device)
    return found
