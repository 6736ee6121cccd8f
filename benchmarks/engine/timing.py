"""Times of device work, and a device's two ceilings: memory bandwidth and matrix throughput."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

COPY_BYTES = 2 << 30
MATMUL_SIZE = 8192


def median_ms(work: Callable[[], object], device: torch.device, repeats: int = 15) -> float:
    """Return the median milliseconds of `work`, on a GPU as one CUDA graph, after a few runs to warm up."""
    if device.type != "cuda":
        return _median_cpu_ms(work, min(repeats, 3))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _median_cpu_ms(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def copy_rate(device: torch.device) -> float:
    """Return the bytes a second of a large copy within device memory, with reads and writes added."""
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES >> 5
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    # A kernel, since a copy node of a graph was seen at two thirds of the rate.
    return 2 * size / median_ms(lambda: torch.neg(source, out=target), device) * 1e3


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second of a large dense product of random matrices."""
    size = MATMUL_SIZE if device.type == "cuda" else MATMUL_SIZE >> 4
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    return 2 * size**3 / median_ms(lambda: torch.mm(left, right, out=out), device) * 1e3
