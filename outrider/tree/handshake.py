"""Whether a verify service and a draft service fit together: one check, made by both sides from both hellos."""

from __future__ import annotations

import re

from msgspec.structs import replace

from outrider.errors import InvalidRequestError, OutriderError
from outrider.protocol.speculation import FEATURE_ITEM_BYTES, Hello
from outrider.tree.projection import MAX_PROJECTION_BYTES

MAX_FEATURE_LAYERS = 8
"""Layers of the target that a drafter may take: each costs verify memory for every token that it keeps."""

MAX_SOURCES = 256
"""A node's source travels as a byte."""
MAX_SOURCE_NAME = 64
"""Characters of a drafter's name that clients are told."""

_RELEASE = "run the same release on both sides"


class HandshakeError(OutriderError):
    """The two sides cannot work together; the message names both values."""

    http_status = 412
    grpc_status = "FAILED_PRECONDITION"
    code = "handshake_mismatch"


Terms = Hello
"""What holds in a session: the draft's hello, with the vocabulary of both. Its model and tokenizer are not told."""


def agree(verify: Hello, draft: Hello) -> Terms:
    """The terms of a session.

    Raises InvalidRequestError where verify's hello makes no sense, HandshakeError where the two do not fit.
    """
    _same("protocol_version", verify.protocol_version, draft.protocol_version, _RELEASE)
    _same("noise_version", verify.noise_version, draft.noise_version, _RELEASE)
    if not 1 <= verify.vocab_size < 1 << 31:
        raise InvalidRequestError("hello.vocab_size", f"{verify.vocab_size} is no vocabulary", "send the target's size")
    if verify.tokenizer_hash and draft.tokenizer_hash:
        fix = f"use a drafter of the target's tokenizer, or, if it is that, {_RELEASE}"
        _same("tokenizer_hash", verify.tokenizer_hash, draft.tokenizer_hash, fix)
    if draft.hidden_size:
        fix = "use a drafter that was trained for the target"
        _same("hidden_size", verify.hidden_size, draft.hidden_size, fix)
    _check_layers(verify, draft)
    _check_projection(verify, draft)
    return replace(
        draft,
        model="",
        tokenizer_hash="",
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
    # Its dtype is not known yet: the smallest it may have counts here, its own when it comes.
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
