"""All products of a model one after another, in several ways, for kernels_gemm.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from gemm_cuts import LAYER, SHAPES, Shape
from gemm_sweep import Timer
from gemm_timing import POOL_LAYERS, pool
from torch import Tensor

from kernels.activation import silu_mul
from kernels.gemm import stream_linear
from kernels.gemm_configs import GemmConfig
from kernels.norm import rms_norm

NORMED = ("qkv", "gate_up", "head")


@dataclass(frozen=True, slots=True)
class Chain:
    """A way to run all products of a model. With `norm`, norms and residuals are done too."""

    name: str
    ours: bool
    norm: bool
    pdl: bool = True


CHAINS = (
    Chain("cublas bare", ours=False, norm=False),
    Chain("cublas", ours=False, norm=True),
    Chain("bare", ours=True, norm=False),
    Chain("bare without pdl", ours=True, norm=False, pdl=False),
    Chain("with norms", ours=True, norm=True),
    Chain("with norms without pdl", ours=True, norm=True, pdl=False),
)


def model_chain(chain: Chain, num_rows: int, num_layers: int, best: dict[str, GemmConfig]) -> Callable[[], object]:
    """All products of `num_layers` layers and the head, with what stands between them but attention."""
    offset, layers = 0, []
    for _ in range(POOL_LAYERS):
        weights = []
        for shape in LAYER:
            weights.append(pool()[offset : offset + shape.bytes // 2].view(shape.weight_rows, shape.size))
            offset += shape.bytes // 2
        layers.append(weights)
    head = SHAPES["head"]
    head_weight = pool()[offset : offset + head.bytes // 2].view(head.weight_rows, head.size)
    size, inner_size = LAYER[0].size, LAYER[2].num_out
    start = torch.randn(num_rows, size, device="cuda").bfloat16()
    norm_weight = torch.ones(size, device="cuda", dtype=torch.bfloat16)
    configs = {name: replace(config, pdl=chain.pdl) for name, config in best.items()}

    def ours(name: str, rows: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        shape = SHAPES[name]
        if chain.norm and name in NORMED:
            rows = rms_norm(rows, norm_weight, 1e-5)
        return stream_linear(
            rows, weight, residual=residual, gated=shape.gated, out_dtype=shape.out_dtype, config=configs[name]
        )

    def theirs(name: str, rows: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        if not chain.norm:
            return torch.mm(rows, weight.T)
        if name in NORMED:
            rows = rms_norm(rows, norm_weight, 1e-5)
        product = torch.mm(rows, weight.T) if residual is None else torch.addmm(residual, rows, weight.T)
        return silu_mul(product) if name == "gate_up" else product

    linear = ours if chain.ours else theirs
    wide = torch.randn(num_rows, inner_size, device="cuda").bfloat16()

    def run() -> None:
        hidden = start
        for index in range(num_layers):
            qkv, output, gate_up, down = layers[index % POOL_LAYERS]
            linear("qkv", hidden, qkv)
            residual = hidden if chain.norm else None
            hidden = linear("o", hidden, output, residual)
            inner = linear("gate_up", hidden, gate_up)
            residual = hidden if chain.norm else None
            hidden = linear("down", inner if inner.shape[1] == inner_size else wide, down, residual)
        linear("head", hidden, head_weight)

    return run


def chain_kernels(timer: Timer, row_counts: list[int]) -> Iterable[tuple[Shape, int, GemmConfig, bool]]:
    """What the chains will need compiled."""
    for shape in (*LAYER, SHAPES["head"]):
        for num_rows in row_counts:
            for found in timer.best(shape, num_rows, 1):
                for pdl in (True, False):
                    for residual in (False, True) if shape.name in ("o", "down") else (False,):
                        yield shape, num_rows, replace(found.config, pdl=pdl), residual
