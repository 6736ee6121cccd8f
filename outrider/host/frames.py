"""Frames between a door and its engine process: their packing, and the frames that verify and draft share.

A frame is a length of four bytes, little-endian, and one msgpack message. Structs are encoded directly, numpy arrays
and errors as extensions. Both ends are the same release on the same machine, so nothing here has a version. Torch-free.
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
"""Longest frame; a higher length means that one end has lost its place in the stream."""

OptionsT = TypeVar("OptionsT")
ServedT = TypeVar("ServedT")

_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, Generic[OptionsT], frozen=True, array_like=True, tag=1):
    """door -> engine, first: load and serve what the options name."""

    options: OptionsT


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """door -> engine: end after the current work."""


class Ready(msgspec.Struct, Generic[ServedT], frozen=True, array_like=True, tag=1):
    """engine -> door, first: everything is loaded and warm."""

    served: ServedT


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """engine -> door, instead of Ready: the engine cannot start with these options, model and machine."""

    message: str


class SessionDown(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """door -> engine: a session of a verify and a draft service is over; free everything that belongs to it."""

    session: int


class SessionLost(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """engine -> door: end this session, whose other side has hung up, is silent, or sends nonsense."""

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
    """Encode values that msgpack does not know: numpy's numbers and arrays, and errors for clients."""
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
        # An error class of another module is not for clients: they get an InternalError.
        kind = _ERRORS.get(name, InternalError)
        error = kind.__new__(kind, known["message"])
        vars(error).update(known)
        return error
    raise ValueError(f"no extension has the code {code}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)


def decoder(frames: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder of frames of these types: a union of structs."""
    return msgspec.msgpack.Decoder(frames, ext_hook=_from_wire)


def pack(frame: msgspec.Struct) -> bytearray:
    """Return the frame as bytes, length first.

    Raises TypeError for values that cannot be encoded, InternalError for a frame too long for the other end.
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
        """Add bytes; return the bodies of the frames that are now complete. Raises InternalError for a bad length."""
        if self._data:
            self._data += data
            bodies, used = self._cut(memoryview(self._data))
            del self._data[:used]
            return bodies
        # The usual case is whole frames, each copied only once.
        bodies, used = self._cut(memoryview(data))
        self._data += data[used:]
        return bodies

    def _cut(self, data: memoryview) -> tuple[list[bytes], int]:
        """Return the complete bodies, and how many bytes they and their lengths take."""
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
