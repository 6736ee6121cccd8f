"""Parts of the frames between door and engine: requests, and what is told of them. Torch-free."""

from __future__ import annotations

import msgspec

from outrider.sampling.params import SamplingParams


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """door -> engine: a request, under a number that the door never uses again."""

    number: int
    request_id: str
    tokens: bytes
    """int32."""
    sampling: SamplingParams
    max_tokens: int
    stop_ids: list[int]
    speculate: bool
    num_prompt_logprobs: int | None = None
    trace: bool = False
    priority: int = 0
    client: str = ""
    tenant: str = ""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """door -> engine: the request shall end without another word but `EngineUpdates.ended`."""

    number: int


class ErrorPart(msgspec.Struct, frozen=True, array_like=True):
    """An error for a client: the class's name, what it is made from, and what else it knows."""

    kind: str
    arguments: list[str]
    code: str
    retry_after: float | None


class PromptLogprobsPart(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens (outrider.protocol.generation); arrays as the bytes of their numbers."""

    start: int
    num_top: int
    logprobs: bytes
    """float32."""
    ranks: bytes
    """uint32."""
    top_ids: bytes
    """int32, row by row."""
    top_logprobs: bytes
    """float32, row by row."""


class TreePart(msgspec.Struct, frozen=True, array_like=True):
    """The tree of a round, as outrider.protocol.generation has it."""

    position: int
    num_tokens: int
    parents: list[int]
    token_ids: list[int]
    drafters: list[int]
    scores: list[float]
    accepted: list[int]
    drafter_names: list[str]


class UpdatePart(msgspec.Struct, frozen=True, array_like=True):
    """An update of the request `number`; enumerations as their numbers, 0 for no finish."""

    number: int
    token_ids: list[int]
    origins: bytes
    logprobs: list[tuple[float, list[tuple[int, float]]]]
    num_draft_tokens: int
    num_accepted_tokens: int
    num_cached_prompt_tokens: int
    finish: int
    error: ErrorPart | None
    prompt_logprobs: PromptLogprobsPart | None = None
    tree: TreePart | None = None
