"""What the worker processes of kernels_gemm.py do: compile one cut, or check and time some."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import cache

import torch
from gemm_cuts import HEADS, LAYER, Found, Group, Shape
from torch import Tensor

from kernels.gemm import stream_linear
from kernels.gemm_configs import GemmConfig

COLD_BYTES = 500 << 20
POOL_LAYERS = 4
MOST_WEIGHTS = 240


def compile_one(shape: Shape, num_rows: int, config: GemmConfig, with_residual: bool) -> str:
    """Fill Triton's cache from a worker process. Returns what went wrong."""
    from kernels.jit import gemm

    try:
        one = torch.empty(64, dtype=torch.bfloat16, device="cuda")
        rows, weight = one[0].expand(num_rows, shape.size), one[0].expand(shape.weight_rows, shape.size)
        out = one.to(shape.out_dtype)[0].expand(num_rows, shape.num_out)
        residual = one[0].expand(num_rows, shape.num_out) if with_residual else None
        gemm.stream_linear(rows, weight, None, residual, shape.gated, out, config, compile_only=True)
    except Exception as error:  # whatever the compiler raises
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    return ""


@cache
def pool() -> Tensor:
    """Weights for everything: a few layers and the larger head, bfloat16, of one scale."""
    size = sum(shape.bytes for shape in LAYER) * POOL_LAYERS + max(shape.bytes for shape in HEADS)
    return torch.randn(size // 2, device="cuda", dtype=torch.bfloat16).mul_(1 / 64)


@cache
def pool_weights(shape: Shape) -> list[Tensor]:
    """Distinct weights of one shape, at least COLD_BYTES of them where the pool has as many."""
    # Of few weights not all that L2 could hold are needed: what one graph reads is more than it holds.
    count = min(-(-COLD_BYTES // shape.bytes) + 1, pool().numel() * 2 // shape.bytes, MOST_WEIGHTS)
    size = shape.weight_rows * shape.size
    return [pool()[index * size : (index + 1) * size].view(shape.weight_rows, shape.size) for index in range(count)]


def time_graph(run: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of a captured run. `run` must have been run before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            run()
        finally:
            graph.capture_end()
        graph.replay()
        graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        stream.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / 1e3


@cache
def inputs(shape: Shape, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, an output to write to, and what it should hold for the first weights, in float32."""
    generator = torch.Generator("cuda").manual_seed(num_rows)
    rows = torch.randn(num_rows, shape.size, device="cuda", generator=generator).bfloat16()
    expected = (rows @ pool_weights(shape)[0].T).float()
    if shape.gated:
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    return rows, torch.empty(num_rows, shape.num_out, device="cuda", dtype=shape.out_dtype), expected


def time_one(shape: Shape, num_rows: int, config: GemmConfig) -> Found:
    """Check one cut, then time it."""
    rows, out, expected = inputs(shape, num_rows)
    weights = pool_weights(shape)
    out.fill_(float("nan"))
    stream_linear(rows, weights[0], gated=shape.gated, out=out, config=config)
    error = ((out.float() - expected).norm() / expected.norm()).item()
    if not error < 0.02:
        return Found(shape.name, num_rows, config, 0.0, f"relative error {error:.2g}")

    def run() -> None:
        for weight in weights:
            stream_linear(rows, weight, gated=shape.gated, out=out, config=config)

    return Found(shape.name, num_rows, config, time_graph(run) / len(weights))


def time_group(group: Group, deadline: float) -> tuple[list[Found], bool]:
    """Outcomes so far, and whether the device context is lost. Runs in a process that may be thrown away."""
    outcomes: list[Found] = []
    for config in group.configs:
        if time.time() > deadline:
            break
        try:
            outcomes.append(time_one(group.shape, group.num_rows, config))
        except Exception as error:  # whatever the compiler, the launcher or the device raises
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
            outcomes.append(Found(group.shape.name, group.num_rows, config, 0.0, problem))
            try:
                torch.cuda.synchronize()
                torch.ones(8, device="cuda").sum().item()
            except Exception:  # an earlier illegal access stays with the process
                return outcomes, True
    return outcomes, False


def time_cublas(shape: Shape, num_rows: int) -> float:
    """Seconds of the bare product in cuBLAS."""
    rows, _, _ = inputs(shape, num_rows)
    out = torch.empty(num_rows, shape.weight_rows, device="cuda", dtype=torch.bfloat16)
    weights = pool_weights(shape)
    torch.mm(rows, weights[0].T, out=out)
    return time_graph(lambda: [torch.mm(rows, weight.T, out=out) for weight in weights]) / len(weights)
