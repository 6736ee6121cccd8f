"""Frames of HTTP/2, for clients that do what no library lets them do."""

from __future__ import annotations

import struct

HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS, DATA, PING, GOAWAY, RST_STREAM = 1, 4, 0, 6, 7, 3
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame."""
    return struct.pack("!I", len(payload))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + payload


def field(name: bytes, value: bytes) -> bytes:
    """A header that HPACK's tables do not hold, in its plainest form."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_head(path: bytes) -> bytes:
    """The headers of a call of gRPC."""
    head = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"localhost"}
    head |= {b"content-type": b"application/grpc", b"te": b"trailers"}
    return b"".join(field(name, value) for name, value in head.items())
