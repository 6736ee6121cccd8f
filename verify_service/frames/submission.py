"""What the door and the engine say of one answer: the request that was let in, and what becomes of it. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import OutriderError
from outrider.protocol.generation import FinishReason, PromptLogprobs, RoundTree, TokenLogprobs, TokenOrigin
from outrider.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that the engine may trust: every field lies within the model's limits."""

    request_id: str
    tokens: Sequence[int]
    """The prompt."""
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    speculate: bool
    num_prompt_logprobs: int | None = None
    """None: no log-probabilities of the prompt; k: those of its tokens and of the k most likely at each position."""
    trace: bool = False
    """Whether the tree that each round verified is told."""
    priority: int = 0
    """Lower is earlier."""
    client: str = ""
    """On whose behalf; requests of equal priority take turns by client."""
    tenant: str = ""
    """Whose text this is: nothing that is learned from it serves a request of another tenant."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one round did for a request, or its end."""

    token_ids: Sequence[int] = ()
    origins: Sequence[TokenOrigin] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    finish: FinishReason | None = None
    error: OutriderError | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """Of the prompt tokens that a chunk of prefill has computed."""
    tree: RoundTree | None = None
    """What the round verified, for a request that is traced."""

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.error is not None
