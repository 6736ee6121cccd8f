"""The products of a Llama-8B-shaped model, and the ways to cut them that kernels_gemm.py tries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.gemm_configs import GemmConfig

KB = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """One product of a layer. num_out is that of the result; gated weights have twice as many rows."""

    name: str
    num_out: int
    size: int
    gated: bool = False
    out_dtype: torch.dtype = torch.bfloat16

    @property
    def weight_rows(self) -> int:
        """Rows of the weight matrix."""
        return self.num_out * (2 if self.gated else 1)

    @property
    def bytes(self) -> int:
        """Bytes of the weights."""
        return self.weight_rows * self.size * 2


LAYER = (
    Shape("qkv", 6144, 4096),
    Shape("o", 4096, 4096),
    Shape("gate_up", 14336, 4096, gated=True),
    Shape("down", 4096, 14336),
)
HEADS = (Shape("head", 49152, 4096, out_dtype=torch.float32), Shape("head128k", 128256, 4096, out_dtype=torch.float32))
SMALL = (
    Shape("small_qkv", 960, 576),
    Shape("small_o", 576, 576),
    Shape("small_gate_up", 1536, 576, gated=True),
    Shape("small_down", 576, 1536),
    Shape("small_head", 49152, 576, out_dtype=torch.float32),
)
"""Of SmolLM2-135M, a draft model."""
SHAPES = {shape.name: shape for shape in (*LAYER, *HEADS, *SMALL)}
FEW_WEIGHTS = 4 << 20
"""Fewer cannot keep all processors busy; their products are bound by latency."""


@dataclass(frozen=True, slots=True)
class Group:
    """Cuts to be timed for one product and row count."""

    shape: Shape
    num_rows: int
    configs: tuple[GemmConfig, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """One cut's outcome: seconds a product, or why there are none."""

    shape: str
    num_rows: int
    config: GemmConfig
    seconds: float
    problem: str = ""


def candidates(shape: Shape, num_rows: int, processors: int) -> list[GemmConfig]:
    """The coarse sweep: every sensible tile, depth, number of programs, with both ways to copy."""
    if shape.bytes < FEW_WEIGHTS:
        return small_candidates(shape, num_rows)
    found: dict[GemmConfig, None] = {}
    tiles = [(True, 64, 4), (True, 128, 4), (True, 128, 8), (False, 16, 4), (False, 32, 4), (False, 64, 4)]
    for swap, block_n, warps in tiles:
        if shape.gated and block_n == 128 and warps == 4:
            continue
        for block_k in (64, 128, 256):
            for tma in (False, True):
                for memory in (72 * KB, 110 * KB, 220 * KB):
                    for split_k, per_sm in ((1, 1), (2, 1), (4, 1), (8, 1), (0, 1), (0, 2), (0, 3)):
                        config = GemmConfig(block_n, block_k, split_k, per_sm, 1, warps, swap, tma, prefetch=4)
                        config = with_memory(config, shape, num_rows, memory)
                        if sensible(config, shape, num_rows, processors):
                            found[config] = None
    return list(found)


def small_candidates(shape: Shape, num_rows: int) -> list[GemmConfig]:
    """The same for few weights: narrow tiles, everything in flight at once or asked into L2 ahead."""
    found: dict[GemmConfig, None] = {}
    for swap, block_n, warps in ((False, 16, 4), (False, 16, 2), (False, 32, 4), (False, 64, 4), (True, 64, 4)):
        for block_k in (64, 128, 256):
            steps = -(-shape.size // block_k)
            for split_k in (1, 2, 3, 4):
                for prefetch in (0, 32):
                    stages = min(max(-(-steps // split_k), 2), 8)
                    config = GemmConfig(block_n, block_k, split_k, 1, stages, warps, swap, prefetch=prefetch)
                    if split_k <= steps and sensible(config, shape, num_rows, 0):
                        found[config] = None
    return list(found)


def with_memory(config: GemmConfig, shape: Shape, num_rows: int, memory: int) -> GemmConfig:
    """As many stages as fit into `memory`."""
    one = replace(config, stages=1).shared_bytes(num_rows, 2, shape.gated)
    return replace(config, stages=min(memory // one, 8))


def sensible(config: GemmConfig, shape: Shape, num_rows: int, processors: int) -> bool:
    """Whether a cut is worth a run: deep enough, with work for all processors, and no useless split."""
    memory = config.shared_bytes(num_rows, 2, shape.gated)
    if config.stages < 2 or memory > 224 * KB:
        return False
    if shape.bytes < FEW_WEIGHTS:
        return True
    steps = -(-shape.size // config.block_k)
    tiles = -(-shape.num_out // config.block_n)
    programs = tiles * config.split_k if config.split_k else config.per_sm * processors
    if config.split_k == 0:
        return memory * config.per_sm <= 226 * KB
    each = steps / config.split_k
    many = config.split_k > 1 and programs > 6 * processors
    return each >= 2 * config.stages and programs >= 0.9 * processors and not many


def neighbours(config: GemmConfig) -> list[GemmConfig]:
    """The fine sweep around a winner: what is asked into L2 early, and how."""
    changes: list[dict[str, int | bool]] = [{"prefetch": size} for size in (0, 2, 8, 16)]
    changes += [{"prefetch": 8, "bulk": False}, {"prefetch": 4, "bulk": False}]
    changes += [{"stages": config.stages + 1}, {"stages": config.stages - 1}, {"pdl": False}]
    if config.split_k > 1:
        changes += [
            {"split_k": config.split_k + 1},
            {"split_k": config.split_k - 1},
            {"split_k": config.split_k * 3 // 2},
        ]
    return [made for change in changes if (made := replace(config, **change)) != config and made.stages >= 2]


def compiled_part(shape: Shape, num_rows: int, config: GemmConfig) -> tuple[object, ...]:
    """What of a cut is in the kernel; the rest is in its arguments."""
    steps = -(-shape.size // config.block_k)
    shared = config.split_k != 1 and steps > 1
    return (shared, replace(config, split_k=0, per_sm=0))
