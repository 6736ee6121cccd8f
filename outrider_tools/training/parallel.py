"""Several processes that train one drafter, one a GPU. Each has a copy of the weights; gradients are averaged."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from outrider.errors import ConfigError, OutriderError

# A rank waits this long for the others, since the making of text ends at different times. A dead one ends all at once.
PATIENCE = timedelta(hours=6)
# After the first failure, seconds until the other processes are killed.
GRACE_SECONDS = 5.0


class Peers:
    """The processes of a training, as one of them sees them; by default it is alone.

    Every method but `first` must be called by all of them, in the same order.

    Attributes:
        rank: from 0 on.
        count: of processes.
    """

    def __init__(self, rank: int = 0, count: int = 1, device: torch.device | None = None) -> None:
        self.rank = rank
        self.count = count
        self._device = device or torch.device("cpu")
        self._buffer: Tensor | None = None

    @property
    def first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def share(self, number: int) -> int:
        """This rank's part of a count, rounded up."""
        return -(-number // self.count)

    def wait(self) -> None:
        """Until all are here. A broadcast would not do: with NCCL its source does not wait for who receives."""
        self.mean(torch.zeros(1))

    def same(self, number: int) -> int:
        """The first rank's number."""
        if self.count == 1:
            return number
        told = torch.tensor([number], dtype=torch.int64, device=self._device)
        distributed.broadcast(told, 0)
        return int(told.item())

    def mean(self, values: Tensor) -> Tensor:
        """Mean of the ranks' values, float32 of any shape, on any device."""
        if self.count == 1:
            return values
        total = values.to(self._device, copy=True).contiguous()
        distributed.all_reduce(total)
        return (total / self.count).to(values.device)

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors on the training's device by the first rank's."""
        if self.count > 1:
            for tensor in tensors:
                distributed.broadcast(tensor.detach(), 0)

    def average_gradients(self, parameters: Iterable[Tensor], weight: float) -> None:
        """Replace gradients, float32, by their mean over the ranks, each weighted by its `weight`."""
        if self.count == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        size = sum(gradient.numel() for gradient in gradients)
        if self._buffer is None or self._buffer.numel() != size + 1:
            self._buffer = torch.empty(size + 1, dtype=torch.float32, device=self._device)
        parts = self._buffer[:size].split([gradient.numel() for gradient in gradients])
        views = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
        torch._foreach_copy_(views, gradients)
        self._buffer[:size].mul_(weight)
        self._buffer[size] = weight
        distributed.all_reduce(self._buffer)
        self._buffer[:size].div_(self._buffer[size])
        torch._foreach_copy_(gradients, views)

    def leave(self) -> None:
        """No more is shared: the first rank may go on for long alone."""
        if self.count > 1:
            self.wait()
            distributed.destroy_process_group()
        self.count = 1


def run_ranks(count: int, device_type: str, function: str, *arguments: Any) -> None:
    """Run `function`, "module:name", with (`arguments`..., device, peers) in `count` new processes, and wait for them.

    Rank r gets GPU r. What one process raises ends all of them; none is left when this returns.

    Raises:
        ConfigError: what a rank raised as such, or that it failed.
    """
    context = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="outrider-train-") as folder:
        processes: list[BaseProcess] = [
            context.Process(target=_rank, args=(rank, count, device_type, folder, os.getpid(), function, arguments))
            for rank in range(count)
        ]
        try:
            for process in processes:
                process.start()
            running: dict[object, BaseProcess] = {process.sentinel: process for process in processes}
            while running:
                for sentinel in wait([process.sentinel for process in running.values()]):
                    process = running.pop(sentinel)
                    process.join()
                    if process.exitcode:
                        # Others may be about to fail for the same reason, and the first to have failed says why.
                        wait([process.sentinel for process in running.values()], timeout=0.2)
                        raise ConfigError(_reason(Path(folder), processes))
        finally:
            _end(processes)


def _end(processes: Sequence[BaseProcess]) -> None:
    alive = [process for process in processes if process.pid is not None and process.is_alive()]
    for process in alive:
        process.terminate()
    end = time.monotonic() + GRACE_SECONDS
    for process in alive:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _reason(folder: Path, processes: Sequence[BaseProcess]) -> str:
    """Of the rank that failed first. One that was killed left no word, and others fail for want of it."""
    for rank, process in enumerate(processes):
        if process.exitcode is not None and process.exitcode < 0:
            return f"process {rank} of {len(processes)} was ended by {signal.Signals(-process.exitcode).name}"
    found = [json.loads(path.read_text("utf-8")) for path in folder.glob("failed-*.json")]
    if not found:
        return f"one of {len(processes)} processes ended with an error before it could say why"
    return str(min(found, key=lambda failure: float(failure["when"]))["message"])


def _rank(
    rank: int, count: int, device_type: str, folder: str, parent: int, function: str, arguments: tuple[Any, ...]
) -> None:
    """What a process runs."""
    _end_with(parent)
    # Ctrl-C reaches every process of the terminal; the parent ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=count,
            timeout=PATIENCE,
            device_id=device if device.type == "cuda" else None,
        )
        peers = Peers(rank, count, device)
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(*arguments, device, peers)
        peers.leave()
        # Without exit handlers: gloo's threads, which are still there, have aborted a process that was done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except BaseException as error:
        text = str(error) if isinstance(error, OutriderError) else f"process {rank} of {count} failed: {error!r}"
        if not isinstance(error, OutriderError):
            traceback.print_exc()
        record = json.dumps({"when": time.time(), "message": text})
        part = Path(folder, f"part-{rank}")
        part.write_text(record, "utf-8")
        part.rename(Path(folder, f"failed-{rank}.json"))
        # Not by way of exit handlers, which would wait for peers.
        os._exit(1)


def _end_with(parent: int) -> None:
    """Have the kernel end this process when its parent dies, however that comes about (Linux)."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(1)
