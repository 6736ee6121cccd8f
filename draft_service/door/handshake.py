"""What this draft service says of its drafter, and whether its verify services have the same target."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from msgspec.structs import replace

from draft_service.frames import DrafterProfile
from outrider.config.draft import DraftOptions
from outrider.drafting.registry import named_drafters
from outrider.logs import get_logger
from outrider.protocol.speculation import PROTOCOL_VERSION, Hello, LineOffer
from outrider.sampling.noise import NOISE_VERSION
from outrider.tree.handshake import HandshakeError, agree

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """What the verify services of one draft service have in common."""

    vocab_size: int
    tokenizer_hash: str


@dataclass(frozen=True, slots=True)
class HelloAnswer:
    """What a verify service is answered."""

    hello: Hello
    target: Target
    parts: frozenset[int] | None = None
    """Numbers of the drafters that guess for it; None for all."""


def own_hello(profile: DrafterProfile, options: DraftOptions) -> Hello:
    """The hello of a new session; one whose drafter takes features gets a token for them."""
    hello = _hello(profile, "+".join(named_drafters(options)))
    # In lockstep nothing is said before a tree is complete, features and all.
    optional = bool(profile.feature_layers and profile.any_target_drafters) and not options.lockstep
    return replace(hello, features_optional=optional)


def answer_hello(theirs: Hello, profile: DrafterProfile, options: DraftOptions, *, may_leave_out: bool) -> HelloAnswer:
    """What to answer a verify service. Raises what `agree` raises.

    `may_leave_out`: nobody has named the drafters. Where the target is not the one that they were chosen for, those
    that take any target guess alone.
    """
    ours, parts = own_hello(profile, options), None
    try:
        terms = agree(theirs, ours)
    except HandshakeError as error:
        if not profile.any_target_drafters or not may_leave_out:
            raise
        names = "+".join(
            name for number, name in enumerate(named_drafters(options)) if number in profile.any_target_drafters
        )
        alone = DrafterProfile(profile.sources, max_positions=options.max_positions, line=profile.line)
        refused, ours, parts = ours, _hello(alone, names), profile.any_target_drafters
        terms = agree(theirs, ours)
        _logger.warning(
            "%s alone drafts for %s, which %s does not fit: %s",
            *(names, theirs.model or "this target", refused.model, error.message),
        )
    return HelloAnswer(ours, Target(terms.vocab_size, theirs.tokenizer_hash), parts)


def _hello(profile: DrafterProfile, model: str) -> Hello:
    line = profile.line
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        noise_version=NOISE_VERSION,
        model=model,
        tokenizer_hash=profile.tokenizer_hash,
        vocab_size=profile.vocab_size,
        hidden_size=profile.hidden_size,
        feature_layers=profile.feature_layers,
        max_positions=profile.max_positions,
        # Those of all: nodes name them by their numbers among these.
        sources=profile.sources,
        features_token=secrets.token_hex(16) if profile.feature_layers else "",
        projection_columns=profile.projection_columns,
        projection_hash=profile.projection_hash,
        line=None if line is None else LineOffer(line.host, line.path, secrets.token_hex(16)),
    )


def check_same_target(target: Target, served: Target) -> None:
    """Raise HandshakeError if a session is of another target than those that are served now."""
    for field in ("vocab_size", "tokenizer_hash"):
        theirs, ours = getattr(target, field), getattr(served, field)
        if theirs != ours:
            raise HandshakeError(
                f"hello.{field}: verify has {theirs!r}, the draft service has {ours!r}; use a draft service for each "
                "target"
            )
