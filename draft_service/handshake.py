"""What this drafter says of itself, and whether the verify services of one draft service have the same target."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from draft_service.drafters.base import AnyDrafter, Needs, named_drafters
from draft_service.drafters.several import SeveralDrafters
from outrider.config.draft import DraftOptions
from outrider.logs import get_logger
from outrider.sampling.noise import NOISE_VERSION
from outrider.tree.handshake import HandshakeError, agree
from outrider.tree.messages import PROTOCOL_VERSION, Hello

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """What the verify services of one draft service have in common."""

    vocab_size: int
    tokenizer_hash: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a verify service is answered."""

    hello: Hello
    parts: frozenset[int] | None = None
    """Numbers of the drafters that guess for it; None for all."""


def longest_sequence(needs: Needs, options: DraftOptions) -> int:
    """Tokens of the longest sequence that is served."""
    return min(needs.max_positions or options.max_positions, options.max_positions)


def own_hello(drafter: AnyDrafter, options: DraftOptions) -> Hello:
    """The hello of a new session; one whose drafter takes features gets a token for them."""
    hello = _hello(drafter, drafter.needs, "+".join(named_drafters(options)), options)
    # In lockstep nothing is said before a tree is complete, features and all.
    optional = bool(drafter.needs.feature_layers and modest_parts(drafter)) and not options.lockstep
    return replace(hello, features_optional=optional)


def answer_hello(theirs: Hello, drafter: AnyDrafter, options: DraftOptions, *, may_leave_out: bool) -> Answer:
    """What to answer a verify service. Raises what `agree` raises.

    `may_leave_out`: nobody has named the drafters. Where the target is not the one that they were chosen for, those
    that take any target guess alone.
    """
    ours = own_hello(drafter, options)
    try:
        agree(theirs, ours)
    except HandshakeError as error:
        parts = modest_parts(drafter)
        if not parts or not may_leave_out:
            raise
        names = "+".join(name for number, name in enumerate(named_drafters(options)) if number in parts)
        alone = _hello(drafter, Needs(), names, options)
        agree(theirs, alone)
        _logger.warning(
            "%s alone drafts for %s, which %s does not fit: %s",
            *(names, theirs.model or "this target", ours.model, error.message),
        )
        return Answer(alone, parts)
    return Answer(ours)


def modest_parts(drafter: AnyDrafter) -> frozenset[int]:
    """Those of several drafters that take any target as it is, such as n-grams, by their numbers."""
    parts = drafter.parts if isinstance(drafter, SeveralDrafters) else ()
    return frozenset(number for number, part in enumerate(parts) if part.needs == Needs())


def _hello(drafter: AnyDrafter, needs: Needs, model: str, options: DraftOptions) -> Hello:
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        noise_version=NOISE_VERSION,
        model=model,
        tokenizer_hash=needs.tokenizer_hash,
        vocab_size=needs.vocab_size,
        hidden_size=needs.hidden_size,
        feature_layers=needs.feature_layers,
        max_positions=longest_sequence(needs, options),
        # Those of all: nodes name them by their numbers among these.
        sources=drafter.sources,
        features_token=secrets.token_hex(16) if needs.feature_layers else "",
        projection_columns=needs.projection.num_columns if needs.projection is not None else 0,
        projection_hash=needs.projection.name if needs.projection is not None else "",
    )


def check_target(theirs: Hello, ours: Hello) -> Target:
    """The target of a session that begins with these two hellos. Raises what `agree` raises."""
    return Target(agree(theirs, ours).vocab_size, theirs.tokenizer_hash)


def check_same_target(target: Target, served: Target) -> None:
    """Raise HandshakeError if a session is of another target than those that are served now."""
    for field in ("vocab_size", "tokenizer_hash"):
        theirs, ours = getattr(target, field), getattr(served, field)
        if theirs != ours:
            raise HandshakeError(
                f"hello.{field}: verify has {theirs!r}, the draft service has {ours!r}; use a draft service for each "
                "target"
            )
