"""Device memory of another process, mapped where a draft model runs."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.cuda_ipc import ImportedMemory
from outrider.drafting.model.feature_ring import MemoryMapper
from outrider.drafting.model.plan import BurstRunner
from outrider.drafting.model.runner import Runner


class CudaMemory:
    """See MappedMemory."""

    def __init__(self, handle: bytes, num_bytes: int, device: torch.device) -> None:
        """Raises DriverError where the driver does not map it."""
        self._memory = ImportedMemory(handle, num_bytes, device)

    def read(self, offset: int, num_bytes: int) -> Tensor:
        """See MappedMemory. Bursts may be under way: the copy waits for none of them."""
        return self._memory.read(offset, num_bytes)

    def peek(self, offset: int, num_bytes: int) -> bytes:
        """See MappedMemory."""
        return self._memory.read(offset, num_bytes).cpu().numpy().tobytes()

    def close(self) -> None:
        """See MappedMemory."""
        self._memory.close()


def cuda_mapper(runner: BurstRunner) -> MemoryMapper | None:
    """Maps device memory for a runner on a GPU; None for any other."""
    device = runner.memory.kv.k.device if isinstance(runner, Runner) else None
    if device is None or device.type != "cuda":
        return None
    where = device

    def map_memory(handle: bytes, num_bytes: int) -> CudaMemory:
        return CudaMemory(handle, num_bytes, where)

    return map_memory
