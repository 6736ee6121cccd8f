"""Frames between the door and the engine process.

A frame is four bytes of length, little-endian, and one message of msgpack. `FromDoor` goes to the engine, `FromEngine`
to the door; arrays travel as the bytes of their numbers. Both ends are the same release on the same machine, so nothing
here has a version. Torch-free.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np

from outrider.errors import InternalError
from verify_service.wire_drafts import (
    DraftDown,
    DraftReset,
    DraftSaid,
    DraftTold,
    DraftUp,
    FeaturesDone,
    FeaturesOpen,
    FeaturesTold,
    FeaturesUp,
    ProjectionFrame,
)
from verify_service.wire_engine import (
    Ready,
    Refused,
    Start,
    Stop,
    Told,
)
from verify_service.wire_requests import (
    Cancel,
    Submit,
)

MAX_FRAME_BYTES = 1 << 30
"""A longer frame is no frame: one end has lost its place."""

_LENGTH = struct.Struct("<I")

FromDoor = (
    Start | Submit | Cancel | DraftUp | DraftDown | DraftSaid | Stop | FeaturesUp | FeaturesDone | ProjectionFrame
)
FromEngine = Ready | Refused | Told | DraftTold | DraftReset | FeaturesOpen | FeaturesTold

from_door: msgspec.msgpack.Decoder[FromDoor] = msgspec.msgpack.Decoder(FromDoor)
from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} does not travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def pack(frame: FromDoor | FromEngine) -> bytearray:
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

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The bodies of the frames that are complete now. Raises InternalError for an absurd length."""
        self._data += data
        bodies, start = [], 0
        while len(self._data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, start)
            if length > MAX_FRAME_BYTES:
                raise InternalError(f"a frame of {length} bytes; the stream is broken")
            end = start + _LENGTH.size + length
            if len(self._data) < end:
                break
            bodies.append(bytes(self._data[start + _LENGTH.size : end]))
            start = end
        del self._data[:start]
        return bodies
