"""Device memory that processes of one host share through the driver's IPC handles.

The driver is called directly. torch can only share memory of its own allocator, by a protocol in which the receiver
tells the sender what it no longer needs. The processes here already have a protocol.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
"""The memory may be another device's; access to it is enabled when it is mapped."""


class DriverError(RuntimeError):
    """A call to the CUDA driver failed, or there is no driver."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class ExportedMemory:
    """Device memory that other processes may map by `handle`. It is never freed while this process lives.

    Freeing memory that another process has mapped is undefined behaviour.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises DriverError if the memory cannot be allocated or exported."""
        pointer, handle = ctypes.c_uint64(), _Handle()
        with _context(device):
            _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
            try:
                _call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
            except DriverError:
                _call("cuMemFree_v2", pointer)
                raise
        self.handle = bytes(handle.reserved)
        data = (int(pointer.value), False)
        described = {"shape": (num_bytes,), "typestr": "|u1", "data": data, "strides": None, "version": 2}
        view = SimpleNamespace(__cuda_array_interface__=described)
        self.rows: Tensor = torch.as_tensor(view, device=torch.device("cuda", _index(device)))
        """uint8 [num_bytes]."""


class ImportedMemory:
    """Device memory of another process, mapped for `device`; it stays readable if that process ends."""

    def __init__(self, handle: bytes, num_bytes: int, device: torch.device) -> None:
        """Raises ValueError if `handle` has a wrong length, DriverError if the driver cannot map it."""
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"{len(handle)} bytes are no handle of device memory")
        given = _Handle((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
        pointer = ctypes.c_uint64()
        self._device = torch.device("cuda", _index(device))
        self._num_bytes = num_bytes
        with _context(self._device):
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self._pointer: int | None = int(pointer.value)
        self._lock = threading.Lock()
        # Streams of the same priority may share a device queue, where the copy would wait for earlier work.
        self._stream = torch.cuda.Stream(self._device, priority=-1)

    @property
    def address(self) -> int:
        """The memory's address on the device. Raises ValueError once it is unmapped."""
        if self._pointer is None:
            raise ValueError("the memory is not mapped any more")
        return self._pointer

    def read(self, offset: int, num_bytes: int) -> Tensor:
        """Return a copy, uint8 [num_bytes], on the device; it is complete and has not waited for other streams.

        Raises ValueError for a range outside the memory or once it is unmapped, DriverError if the copy fails.
        """
        with self._lock, torch.cuda.device(self._device):
            if self._pointer is None or offset < 0 or num_bytes < 1 or offset + num_bytes > self._num_bytes:
                raise ValueError(f"{num_bytes} bytes at {offset} of {self._num_bytes} that are mapped")
            # Allocated on this stream, so that the allocator does not give it memory that other streams still use.
            with torch.cuda.stream(self._stream):
                copy = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            with _context(self._device):
                _call(
                    "cuMemcpyAsync",
                    ctypes.c_uint64(copy.data_ptr()),
                    ctypes.c_uint64(self._pointer + offset),
                    ctypes.c_size_t(num_bytes),
                    ctypes.c_void_p(self._stream.cuda_stream),
                )
            self._stream.synchronize()
            copy.record_stream(torch.cuda.current_stream())
            return copy

    def peek(self, offset: int, num_bytes: int) -> bytes:
        """Return the same bytes as `read`, on the host."""
        return self.read(offset, num_bytes).cpu().numpy().tobytes()

    def close(self) -> None:
        """Unmap the memory."""
        with self._lock:
            pointer, self._pointer = self._pointer, None
            if pointer is not None:
                with _context(self._device):
                    _call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver is not there: {error}") from error


@cache
def _primary_context(index: int) -> ctypes.c_void_p:
    """Return the context that torch works in. It is retained and never released."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", ctypes.c_uint(0))
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


@contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Make the device's context current in the calling thread within the block."""
    _call("cuCtxPushCurrent_v2", _primary_context(_index(device)))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def _call(name: str, *arguments: object) -> None:
    """Call a driver function. Raises DriverError with the driver's own message."""
    driver = _driver()
    function = getattr(driver, name, None)
    if function is None:
        raise DriverError(f"the CUDA driver has no {name}")
    code = function(*arguments)
    if code:
        words = ctypes.c_char_p()
        driver.cuGetErrorString(ctypes.c_int(code), ctypes.byref(words))
        reason = words.value.decode() if words.value else "an unknown error"
        raise DriverError(f"{name} failed with {code}: {reason}")
