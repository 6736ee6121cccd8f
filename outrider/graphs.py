"""CUDA graphs of the same work, one for each shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from kernels.compile_workers import compile_aside
from kernels.compiling import allow_threads, compile_ahead
from outrider.logs import get_logger

__all__ = ["COMPILE_THREADS", "GraphPool", "compile_aside"]

log = get_logger(__name__)

COMPILE_THREADS = 16

Shape = TypeVar("Shape", bound=tuple[int, ...])
"""The key of a graph; larger shapes compare greater."""


class GraphPool(Generic[Shape]):
    """Captured work that shares one memory pool. `body(shape)` queues the work on the device and nothing else."""

    def __init__(
        self,
        name: str,
        body: Callable[[Shape], None],
        prepare: Callable[[Shape], None] | None = None,
        compiling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`name` is the plural for the work in the log. `prepare(shape)` is called on the host before each run.

        `compiling` gives the context in which several threads run shapes, in any order.
        """
        self._name = name
        self._body = body
        self._prepare = prepare
        self._compiling = compiling
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._next: dict[Shape, torch.cuda.CUDAGraph] = {}
        """Graphs of `capture_next` that are not in use yet."""
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self.seconds = 0.0
        self.num_bytes = 0
        """Device memory that captures took."""

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(
        self, shapes: Sequence[Shape], together: bool, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Capture every shape. Each is run once first, so that kernels are compiled and libraries initialised.

        The inputs of `body` must be empty, so that these runs change nothing. `together`: several threads may run
        `body`, which compiles on all cores within `compile_aside`.
        """
        start = time.perf_counter()
        if together:
            with self._compiling():
                self._compile(shapes)
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream):
            for done, shape in enumerate(shapes):
                self._graphs[shape] = self._capture(shape, self._stream)
                if progress is not None:
                    progress(done + 1, len(shapes))
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - start
        self.num_bytes = max(before - torch.cuda.mem_get_info()[0], 0)
        size = self.num_bytes / 2**20
        log.info("%d %s captured in %.1f s, %.0f MiB", len(shapes), self._name, self.seconds, size)

    def captured(self) -> list[Shape]:
        """Return the shapes that have a graph, largest first."""
        return sorted(self._graphs, reverse=True)

    def capture_next(self, shape: Shape, broadcast: Callable[[], None]) -> bool:
        """Capture a shape with the present behaviour of `body`; until `adopt`, the earlier graphs are still run.

        Call it between two runs, which it delays. As for `capture`, the inputs of `body` must be empty. The work is
        run twice, first as it is and then as the captured graph; `broadcast` is called before each run.

        Returns whether there was memory for the graph; without one, the shape runs kernel by kernel after `adopt`.
        Raises torch.OutOfMemoryError if a run itself had too little, and has then done only part of its work.
        """
        torch.cuda.synchronize()
        stream = self._stream or torch.cuda.Stream()
        with torch.cuda.stream(stream):
            broadcast()
            self._run_once(shape, stream)
            try:
                graph = self._record(shape)
            except torch.OutOfMemoryError:
                return False
            broadcast()
            graph.replay()
        torch.cuda.synchronize()
        self._next[shape] = graph
        return True

    def adopt(self) -> None:
        """Run the graphs of `capture_next` from now on, and no others."""
        # In this order: a memory pool lives only as long as some graph uses it.
        self._graphs, self._next = self._next, {}

    def discard_next(self) -> None:
        """Drop the graphs of `capture_next`."""
        self._next = {}

    def run(self, shape: Shape) -> None:
        """Replay the work, or run it kernel by kernel if it was not captured."""
        if self._prepare is not None:
            self._prepare(shape)
        graph = self._graphs.get(shape)
        if graph is None:
            self._body(shape)
        else:
            graph.replay()

    def _capture(self, shape: Shape, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        self._run_once(shape, stream)
        graph = self._record(shape)
        # The first replay uploads the graph.
        graph.replay()
        return graph

    def _run_once(self, shape: Shape, stream: torch.cuda.Stream) -> None:
        if self._prepare is not None:
            self._prepare(shape)
        self._body(shape)
        stream.synchronize()

    def _record(self, shape: Shape) -> torch.cuda.CUDAGraph:
        # torch.cuda.graph() would collect garbage and empty the cache each time, which takes a tenth of a second.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            self._body(shape)
        finally:
            graph.capture_end()
        return graph

    def _compile(self, shapes: Sequence[Shape]) -> None:
        """Run all shapes at the same time, because compiling takes most of a first start.

        If other processes compile, they get all kernels first.

        On the device all runs still share one stream. Their launches may interleave, which does no harm as long as
        they find nothing to do.
        """
        device = torch.cuda.current_device()
        num_threads = COMPILE_THREADS
        if not allow_threads():
            num_threads = 1
            log.info("kernels are compiled one after another: whether this Triton bears threads is not known")
        else:
            self._start_compiling(shapes)

        def run(shape: Shape) -> None:
            with torch.cuda.device(device), torch.inference_mode():
                self._body(shape)

        with ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as pool:
            for done in [pool.submit(run, shape) for shape in shapes]:
                done.result()

    def _start_compiling(self, shapes: Sequence[Shape]) -> None:
        """If other processes compile, have them start on the kernels of all shapes."""
        with compile_ahead() as num_ahead:
            if num_ahead is None:
                return
            for shape in shapes:
                self._body(shape)
                if not num_ahead():
                    # If Triton's cache has all kernels of the first shape, it most likely has those of all.
                    return
