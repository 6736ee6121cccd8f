"""What flows through the gateway while an answer grows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.protocol.generation import FinishReason, PromptLogprobs, RoundTree, TokenLogprobs, TokenOrigin


@dataclass(frozen=True, slots=True)
class Token:
    """One committed token as clients see it."""

    id: int
    origin: TokenOrigin
    text: str
    """What became final with it, before any stop string cuts the answer's text."""
    logprobs: TokenLogprobs | None = None
    ends_answer: bool = False
    """A stop or end-of-sequence token: not part of the text."""


@dataclass(slots=True)
class Usage:
    """What a request used; the counters of rounds are sums over its answers."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @classmethod
    def total(cls, parts: Iterable[Usage]) -> Usage:
        """The sum of several requests' usage."""
        whole = cls()
        for part in parts:
            for name in cls.__slots__:
                setattr(whole, name, getattr(whole, name) + getattr(part, name))
        return whole


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one answer: final text, committed tokens, and at its end the reason."""

    choice_index: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = field(default=None)
    """Of the request, in the last delta of its last answer."""
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    """Of prompt tokens, where asked for; all of them come before the answer's first token."""
    trees: Sequence[RoundTree] = ()
    """Of the rounds that committed these tokens, for a request that is traced."""
    num_rounds: int = 0
    """Verify rounds that it tells of."""
    num_accepted: int = 0
    """Draft tokens accepted in them."""
    cached_tokens: int = 0
    """Of the prompt, as far as it tells."""
