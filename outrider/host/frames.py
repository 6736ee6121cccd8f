"""Frames between a door and its engine process: how they are packed, and those of every engine's start and end.

A frame is four bytes of length, little-endian, and one message of msgpack; arrays travel as the bytes of their numbers.
Both ends are the same release on the same machine, so nothing here has a version. Torch-free.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from outrider.errors import InternalError

MAX_FRAME_BYTES = 1 << 30
"""A longer frame is no frame: one end has lost its place."""

Number = TypeVar("Number", bound=np.generic)
OptionsT = TypeVar("OptionsT")
ServedT = TypeVar("ServedT")

_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, Generic[OptionsT], frozen=True, array_like=True, tag=1):
    """door -> engine, first: load what the options name and serve it."""

    options: OptionsT


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """door -> engine: end after what is in progress."""


class Ready(msgspec.Struct, Generic[ServedT], frozen=True, array_like=True, tag=1):
    """engine -> door, first: all is loaded and warm."""

    served: ServedT


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """engine -> door, instead of Ready: the options, the model or the machine do not allow a start."""

    message: str


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} does not travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def pack(frame: msgspec.Struct) -> bytearray:
    """The frame as bytes, length first.

    Raises TypeError for what does not travel, InternalError for a frame that the other end would not take.
    """
    data = bytearray(_LENGTH.size)
    _encoder.encode_into(frame, data, _LENGTH.size)
    if len(data) - _LENGTH.size > MAX_FRAME_BYTES:
        raise InternalError(f"a frame of {len(data) - _LENGTH.size} bytes is too long to send")
    _LENGTH.pack_into(data, 0, len(data) - _LENGTH.size)
    return data


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """`max_bytes`: longest frame."""
        self._data = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The bodies of the frames that are complete now. Raises InternalError for an absurd length."""
        if self._data:
            self._data += data
            bodies, used = self._cut(memoryview(self._data))
            del self._data[:used]
            return bodies
        # Nearly always: whole frames, each of which is copied once.
        bodies, used = self._cut(memoryview(data))
        self._data += data[used:]
        return bodies

    def _cut(self, data: memoryview) -> tuple[list[bytes], int]:
        """The bodies that are complete, and how many bytes they take with their lengths."""
        bodies, start = [], 0
        with data:
            while len(data) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(data, start)
                if length > self._max_bytes:
                    raise InternalError(f"a frame of {length} bytes; the stream is broken")
                end = start + _LENGTH.size + length
                if len(data) < end:
                    break
                bodies.append(bytes(data[start + _LENGTH.size : end]))
                start = end
        return bodies, start


def bytes_of(array: NDArray[Any], dtype: type[np.generic]) -> bytes:
    """The numbers of an array as `dtype`, in the order of the machine."""
    return array.astype(dtype, copy=False).tobytes()


def array_of(data: bytes, dtype: type[Number]) -> NDArray[Number]:
    """Numbers of `dtype`; the array cannot be written to. Raises ValueError for half a number."""
    return np.frombuffer(data, dtype)
