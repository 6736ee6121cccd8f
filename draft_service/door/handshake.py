"""What this draft service says of its drafter, and whether its verify services have the same target."""

from __future__ import annotations

import secrets

from msgspec.structs import replace

from draft_service.frames import DrafterProfile, SessionUp
from outrider.config.draft import DraftOptions
from outrider.drafting.registry import named_drafters
from outrider.logs import get_logger
from outrider.protocol.speculation import Hello
from outrider.tree.handshake import HandshakeError, agree

_logger = get_logger(__name__)


def answer_hello(
    theirs: Hello, profile: DrafterProfile, options: DraftOptions, *, may_leave_out: bool
) -> tuple[Hello, SessionUp]:
    """What to answer a verify service, and its session, which has no number yet. Raises what `agree` raises.

    `may_leave_out`: nobody has named the drafters. Where the target is not the one that they were chosen for, those
    that take any target guess alone.
    """
    ours, parts = with_tokens(profile.hello), None
    try:
        terms = agree(theirs, ours)
    except HandshakeError as error:
        if not profile.any_target_drafters or not may_leave_out:
            raise
        refused, parts = ours, profile.any_target_drafters
        names = "+".join(name for number, name in enumerate(named_drafters(options)) if number in parts)
        # Sources are those of all: nodes name them by their numbers among these.
        ours = Hello(
            refused.protocol_version,
            refused.noise_version,
            names,
            max_positions=options.max_positions,
            sources=refused.sources,
            line=refused.line,
        )
        terms = agree(theirs, ours)
        _logger.warning(
            "%s alone drafts for %s, which %s does not fit: %s",
            *(names, theirs.model or "this target", refused.model, error.message),
        )
    token = ours.line.token if ours.line else ""
    return ours, SessionUp(0, terms.vocab_size, theirs.tokenizer_hash, parts, token)


def with_tokens(hello: Hello) -> Hello:
    """The hello of a new session; one whose drafter takes features gets a token for them."""
    line = None if hello.line is None else replace(hello.line, token=secrets.token_hex(16))
    return replace(hello, features_token=secrets.token_hex(16) if hello.feature_layers else "", line=line)


def check_same_target(target: SessionUp, served: SessionUp) -> None:
    """Raise HandshakeError if a session is of another target than those that are served now."""
    for field in ("vocab_size", "tokenizer_hash"):
        theirs, ours = getattr(target, field), getattr(served, field)
        if theirs != ours:
            raise HandshakeError(
                f"hello.{field}: verify has {theirs!r}, the draft service has {ours!r}; use a draft service for each "
                "target"
            )
