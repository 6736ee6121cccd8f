"""Whether a verify service and this drafter fit together."""

from __future__ import annotations

from dataclasses import dataclass

from draft_service.drafters.base import Needs
from outrider.errors import InvalidRequestError, OutriderError
from outrider.sampling.noise import NOISE_VERSION
from outrider.tree.messages import PROTOCOL_VERSION, Hello


class HandshakeError(OutriderError):
    """The two sides cannot work together; the message names both values."""

    http_status = 412
    grpc_status = "FAILED_PRECONDITION"
    code = "handshake_mismatch"


@dataclass(frozen=True, slots=True)
class Target:
    """What the verify services of one draft service have in common."""

    vocab_size: int
    tokenizer_hash: str


def check_hello(hello: Hello, needs: Needs) -> Target:
    """Return the target of a session.

    Raises InvalidRequestError for a vocabulary without tokens and HandshakeError for what does not fit the drafter.
    """
    _same("protocol_version", hello.protocol_version, PROTOCOL_VERSION, "run the same release on both sides")
    _same("noise_version", hello.noise_version, NOISE_VERSION, "run the same release on both sides")
    if not 1 <= hello.vocab_size < 1 << 31:
        raise InvalidRequestError("hello.vocab_size", f"{hello.vocab_size} is no vocabulary", "send the target's size")
    if needs.tokenizer_hash:
        _same("tokenizer_hash", hello.tokenizer_hash, needs.tokenizer_hash, "use a drafter of the target's tokenizer")
    if needs.hidden_size:
        _same("hidden_size", hello.hidden_size, needs.hidden_size, "use a drafter that was trained for the target")
    if needs.feature_layers:
        _same("feature_layers", hello.feature_layers, needs.feature_layers, "send the layers that the drafter takes")
    # Padded vocabularies may differ in size; an id that one side lacks is illegal.
    vocab_size = min(hello.vocab_size, needs.vocab_size or hello.vocab_size)
    return Target(vocab_size, hello.tokenizer_hash)


def check_same_target(target: Target, served: Target) -> None:
    """Raise HandshakeError if a session is of another target than those that are served now."""
    fix = "use a draft service for each target"
    _same("vocab_size", target.vocab_size, served.vocab_size, fix)
    _same("tokenizer_hash", target.tokenizer_hash, served.tokenizer_hash, fix)


def _same(field: str, theirs: object, ours: object, fix: str) -> None:
    if theirs != ours:
        raise HandshakeError(f"hello.{field}: verify has {theirs!r}, the draft service has {ours!r}; {fix}")
