"""Features that lie in memory of verify's, which a draft on the same host maps."""

from __future__ import annotations

from typing import Protocol

from outrider.host.machine import host_id
from outrider.logs import get_logger
from outrider.protocol.messages import MAGIC_BYTES, FeatureRing

_logger = get_logger(__name__)

MAX_RING_BYTES = 1 << 30
_MAX_HANDLE_BYTES = 256


class MappedMemory(Protocol):
    """Memory of another process. Who reads stays within the size that it was mapped for."""

    def read(self, offset: int, num_bytes: int) -> object:
        """A copy, as bytes or as a tensor of bytes where the drafter works, complete when this returns."""

    def peek(self, offset: int, num_bytes: int) -> bytes:
        """A copy on the host."""

    def close(self) -> None:
        """Unmap it."""


class MemoryMapper(Protocol):
    """Maps memory of other processes."""

    def __call__(self, handle: bytes, num_bytes: int) -> MappedMemory:
        """Raises OSError, RuntimeError or ValueError where it cannot be mapped."""


class RingReader:
    """The ring of one features stream. The engine's thread reads and closes it."""

    def __init__(self, memory: MappedMemory, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.broken = False
        """Whether reading has failed; the stream that it belongs to is of no use any more."""
        self._memory: MappedMemory | None = memory

    def read(self, offset: int, num_bytes: int) -> object:
        """A copy of bytes in the ring. Raises ValueError for what lies outside, and what the memory raises."""
        if self._memory is None or offset < 0 or num_bytes < 1 or offset + num_bytes > self.num_bytes:
            raise ValueError(f"{num_bytes} bytes at {offset} do not lie in a ring of {self.num_bytes} that is mapped")
        try:
            return self._memory.read(offset, num_bytes)
        except Exception:
            self.broken = True
            raise

    def close(self) -> None:
        """Unmap it; nothing is read any more."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


def map_ring(ring: FeatureRing, mapper: MemoryMapper) -> RingReader | None:
    """Map a ring that verify offers; None, and features travel in messages, where that is not possible.

    Both ends of it are read, to see that it is that ring and not shorter than verify says.
    """
    here = host_id()
    if not here or ring.host != here:
        return None
    sizes = 2 * MAGIC_BYTES < ring.num_bytes <= MAX_RING_BYTES and 0 < len(ring.handle) <= _MAX_HANDLE_BYTES
    if not sizes or len(ring.magic) != MAGIC_BYTES:
        _logger.warning("verify offers a ring of %d bytes that makes no sense; it is not used", ring.num_bytes)
        return None
    try:
        memory = mapper(ring.handle, ring.num_bytes)
    except (OSError, RuntimeError, ValueError) as error:
        _logger.info("features travel in messages: verify's memory cannot be mapped: %s", error)
        return None
    try:
        ends = [memory.peek(place, MAGIC_BYTES) for place in (0, ring.num_bytes - MAGIC_BYTES)]
    except (OSError, RuntimeError, ValueError) as error:
        _logger.warning("features travel in messages: verify's memory cannot be read: %s", error)
        ends = []
    if ends != [ring.magic] * 2:
        memory.close()
        return None
    _logger.info("features are read from verify's memory")
    return RingReader(memory, ring.num_bytes)
