"""The sweep of kernels_gemm.py: processes that compile, a process that times, and the three stages."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace

import torch
from gemm_cuts import KB, Found, Group, Shape, candidates, compiled_part, neighbours, sensible, with_memory
from gemm_timing import compile_one, time_cublas, time_group

from kernels.gemm_configs import GemmConfig, tile_rows


class Compiler:
    """Worker processes that compile ahead of the timing."""

    def __init__(self, workers: int) -> None:
        self.pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))

    def compile(self, tasks: Iterable[tuple[Shape, int, GemmConfig, bool]], deadline: float) -> None:
        """Compile all, or as many as time allows."""
        # Products that differ in num_out alone, or in rows of one tile, share a kernel.
        unique = {
            (
                task[0].size,
                task[0].gated,
                task[0].out_dtype,
                tile_rows(task[1]),
                *compiled_part(*task[:3]),
                task[3],
            ): task
            for task in tasks
        }
        start = time.perf_counter()
        futures: list[Future[str]] = [self.pool.submit(compile_one, *task) for task in unique.values()]
        problems: Counter[str] = Counter()
        try:
            for future in as_completed(futures, timeout=max(deadline - time.perf_counter(), 1)):
                if future.exception() is not None:
                    problems[f"worker: {future.exception()}"] += 1
                elif future.result():
                    problems[future.result()] += 1
        except TimeoutError:
            for future in futures:
                future.cancel()
            print("  compiling was cut short")
        print(f"  compiled {len(unique)} kernels in {time.perf_counter() - start:.0f} s, {problems.total()} failed")
        for problem, count in problems.most_common(3):
            print(f"    {count} x {problem}")


class Timer:
    """The process that times; a new one takes over where a cut breaks it."""

    def __init__(self) -> None:
        self.outcomes: list[Found] = []
        self._pool = self._new()

    def _new(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def run(self, groups: list[Group], deadline: float) -> None:
        """Time all groups, or as much as time allows."""
        start, before = time.perf_counter(), len(self.outcomes)
        for group in groups:
            left = group.configs
            while left and time.perf_counter() < deadline:
                until = time.time() + deadline - time.perf_counter()
                try:
                    found, lost = self._pool.submit(time_group, replace(group, configs=left), until).result()
                except Exception as error:  # the process died
                    found, lost = [Found(group.shape.name, group.num_rows, left[0], 0.0, f"process: {error}")], True
                self.outcomes += found
                if lost:
                    self._pool.shutdown(wait=False)
                    self._pool = self._new()
                if not found:
                    break
                left = left[len(found) :]
        new = self.outcomes[before:]
        problems = Counter(found.problem for found in new if found.problem)
        print(f"  timed {len(new)} cuts in {time.perf_counter() - start:.0f} s, {problems.total()} failed")
        for problem, count in problems.most_common(5):
            print(f"    {count} x {problem}")

    def cublas(self, shape: Shape, num_rows: int) -> float:
        """As time_cublas, in the process that times."""
        return self._pool.submit(time_cublas, shape, num_rows).result()

    def best(self, shape: Shape, num_rows: int, count: int) -> list[Found]:
        """The fastest cuts so far, without repetition."""
        good = [found for found in self.outcomes if (found.shape, found.num_rows) == (shape.name, num_rows)]
        good = sorted((found for found in good if not found.problem), key=lambda found: found.seconds)
        return list({found.config: found for found in good}.values())[:count]

    def close(self) -> None:
        """End the process and give its memory back."""
        self._pool.shutdown()


def sweep(
    shapes: list[Shape], row_counts: list[int], timer: Timer, compiler: Compiler, limit: int, seconds: float
) -> None:
    """Fill `timer` in three stages, within `seconds`."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    deadline = time.perf_counter() + seconds
    base = 32 if 32 in row_counts else row_counts[-1]
    print("coarse sweep")
    groups = []
    for shape in shapes:
        configs = candidates(shape, base, processors)
        random.Random(0).shuffle(configs)
        groups.append(Group(shape, base, tuple(configs[:limit])))
    run_groups(groups, timer, compiler, deadline - seconds * 0.4)
    print("other row counts")
    groups = []
    for shape in shapes:
        for num_rows in row_counts:
            # What fits 32 rows is refitted to more or fewer.
            again = dict.fromkeys(
                with_memory(found.config, shape, num_rows, found.config.shared_bytes(base, 2, shape.gated) + 4 * KB)
                for found in timer.best(shape, base, 12 if num_rows != base else 0)
            )
            groups.append(Group(shape, num_rows, tuple(c for c in again if sensible(c, shape, num_rows, processors))))
    run_groups(groups, timer, compiler, deadline - seconds * 0.2)
    print("neighbours of the winners")
    groups = []
    for shape in shapes:
        for num_rows in row_counts:
            near = [made for found in timer.best(shape, num_rows, 1) for made in neighbours(found.config)]
            groups.append(Group(shape, num_rows, tuple(near)))
    run_groups(groups, timer, compiler, deadline)


def run_groups(groups: list[Group], timer: Timer, compiler: Compiler, deadline: float) -> None:
    """Compile, then time; a third of the time may go into compiling."""
    now = time.perf_counter()
    tasks = [(group.shape, group.num_rows, config, False) for group in groups for config in group.configs]
    compiler.compile(tasks, now + (deadline - now) * 0.6)
    timer.run(groups, deadline)
