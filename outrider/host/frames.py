"""Frames between a door and its engine process: how they are packed, and those of both services.

A frame is four bytes of length, little-endian, and one message of msgpack. Structs travel as they are, numpy's arrays
and errors as extensions.
Both ends are the same release on the same machine, so nothing here has a version. Torch-free.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from outrider import errors
from outrider.errors import InternalError, OutriderError
from outrider.protocol.speculation import Features, VerifyMessage

MAX_FRAME_BYTES = 1 << 30
"""A longer frame is no frame: one end has lost its place."""

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


class SessionDown(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """door -> engine: a session of a verify and a draft service is over; everything of it is to be freed."""

    session: int


class SessionLost(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """engine -> door: end this session, whose other side has hung up, is silent, or makes no sense."""

    session: int


class FromVerify(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """verify's engine -> door, draft's door -> engine: messages of verify in one session, in order."""

    session: int
    messages: list[VerifyMessage]


class FeaturePieces(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """verify's engine -> door, draft's door -> engine: features of one session, in order."""

    session: int
    features: list[Features]


_ARRAY, _ERROR = 1, 2
"""Codes of extensions."""
_ERRORS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, OutriderError)
}


def _to_wire(value: Any) -> Any:
    """What msgpack has no word for: numbers and arrays of numpy, and errors for clients."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, _encoder.encode((value.dtype.str, value.shape, value.tobytes())))
    if isinstance(value, OutriderError):
        known = (type(value).__name__, vars(value) | {"code": value.code})
        return msgspec.msgpack.Ext(_ERROR, _encoder.encode(known))
    raise TypeError(f"a {type(value).__name__} does not travel")


def _from_wire(code: int, data: memoryview) -> Any:
    if code == _ARRAY:
        dtype, shape, values = msgspec.msgpack.decode(data)
        return np.frombuffer(values, dtype).reshape(shape)
    if code == _ERROR:
        name, known = msgspec.msgpack.decode(data)
        # One of another module is not for clients: they are told no more than that.
        kind = _ERRORS.get(name, InternalError)
        error = kind.__new__(kind, known["message"])
        vars(error).update(known)
        return error
    raise ValueError(f"no extension has the code {code}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)


def decoder(frames: Any) -> msgspec.msgpack.Decoder[Any]:
    """Decodes frames of these types: a union of structs."""
    return msgspec.msgpack.Decoder(frames, ext_hook=_from_wire)


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
