"""Memory that the ranks of a tensor-parallel model share on one host, for messages of rank 0 and for exchanges.

It is one piece of anonymous memory, whose descriptor followers inherit. It needs no locks and no system calls: each
number has one writer, and a waiting rank polls until it changes. Data written before a number must be visible before
the number is: x86-64 orders writes so; other processors need fences, which Python does not have. Torch-free.

    numbers     for each rank: exchanges entered, bytes of messages read; and one for all: bytes of messages written
    words       for each rank: why it cannot go on
    messages    a ring of bytes that rank 0 writes, and that every other rank reads completely
    boxes       two for each rank, used in turn: a rank that reuses a box knows that all others have read it, since
                they have entered the exchange after that
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError, InternalError

TIMEOUT_SECONDS = 10.0
"""Default for the longest wait for a rank."""
START_SECONDS = 1800.0
"""Longest wait for a rank during the start, when ranks read weights and compile kernels."""
BOX_BYTES = 1 << 20
RING_BYTES = 1 << 22
_LINE = 8
"""Numbers of 8 bytes in a cache line. Each rank's numbers have a line of their own."""
_WORDS_BYTES = 1024
_ENTERED, _READ = range(2)
_HEADER = struct.Struct("<ii")
_SPIN_LOOKS = 200
_YIELD_SECONDS = 0.002
_NAP_SECONDS = 0.0002
_CALM_SECONDS = 1.0
"""A follower that has waited this long for a message polls less often."""
_CALM_NAP_SECONDS = 0.002
_ORDERED_MACHINES = ("x86_64", "AMD64")
"""Machines whose writes become visible to all processors in program order."""


class RankError(InternalError):
    """A rank died, hangs, or recorded that it cannot go on."""


class RankMemory:
    """One rank's view of the memory. All ranks must call `swap` and `trade` equally often and in the same order."""

    def __init__(self, descriptor: int, rank: int, world: int, seconds: float = TIMEOUT_SECONDS) -> None:
        """`seconds`: longest wait for other ranks, once all have started (see `started`)."""
        self.rank, self.world, self.descriptor = rank, world, descriptor
        self.check: Callable[[], None] = lambda: None
        """Called now and then while waiting; may raise."""
        self.fault = ""
        """Why the ranks cannot go on, once that is known."""
        self._seconds = seconds
        self._limit = START_SECONDS
        self._map = mmap.mmap(descriptor, _size(world))
        control = 8 * _LINE * (world + 1)
        self._numbers: NDArray[np.int64] = np.frombuffer(self._map, np.int64, _LINE * (world + 1)).reshape(-1, _LINE)
        self._words = control
        self._ring: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, RING_BYTES, control + world * _WORDS_BYTES)
        boxes = np.frombuffer(self._map, np.uint8, offset=control + world * _WORDS_BYTES + RING_BYTES)
        self._boxes: NDArray[np.uint8] = boxes.reshape(2, world, BOX_BYTES)
        self._num_entered = 0
        self._at = 0
        """Bytes of messages that this rank has written (rank 0) or read (the others)."""

    @classmethod
    def create(cls, world: int, seconds: float = TIMEOUT_SECONDS) -> RankMemory:
        """Create memory for `world` ranks; return rank 0's view. Raises ConfigError if the system does not allow it."""
        if sys.platform != "linux":
            raise ConfigError("--tensor-parallel-size: ranks share memory in a way that only Linux has; leave it at 1")
        if (machine := platform.machine()) not in _ORDERED_MACHINES:
            raise ConfigError(
                f"--tensor-parallel-size: ranks rely on the order of x86-64's writes to memory, and this is {machine}; "
                "leave it at 1"
            )
        descriptor = os.memfd_create("outrider-ranks")
        os.ftruncate(descriptor, _size(world))
        return cls(descriptor, 0, world, seconds)

    def started(self) -> None:
        """Limit waits from now on to the `seconds` of the constructor, instead of START_SECONDS."""
        self._limit = self._seconds

    def send(self, kind: int, body: bytes | bytearray | memoryview = b"") -> None:
        """Send a message to all other ranks; wait while the ring is full. Raises RankError."""
        view = memoryview(_HEADER.pack(kind, len(body)) + bytes(body)).cast("B")
        while len(view):
            space = RING_BYTES - (self._at - self._slowest())
            if not space:
                full = self._at - RING_BYTES
                self._wait(lambda full=full: self._slowest() > full, self._latest_reader)  # type: ignore[misc]
                continue
            start = self._at % RING_BYTES
            count = min(len(view), space, RING_BYTES - start)
            self._ring[start : start + count] = np.frombuffer(view[:count], np.uint8)
            self._at += count
            self._numbers[self.world, 0] = self._at
            view = view[count:]

    def receive(self) -> tuple[int, bytes]:
        """Return kind and body of rank 0's next message, which may begin at any time. Raises RankError."""
        kind, length = _HEADER.unpack(self._read(_HEADER.size, is_begin=True))
        return kind, self._read(length)

    def swap(self, part: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Exchange `part` [n], n equal on all ranks and at most BOX_BYTES; return the parts of all ranks [world, n].

        The returned array is overwritten in the exchange after the next one. Raises RankError.
        """
        size, number = len(part), self._num_entered + 1
        boxes: NDArray[np.uint8] = self._boxes[number % 2]
        boxes[self.rank, :size] = part
        self._num_entered = number
        entered = self._numbers[: self.world, _ENTERED]
        entered[self.rank] = number
        if entered.min() < number:
            self._wait(lambda: bool(entered.min() >= number), lambda: int(entered.argmin()))
        found: NDArray[np.uint8] = boxes[:, :size]
        return found

    def trade(self, data: bytes) -> list[bytes]:
        """Exchange bytes of any length; return those of all ranks, in order. Raises RankError."""
        lengths = self.swap(np.frombuffer(struct.pack("<q", len(data)), np.uint8)).copy().view(np.int64)[:, 0].tolist()
        found = [bytearray() for _ in lengths]
        for first in range(0, max(lengths), BOX_BYTES):
            piece = np.zeros(min(BOX_BYTES, max(lengths) - first), np.uint8)
            own = np.frombuffer(data[first : first + BOX_BYTES], np.uint8)
            piece[: len(own)] = own
            for whole, part in zip(found, self.swap(piece), strict=True):
                whole += part.tobytes()
        return [bytes(whole[:length]) for whole, length in zip(found, lengths, strict=True)]

    def is_behind(self, rank: int) -> bool:
        """Whether a rank has not read all messages of this one, which is rank 0."""
        return bool(self._numbers[rank, _READ] < self._at)

    def num_read(self, rank: int) -> int:
        """Return the bytes of messages that a rank has read."""
        return int(self._numbers[rank, _READ])

    def record_failure(self, words: str) -> None:
        """Record why this rank cannot go on."""
        data = words.encode()[: _WORDS_BYTES - 1]
        start = self._words + self.rank * _WORDS_BYTES
        self._map[start : start + _WORDS_BYTES] = data.ljust(_WORDS_BYTES, b"\0")

    def failure_of(self, rank: int) -> str:
        """Return why a rank cannot go on, as it has recorded; empty if it has recorded nothing."""
        start = self._words + rank * _WORDS_BYTES
        return self._map[start : start + _WORDS_BYTES].rstrip(b"\0").decode(errors="replace")

    def _slowest(self) -> int:
        return int(self._numbers[1 : self.world, _READ].min())

    def _latest_reader(self) -> int:
        return 1 + int(self._numbers[1 : self.world, _READ].argmin())

    def _read(self, count: int, is_begin: bool = False) -> bytes:
        found = bytearray()
        written = self._numbers[self.world]
        while len(found) < count:
            if written[0] == self._at:
                self._wait(lambda: bool(written[0] > self._at), lambda: 0, is_patient=is_begin)
            start = self._at % RING_BYTES
            length = min(count - len(found), int(written[0]) - self._at, RING_BYTES - start)
            found += self._ring[start : start + length].tobytes()
            self._at += length
            self._numbers[self.rank, _READ] = self._at
        return bytes(found)

    def _wait(self, is_there: Callable[[], bool], culprit: Callable[[], int], is_patient: bool = False) -> None:
        """Poll until `is_there`. Raises RankError, naming the `culprit`, after the limit unless `is_patient`."""
        for _ in range(_SPIN_LOOKS):
            if is_there():
                return
        begin = time.monotonic()
        while not is_there():
            waited = time.monotonic() - begin
            if waited < _YIELD_SECONDS:
                os.sched_yield()
                continue
            self.check()
            if waited > self._limit and not is_patient:
                raise RankError(f"rank {culprit()} of {self.world} did not answer within {self._limit:g} s")
            time.sleep(_CALM_NAP_SECONDS if waited > _CALM_SECONDS else _NAP_SECONDS)


def _size(world: int) -> int:
    return 8 * _LINE * (world + 1) + world * _WORDS_BYTES + RING_BYTES + 2 * world * BOX_BYTES
