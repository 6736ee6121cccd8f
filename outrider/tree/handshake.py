"""Checks whether a verify service and a draft service fit together. Both sides make the same check from both hellos.

A draft's hello may offer a projection: the matrix that its drafter first multiplies the target's features with. Verify
may do that multiplication instead.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

from msgspec.structs import replace

from outrider.errors import InvalidRequestError, OutriderError
from outrider.protocol.speculation import FEATURE_ITEM_BYTES, MAX_FEATURE_BYTES, Hello, ProjectionPart

MAX_FEATURE_LAYERS = 8
"""Most layers of the target that a drafter may take: each costs verify memory for every token that it keeps."""

MAX_SOURCES = 256
"""A node's source travels as a byte."""
MAX_SOURCE_NAME = 64
"""Most characters of a source's name that clients get."""

PROJECTED = -1
"""Stands for the product with a projection where layers are given by number."""

MAX_PROJECTION_BYTES = 512 << 20
"""A larger matrix is not offered: three layers of 8192 values in bfloat16 make 384 MiB."""

_RELEASE = "run the same release on both sides"


class HandshakeError(OutriderError):
    """The two sides cannot work together; the message names both values."""

    http_status = 412
    grpc_status = "FAILED_PRECONDITION"
    code = "handshake_mismatch"


Terms = Hello
"""The terms of a session: the draft's hello, with the smaller vocabulary, and without its model and tokenizer."""


def agree(verify: Hello, draft: Hello) -> Terms:
    """Return the terms of a session.

    Raises InvalidRequestError if verify's hello makes no sense, HandshakeError if the two sides do not fit.
    """
    _same("protocol_version", verify.protocol_version, draft.protocol_version, _RELEASE)
    _same("noise_version", verify.noise_version, draft.noise_version, _RELEASE)
    if not 1 <= verify.vocab_size < 1 << 31:
        raise InvalidRequestError(
            "hello.vocab_size", f"{verify.vocab_size} is not a vocabulary size", "send the target's size"
        )
    if verify.token_ids_hash and draft.token_ids_hash:
        fix = f"use a drafter of the target's tokenizer, or, if it is that, {_RELEASE}"
        _same("token_ids_hash", verify.token_ids_hash, draft.token_ids_hash, fix)
    if draft.hidden_size:
        fix = "use a drafter that was trained for the target"
        _same("hidden_size", verify.hidden_size, draft.hidden_size, fix)
    _check_layers(verify, draft)
    _check_projection(verify, draft)
    return replace(
        draft,
        model="",
        token_ids_hash="",
        # Padded vocabularies may differ in size; an id that one side lacks is illegal.
        vocab_size=min(verify.vocab_size, draft.vocab_size or verify.vocab_size),
        sources=tuple(name[:MAX_SOURCE_NAME] for name in draft.sources[:MAX_SOURCES]),
    )


def _check_layers(verify: Hello, draft: Hello) -> None:
    layers = draft.feature_layers
    if not layers:
        return
    if not draft.hidden_size:
        raise HandshakeError(
            f"hello.hidden_size: verify has {verify.hidden_size}, the draft service has 0 and takes layers {layers}; "
            "state the width that they have"
        )
    if len(layers) > MAX_FEATURE_LAYERS:
        raise HandshakeError(
            f"hello.feature_layers: verify stores at most {MAX_FEATURE_LAYERS} for a draft, the draft service takes "
            f"{len(layers)}; use a drafter that takes fewer"
        )
    if len(set(layers)) < len(layers) or max(layers) > verify.num_layers + 1:
        raise HandshakeError(
            f"hello.feature_layers: verify has {verify.num_layers} layers, the draft service takes {layers}; name each "
            f"layer once, from 0 to {verify.num_layers + 1}"
        )


def _check_projection(verify: Hello, draft: Hello) -> None:
    columns, name = draft.projection_columns, draft.projection_hash
    if not columns and not name:
        return
    width = len(draft.feature_layers) * draft.hidden_size
    if columns % 2 or not 0 < columns < width or columns > verify.hidden_size:
        raise HandshakeError(
            f"hello.projection_columns: verify has {verify.hidden_size} values a layer, the draft service offers "
            f"{columns} columns for features of {width}; offer an even number of columns, fewer than the features "
            f"have and at most {verify.hidden_size}"
        )
    # The projection's dtype is not known yet: check the smallest here, and the actual one when the projection comes.
    least = columns * width * min(FEATURE_ITEM_BYTES.values())
    if least > MAX_PROJECTION_BYTES:
        raise HandshakeError(
            f"hello.projection_columns: verify takes a projection of at most {MAX_PROJECTION_BYTES} bytes, the draft "
            f"service offers one of {least} or more; offer none, and features come as they are"
        )
    if not re.fullmatch("[0-9a-f]{64}", name):
        raise HandshakeError(
            f"hello.projection_hash: verify takes a SHA-256 in hexadecimal, the draft service has {name[:80]!r}"
        )


def _same(field: str, theirs: object, ours: object, fix: str) -> None:
    if theirs != ours:
        raise HandshakeError(f"hello.{field}: verify has {theirs!r}, the draft service has {ours!r}; {fix}")


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix [num_columns, hidden_size for each of `layers`] of `dtype` in `data`, row by row, little-endian.

    Two projections are equal if their names are.
    """

    layers: tuple[int, ...] = field(compare=False)
    num_columns: int = field(compare=False)
    dtype: str = field(compare=False)
    data: bytes | bytearray | memoryview = field(compare=False, repr=False)
    name: str
    """SHA-256 of all other fields, in hexadecimal: see `name_projection`."""


def name_projection(layers: tuple[int, ...], num_columns: int, dtype: str, data: bytes | memoryview) -> str:
    """Return the name of a projection."""
    digest = _begin_name(layers, num_columns, dtype)
    digest.update(data)
    return digest.hexdigest()


class ProjectionReader:
    """Checks the parts of a projection against what the draft has offered, and keeps none of them."""

    def __init__(self, layers: tuple[int, ...], hidden_size: int, num_columns: int, name: str) -> None:
        self._layers = layers
        self._width = len(layers) * hidden_size
        self._num_columns = num_columns
        self._name = name
        self._dtype = ""
        self._num_bytes = 0
        self._filled = 0
        self._digest = hashlib.sha256()

    def take(self, part: ProjectionPart) -> bool:
        """Take the next part; return whether the projection is complete. Raises InvalidRequestError for other parts."""
        if not self._dtype:
            self._begin(part)
        if (part.num_columns, part.dtype) != (self._num_columns, self._dtype):
            raise InvalidRequestError("projection", "is not what was offered, or changes its form")
        end = part.offset + len(part.data)
        if part.offset != self._filled or not 0 < len(part.data) <= MAX_FEATURE_BYTES or end > self._num_bytes:
            raise InvalidRequestError(
                "projection.data", f"{len(part.data)} bytes at {part.offset} do not follow {self._filled} bytes"
            )
        self._digest.update(part.data)
        self._filled = end
        if end < self._num_bytes:
            return False
        if self._digest.hexdigest() != self._name:
            raise InvalidRequestError("projection", "is not the one that was offered: its SHA-256 differs")
        return True

    def _begin(self, part: ProjectionPart) -> None:
        if part.dtype not in FEATURE_ITEM_BYTES:
            raise InvalidRequestError("projection.dtype", f"{part.dtype[:32]!r} is not known")
        self._dtype = part.dtype
        self._num_bytes = self._num_columns * self._width * FEATURE_ITEM_BYTES[part.dtype]
        if self._num_bytes > MAX_PROJECTION_BYTES:
            raise InvalidRequestError("projection", f"has {self._num_bytes} bytes, at most {MAX_PROJECTION_BYTES}")
        self._digest = _begin_name(self._layers, self._num_columns, part.dtype)


def _begin_name(layers: tuple[int, ...], num_columns: int, dtype: str) -> hashlib._Hash:
    head = f"{','.join(map(str, layers))} {num_columns} {dtype}\n"
    return hashlib.sha256(head.encode())
