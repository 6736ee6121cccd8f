"""Another process: one that reads a ring, as a draft does, or one that offers some, as verify does."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from outrider.cuda_ipc import ExportedMemory, ImportedMemory
from outrider.drafting.model.features import map_ring
from outrider.protocol.speculation import FeatureRing
from verify_service.features.staging import RingPool

_SPAWN = multiprocessing.get_context("spawn")


class Reader:
    """The draft's end, in a process of its own on one device."""

    def __init__(self, device: str) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self.process: BaseProcess = _SPAWN.Process(target=_read, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()

    def map(self, ring: FeatureRing) -> bool:
        """Whether it can."""
        self._pipe.send(("map", ring))
        return bool(self._pipe.recv())

    def read(self, offset: int, num_bytes: int) -> bytes:
        """What it finds there; raises RuntimeError where it finds nothing."""
        self._pipe.send(("read", offset, num_bytes))
        found = self._pipe.recv()
        if not isinstance(found, bytes):
            raise RuntimeError(str(found))
        return found

    def unmap(self) -> None:
        """Close what it has mapped."""
        self._pipe.send(("unmap",))
        assert self._pipe.recv() == "done"

    def kill(self) -> None:
        """End it without a chance to clean up."""
        self.process.kill()
        self.process.join(30)
        self._pipe.close()


def _read(pipe: Connection, device: str) -> None:
    def map_memory(handle: bytes, num_bytes: int) -> ImportedMemory:
        return ImportedMemory(handle, num_bytes, torch.device(device))

    ring = None
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        if question[0] == "map":
            ring = map_ring(question[1], map_memory)
            pipe.send(ring is not None)
        elif question[0] == "read" and ring is not None:
            try:
                found = ring.read(question[1], question[2])
                assert isinstance(found, torch.Tensor) and found.device == torch.device(device)
                pipe.send(found.cpu().numpy().tobytes())
            except Exception as error:
                pipe.send(error)
        elif ring is not None:
            ring.close()
            pipe.send("done")


class Offerer:
    """Verify's end, in a process of its own on cuda:0; all bytes of its first slot are 7."""

    def __init__(self) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self.process: BaseProcess = _SPAWN.Process(target=_offer, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.ring: FeatureRing
        self.offset: int
        self.ring, self.offset = self._pipe.recv()

    def kill(self) -> None:
        """End it without a chance to clean up."""
        self.process.kill()
        self.process.join(30)
        self._pipe.close()


def _offer(pipe: Connection) -> None:
    ring = RingPool(torch.device("cuda:0"), ExportedMemory).lend()
    assert ring is not None
    offset = ring.take()
    assert offset is not None
    ring.rows(offset, 4096).fill_(7)
    torch.cuda.synchronize()
    pipe.send((ring.description, offset))
    pipe.recv()
