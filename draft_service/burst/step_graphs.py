"""One CUDA graph for each shape of a draft step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from draft_service.burst.buckets import Bucket
from outrider.logs import get_logger

log = get_logger(__name__)

COMPILE_THREADS = 8


class StepGraphs:
    """Captured steps that share one memory pool. `body(bucket)` queues the work of a step and nothing else."""

    def __init__(self, body: Callable[[Bucket], None]) -> None:
        self._body = body
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self.seconds = 0.0
        self.num_bytes = 0
        """Device memory that captures took."""

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, buckets: Sequence[Bucket], progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every bucket. The pool of what could be run must be empty, so that steps change nothing.

        Each is run before, so that kernels are compiled: all at the same time on all cores, for that is what takes
        long at a first start.
        """
        start = time.perf_counter()
        self._compile(buckets)
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream):
            for done, bucket in enumerate(buckets):
                self._body(bucket)
                stream.synchronize()
                # torch.cuda.graph() would collect garbage and empty the cache each time: a tenth of a second.
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self._body(bucket)
                finally:
                    graph.capture_end()
                # The first replay uploads the graph.
                graph.replay()
                self._graphs[bucket] = graph
                if progress is not None:
                    progress(done + 1, len(buckets))
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - start
        self.num_bytes = max(before - torch.cuda.mem_get_info()[0], 0)
        log.info("%d draft steps captured in %.1f s, %.0f MiB", len(buckets), self.seconds, self.num_bytes / 2**20)

    def _compile(self, buckets: Sequence[Bucket]) -> None:
        device = torch.cuda.current_device()

        def run(bucket: Bucket) -> None:
            with torch.cuda.device(device), torch.inference_mode():
                self._body(bucket)

        with ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="compile") as pool:
            for done in [pool.submit(run, bucket) for bucket in buckets]:
                done.result()

    def run(self, bucket: Bucket) -> None:
        """Replay the step, or run it kernel by kernel if it was not captured."""
        graph = self._graphs.get(bucket)
        if graph is None:
            self._body(bucket)
        else:
            graph.replay()
