"""OpenAI's response bodies. Fields that are not set are not sent."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from gateway.core.events import Usage


class Body(BaseModel):
    """Base of everything that is sent."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    def json_bytes(self) -> bytes:
        """The body as JSON, without unset fields."""
        return self.model_dump_json(exclude_unset=True).encode()


class ErrorDetail(Body):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Body):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class PromptTokensDetails(Body):
    """Of the prompt's tokens."""

    cached_tokens: int


class SpeculationUsage(Body):
    """What speculation did."""

    rounds: int
    draft_tokens: int
    accepted_tokens: int
    accept_length: float
    """Tokens committed in a round, on average; 0 when there was no round."""


class UsageBody(Body):
    """What a request used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    outrider: SpeculationUsage | None = None

    @classmethod
    def of(cls, usage: Usage) -> UsageBody:
        """OpenAI's view of a usage."""
        rounds = usage.num_rounds
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_prompt_tokens),
            outrider=SpeculationUsage(
                rounds=rounds,
                draft_tokens=usage.num_draft_tokens,
                accepted_tokens=usage.num_accepted_tokens,
                accept_length=round((usage.num_accepted_tokens + rounds) / rounds, 3) if rounds else 0.0,
            ),
        )


FinishReason = Literal["stop", "length"]


class TopLogprob(Body):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Body):
    """Log-probabilities of a chat answer, a token an entry."""

    content: list[TokenLogprob]


class CompletionLogprobs(Body):
    """Log-probabilities of a completion, four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for a prompt's first token, which nothing comes before."""
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(Body):
    """A prompt's token, or a likely one in its place."""

    logprob: float
    rank: int
    """Place among all tokens by probability; 1 is the likeliest."""
    decoded_token: str


PromptLogprobsBody = list[dict[str, PromptLogprob] | None]
"""An entry for each of the prompt's tokens, by token id; None for the first, which nothing comes before."""


class TracedToken(Body):
    """Where a token of an answer came from."""

    id: int
    text: str
    origin: Literal["accepted", "bonus", "plain", "unspecified"]
    """A draft token that the target agreed with; the target's own in a round with drafts; in a round without."""
    depth: int
    """Place among the tokens that its round committed, from 1."""
    drafter: str | None
    """Who guessed it; null for the target's own."""


class TracedRound(Body):
    """What a round verified, and what became of it. Nodes are parents first; all lists of nodes have one length."""

    position: int
    """Of the first token that it committed; the prompt begins at 0."""
    num_tokens: int
    """Tokens that it committed; a stop string may have cut some off."""
    parents: list[int]
    """Index of each node's parent; -1 below the root."""
    token_ids: list[int]
    texts: list[str]
    drafters: list[str]
    scores: list[float]
    """The drafter's natural-log chance that a node is committed given that its parent is."""
    accepted: list[int]
    """Indices of accepted nodes, the child of the root first."""


class TraceBody(Body):
    """How an answer, or a piece of it, came about."""

    tokens: list[TracedToken]
    rounds: list[TracedRound]


class AssistantMessage(Body):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Body):
    """One of the answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    trace: TraceBody | None = None


class ChatCompletion(Body):
    """Answer to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobsBody | None = None


class ChatDelta(Body):
    """What a chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Body):
    """News of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    trace: TraceBody | None = None


class ChatCompletionChunk(Body):
    """One event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None


class CompletionChoice(Body):
    """One of the completions, or news of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: PromptLogprobsBody | None = None
    trace: TraceBody | None = None


class Completion(Body):
    """Answer to POST /v1/completions, whole or one event of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None


class ModelBody(Body):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["outrider"]
    root: str
    parent: None
    max_model_len: int
    """Most tokens of prompt and output together."""


class ModelList(Body):
    """Answer to GET /v1/models."""

    object: Literal["list"]
    data: list[ModelBody]


class Status(Body):
    """Answer of /health and /ready."""

    status: Literal["ok", "ready", "not ready"]
