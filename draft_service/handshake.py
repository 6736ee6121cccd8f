"""What this drafter says of itself, and whether the verify services of one draft service have the same target."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from draft_service.drafters.base import AnyDrafter, Needs, named_drafters
from outrider.config.draft import DraftOptions
from outrider.sampling.noise import NOISE_VERSION
from outrider.tree.handshake import HandshakeError, agree
from outrider.tree.messages import PROTOCOL_VERSION, Hello


@dataclass(frozen=True, slots=True)
class Target:
    """What the verify services of one draft service have in common."""

    vocab_size: int
    tokenizer_hash: str


def longest_sequence(needs: Needs, options: DraftOptions) -> int:
    """Tokens of the longest sequence that is served."""
    return min(needs.max_positions or options.max_positions, options.max_positions)


def own_hello(drafter: AnyDrafter, options: DraftOptions) -> Hello:
    """The hello of a new session; one whose drafter takes features gets a token for them."""
    needs = drafter.needs
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        noise_version=NOISE_VERSION,
        model="+".join(named_drafters(options)),
        tokenizer_hash=needs.tokenizer_hash,
        vocab_size=needs.vocab_size,
        hidden_size=needs.hidden_size,
        feature_layers=needs.feature_layers,
        max_positions=longest_sequence(needs, options),
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
