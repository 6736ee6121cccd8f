"""Memory that two ends share without a GPU: a mapped file, whose path is its handle."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch


class SharedFile:
    """Verify's end of it."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        path.write_bytes(bytes(num_bytes))
        self.handle = str(path).encode()
        with path.open("r+b") as file:
            self.rows = torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)


class SharedFiles:
    """Makes them, and may be told to fail."""

    def __init__(self, folder: Path) -> None:
        self.made: list[SharedFile] = []
        self.fails = False
        self._folder = folder

    def __call__(self, num_bytes: int, device: torch.device) -> SharedFile:
        if self.fails:
            raise RuntimeError("no memory can be shared")
        self.made.append(SharedFile(self._folder / f"ring{len(self.made)}", num_bytes))
        return self.made[-1]


class MappedFile:
    """The draft's end of it."""

    def __init__(self, handle: bytes, num_bytes: int) -> None:
        """Raises OSError where there is no such file."""
        self.closed = False
        self.fails = False
        with Path(handle.decode()).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, offset: int, num_bytes: int) -> bytes:
        if self.fails or offset + num_bytes > len(self._map):
            raise RuntimeError("cannot be read")
        return self._map[offset : offset + num_bytes]

    def peek(self, offset: int, num_bytes: int) -> bytes:
        return self.read(offset, num_bytes)

    def close(self) -> None:
        self.closed = True
        self._map.close()
