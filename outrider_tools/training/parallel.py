"""Several processes that train one drafter, one a GPU. Each has a copy of the weights; gradients are averaged."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from outrider.errors import ConfigError, OutriderError, exit_text

# How long a rank waits for the others: making text ends at different times. A dead rank ends all of them at once.
MAX_WAIT = timedelta(hours=6)


class RankGroup:
    """The processes of a training, as one of them sees them; by default there is only one.

    Every method but `is_main` must be called by all of them, in the same order.

    Attributes:
        rank: number of this process, from 0.
        count: number of processes.
    """

    def __init__(self, rank: int = 0, count: int = 1, device: torch.device | None = None) -> None:
        self.rank = rank
        self.count = count
        self._device = device or torch.device("cpu")
        self._buffer: Tensor | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process reports for all."""
        return self.rank == 0

    def ceil_share(self, number: int) -> int:
        """Return this rank's part of a count, rounded up."""
        return -(-number // self.count)

    def barrier(self) -> None:
        """Wait until all are here. A broadcast would not do: with NCCL its source does not wait for the receivers."""
        self.all_reduce_mean(torch.zeros(1))

    def broadcast_int(self, number: int) -> int:
        """Return the first rank's number."""
        if self.count == 1:
            return number
        value = torch.tensor([number], dtype=torch.int64, device=self._device)
        distributed.broadcast(value, 0)
        return int(value.item())

    def all_reduce_mean(self, values: Tensor) -> Tensor:
        """Return the mean of the ranks' values, float32 of any shape, on any device."""
        if self.count == 1:
            return values
        total = values.to(self._device, copy=True).contiguous()
        distributed.all_reduce(total)
        return (total / self.count).to(values.device)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors on the training's device with the first rank's."""
        if self.count > 1:
            for tensor in tensors:
                distributed.broadcast(tensor.detach(), 0)

    def average_gradients(self, parameters: Iterable[Tensor], weight: float) -> None:
        """Replace float32 gradients by their weighted mean over the ranks; `weight` is this rank's."""
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

    def close(self) -> None:
        """End the group. The first rank may go on alone for long."""
        if self.count > 1:
            self.barrier()
            distributed.destroy_process_group()
        self.count = 1


def run_ranks(count: int, device_type: str, function: str, *arguments: Any) -> None:
    """Run `function`, "module:name", with (`arguments`..., device, ranks) in `count` new processes, and wait for them.

    Rank r gets GPU r. An exception in one process ends all of them; none is left when this returns.

    Raises ConfigError with the message of a rank's OutriderError, or one that says which rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-train-") as folder:
        context = spawn(_rank, (count, device_type, folder, function, arguments), count, join=False)
        try:
            while not context.join():
                pass
        except ProcessExitedException as error:
            # A process that ends takes its peers with it: what they report then, or are aborted for, is not the cause.
            consequences = (-signal.SIGTERM, -signal.SIGABRT)
            for rank, process in enumerate(context.processes):
                if (process.exitcode or 0) < 0 and process.exitcode not in consequences:
                    raise ConfigError(f"process {rank} of {count} was ended by {exit_text(process.exitcode)}") from None
            failures = sorted(Path(folder).glob("failed-*"), key=lambda file: file.stat().st_mtime_ns)
            message = f"process {error.error_index} of {count} was ended by {error.signal_name}"
            raise ConfigError(failures[0].read_text("utf-8") if failures else message) from None
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def _rank(rank: int, count: int, device_type: str, folder: str, function: str, arguments: tuple[Any, ...]) -> None:
    """Run a rank's process. Exit handlers are skipped: they would wait for other ranks, or abort in a gloo thread."""
    # SIGINT, which the kernel sends when the parent dies, ends this process at once, whatever it waits for.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=count,
            timeout=MAX_WAIT,
            device_id=device if device.type == "cuda" else None,
        )
        ranks = RankGroup(rank, count, device)
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(*arguments, device, ranks)
        ranks.close()
        code = 0
    except Exception as error:
        text = str(error) if isinstance(error, OutriderError) else f"process {rank} of {count} failed: {error!r}"
        if not isinstance(error, OutriderError):
            traceback.print_exc()
        Path(folder, f"failed-{rank}").write_text(text, "utf-8")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
