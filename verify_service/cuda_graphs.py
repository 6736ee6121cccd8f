"""One CUDA graph for each shape of a round."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from outrider.logs import get_logger
from verify_service.round_buffers import Bucket

log = get_logger(__name__)

COMPILE_THREADS = 8

TOKEN_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def row_buckets(max_rows: int) -> list[int]:
    """1, 2, 4, ... up to `max_rows`, which ends the list."""
    powers = [1 << i for i in range(max_rows.bit_length()) if 1 << i < max_rows]
    return [*powers, max_rows]


class Buckets:
    """The shapes that rounds are padded to: the smallest that holds them."""

    def __init__(self, max_tokens: int, max_rows: int, fixed: Bucket | None = None) -> None:
        """`fixed` is the only shape there is, for rounds whose results must not depend on it."""
        self.tokens = [width for width in TOKEN_BUCKETS if width < max_tokens] + [max_tokens]
        self.rows = row_buckets(max_rows)
        self._only = fixed is not None
        if fixed is not None:
            self.tokens, self.rows = [fixed.tokens], [fixed.rows]

    def fit(self, num_tokens: int, num_rows: int) -> Bucket:
        """The smallest bucket. Raises ValueError for a round that is too large for all."""
        if num_tokens > self.tokens[-1] or num_rows > self.rows[-1]:
            raise ValueError(
                f"a round of {num_tokens} tokens in {num_rows} rows is over {self.tokens[-1]} in {self.rows[-1]}"
            )
        rows = self.rows[bisect_left(self.rows, num_rows)]
        tokens = self.tokens[bisect_left(self.tokens, max(num_tokens, min(rows, self.tokens[-1])))]
        return Bucket(tokens, rows, self._only)

    def width(self, num_tokens: int) -> int:
        """Tokens that a round of `num_tokens` is padded to."""
        return self.tokens[min(bisect_left(self.tokens, num_tokens), len(self.tokens) - 1)]

    @property
    def widths(self) -> tuple[int, ...]:
        """Token counts whose times make a curve; at least two."""
        return tuple(self.tokens) if len(self.tokens) > 1 else (1, max(self.tokens[0], 2))

    def all(self) -> list[Bucket]:
        """Largest first, so that a shared memory pool is sized by the first capture."""
        found = {self.fit(tokens, rows) for rows in self.rows for tokens in self.tokens}
        return sorted(found, reverse=True)


class GraphPool:
    """Captured rounds that share one memory pool. `body(bucket)` queues the work of a round and nothing else."""

    def __init__(self, body: Callable[[Bucket], None], prepare: Callable[[Bucket], None]) -> None:
        self._body = body
        self._prepare = prepare
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self.seconds = 0.0
        self.num_bytes = 0
        """Device memory that captures took."""

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(
        self, buckets: Sequence[Bucket], together: bool, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Capture every bucket. Each is run once first, so that kernels are compiled and libraries initialised.

        `together`: rounds may be run by several threads, which compiles on all cores.
        """
        start = time.perf_counter()
        if together:
            self._compile(buckets)
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream):
            for done, bucket in enumerate(buckets):
                self._capture(bucket, self._stream)
                # The first replay uploads the graph.
                self._graphs[bucket].replay()
                if progress is not None:
                    progress(done + 1, len(buckets))
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - start
        self.num_bytes = max(before - torch.cuda.mem_get_info()[0], 0)
        log.info("%d rounds captured in %.1f s, %.0f MiB", len(buckets), self.seconds, self.num_bytes / 2**20)

    def captured(self) -> list[Bucket]:
        """Rounds that have a graph, largest first."""
        return sorted(self._graphs, reverse=True)

    def recapture(self, bucket: Bucket) -> None:
        """Capture a round anew, because `body` does something else by now; between two rounds, which it holds up.

        Raises torch.OutOfMemoryError; the round is run kernel by kernel from then on.
        """
        # Kept until there is a new one: a memory pool lives as long as some graph uses it.
        old = self._graphs.pop(bucket)
        torch.cuda.synchronize()
        stream = self._stream or torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self._capture(bucket, stream)
        torch.cuda.synchronize()
        del old

    def _capture(self, bucket: Bucket, stream: torch.cuda.Stream) -> None:
        self._prepare(bucket)
        self._body(bucket)
        stream.synchronize()
        # torch.cuda.graph() would collect garbage and empty the cache each time: a tenth of a second.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            self._body(bucket)
        finally:
            graph.capture_end()
        self._graphs[bucket] = graph

    def _compile(self, buckets: Sequence[Bucket]) -> None:
        """Run all buckets at the same time: compiling takes most of a first start.

        On the device all of it is still one stream, where rounds that end up in each other do no harm as long as they
        have no tokens.
        """
        device = torch.cuda.current_device()

        def run(bucket: Bucket) -> None:
            with torch.cuda.device(device), torch.inference_mode():
                self._body(bucket)

        with ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="compile") as pool:
            for done in [pool.submit(run, bucket) for bucket in buckets]:
                done.result()

    def run(self, bucket: Bucket) -> None:
        """Replay the round, or run it kernel by kernel if it was not captured."""
        self._prepare(bucket)
        graph = self._graphs.get(bucket)
        if graph is None:
            self._body(bucket)
        else:
            graph.replay()
