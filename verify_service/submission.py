"""What the door and the engine say of one answer: the request that was let in, and what becomes of it. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import OutriderError
from outrider.sampling.params import SamplingParams
from outrider.tokens import FinishReason, TokenLogprobs, TokenOrigin


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

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.error is not None
