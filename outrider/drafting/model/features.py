"""Features of the target on their way to a draft model: read from mapped memory or messages, and kept until used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec.structs import replace

from outrider.host.line import host_id
from outrider.logs import get_logger
from outrider.protocol.speculation import MAGIC_BYTES, FeatureRing, Features

_logger = get_logger(__name__)

MAX_RING_BYTES = 1 << 30
_MAX_HANDLE_BYTES = 256


class MappedMemory(Protocol):
    """Memory of another process. The caller must stay within the mapped size."""

    def read(self, offset: int, num_bytes: int) -> object:
        """Return a copy, as bytes or as a tensor of bytes on the drafter's device; complete when this returns."""

    def peek(self, offset: int, num_bytes: int) -> bytes:
        """Return a copy on the host."""

    def close(self) -> None:
        """Unmap the memory."""


MemoryMapper = Callable[[bytes, int], MappedMemory]
"""Maps memory of another process, given a handle and a size in bytes. Raises OSError, RuntimeError or ValueError."""


class RingReader:
    """The ring of one features stream. The engine's thread reads and closes the ring."""

    def __init__(self, memory: MappedMemory, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.broken = False
        """Whether reading has failed, so that the ring's stream is of no use any more."""
        self._memory: MappedMemory | None = memory

    def read(self, offset: int, num_bytes: int) -> object:
        """Return a copy of bytes in the ring. Raises ValueError for bytes outside, and the memory's errors."""
        if self._memory is None or offset < 0 or num_bytes < 1 or offset + num_bytes > self.num_bytes:
            raise ValueError(f"{num_bytes} bytes at {offset} do not lie in a ring of {self.num_bytes} that is mapped")
        try:
            return self._memory.read(offset, num_bytes)
        except Exception:
            self.broken = True
            raise

    def close(self) -> None:
        """Unmap the ring; it cannot be read any more."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


def map_ring(ring: FeatureRing, mapper: MemoryMapper) -> RingReader | None:
    """Map a ring that verify offers. If that is not possible return None, and features travel in messages.

    Both ends of the ring are read, to check that it is the offered ring and not shorter than verify says.
    """
    here = host_id()
    if not here or ring.host != here:
        return None
    sizes = 2 * MAGIC_BYTES < ring.num_bytes <= MAX_RING_BYTES and 0 < len(ring.handle) <= _MAX_HANDLE_BYTES
    if not sizes or len(ring.magic) != MAGIC_BYTES:
        _logger.warning("verify offers an invalid ring of %d bytes; it is not used", ring.num_bytes)
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


Read = Callable[[int, int], object]
"""Reads a ring: takes offset and size, returns a copy as bytes or as a tensor of bytes."""


@dataclass(slots=True)
class JoinedRows:
    """Rows of several pieces, one behind the other."""

    rows: object
    """The rows of all pieces, in the form of `Features.rows`."""
    count: int
    """Number of positions."""
    projected: Any = None
    """The model's projection of the rows, once it is made."""


@dataclass(frozen=True, slots=True)
class PartOfRows:
    """Stands in place of `Features.rows`: some positions of rows that pieces share."""

    joined: JoinedRows
    start: int
    """Index of the first position in `joined`."""


def with_rows(pieces: Sequence[Features], row_bytes: int, read: Read | None) -> list[Features]:
    """Return the pieces of a message with their rows; consecutive rows are read, and later projected, together.

    `row_bytes`: bytes of one position. `read`: reads the ring, None if none is mapped; its errors are raised.
    """
    filled: list[Features] = []
    for run in _runs(pieces, row_bytes):
        first, count = run[0], sum(piece.count for piece in run)
        if first.ring_offset is None:
            if len(run) == 1:  # its bytes are in the message
                filled += run
                continue
            rows: object = b"".join(piece.data for piece in run)
        elif read is None:
            raise ValueError("features in a ring that is not mapped")
        else:
            rows = read(first.ring_offset, count * row_bytes)
        if len(run) == 1:
            filled.append(replace(first, rows=rows))
            continue
        joined, start = JoinedRows(rows, count), 0
        for piece in run:
            filled.append(replace(piece, rows=PartOfRows(joined, start)))
            start += piece.count
    return filled


def _runs(pieces: Sequence[Features], row_bytes: int) -> list[list[Features]]:
    """Return groups of pieces that follow each other in the ring, or whose bytes are in the message."""
    runs: list[list[Features]] = []
    end: int | None = None  # in the ring
    for piece in pieces:
        if not runs or piece.ring_offset != end:
            runs.append([])
        runs[-1].append(piece)
        end = None if piece.ring_offset is None else piece.ring_offset + piece.count * row_bytes
    return runs


Join = Callable[[Sequence[Any]], Any]
"""Joins consecutive parts [N, feature_size] into one; see BurstRunner.join."""

_SMALL = 16
"""A part with fewer rows is small; this many consecutive small parts are joined."""


class PendingFeatures:
    """Features of a request that came and were not used yet: parts [N, feature_size] in order, without overlap.

    A part may be a view of rows that came for many requests at once. Joining many small parts frees the other rows.
    """

    def __init__(self, join: Join) -> None:
        self._join = join
        self._parts: list[tuple[int, int, Any]] = []  # start, end, values
        self._unbroken_end = 0
        """One past the last position of the unbroken run that begins with the first part, if there is one. Kept because
        a long prompt has thousands of parts."""

    def add(self, start: int, values: Any, since: int) -> None:
        """Keep features of positions `start`, ...; drop those before `since`, and replace those that are held."""
        end, skipped = start + len(values), max(since - start, 0)
        start, values = start + skipped, values[skipped:]
        if start >= end:
            return
        if self._parts and self._parts[-1][1] > start:
            before = [(first, min(past, start), held[: start - first]) for first, past, held in self._parts]
            behind = [(max(first, end), past, held[max(end - first, 0) :]) for first, past, held in self._parts]
            parts = [*before, (start, end, values), *behind]
            self._parts = [part for part in parts if part[0] < part[1]]
            self._unbroken_end = self._walk(self._parts[0][0])
            return
        if not self._parts or start == self._unbroken_end:
            self._unbroken_end = end
        self._parts.append((start, end, values))
        self._join_small()

    def end_from(self, start: int) -> int:
        """Return the end of the unbroken run of features from position `start` on; `start` if there is none."""
        if self._parts and self._parts[0][0] <= start < self._unbroken_end:
            return self._unbroken_end
        return self._walk(start)

    def _walk(self, start: int) -> int:
        end = start
        for first, past, _ in self._parts:
            if first <= end < past:
                end = past
        return end

    def cut(self, start: int, end: int) -> Iterator[tuple[int, Any]]:
        """Yield first position and values of the parts that cover `start` to before `end`."""
        for first, past, values in self._parts:
            if first >= end:
                return
            low, high = max(first, start), min(past, end)
            if low < high:
                yield low, values[low - first : high - first]

    def forget(self, position: int) -> None:
        """Drop parts that lie before a position."""
        while self._parts and self._parts[0][1] <= position:
            del self._parts[0]
        if self._parts and self._parts[0][0] >= self._unbroken_end:
            self._unbroken_end = self._walk(self._parts[0][0])

    def _join_small(self) -> None:
        """Join the last parts if they are many, small and consecutive."""
        first = len(self._parts)
        begin = self._parts[-1][1]
        while first and self._parts[first - 1][1] == begin and begin - self._parts[first - 1][0] < _SMALL:
            first -= 1
            begin = self._parts[first][0]
        small = self._parts[first:]
        if len(small) >= _SMALL:
            self._parts[first:] = [(begin, small[-1][1], self._join([values for _, _, values in small]))]
