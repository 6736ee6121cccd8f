"""Messages between gateways and verify services, in gRPC and in frames between door and engine. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from outrider.errors import OutriderError
from outrider.sampling.params import AnswerEnd, SamplingParams


class TokenOrigin(IntEnum):
    """Where a committed token came from; numbers as in common.proto."""

    UNSPECIFIED = 0
    """A value of a newer protocol."""
    ACCEPTED = 1
    """A draft token that the target agreed with."""
    BONUS = 2
    """The target's own token, in a round with draft tokens."""
    PLAIN = 3
    """The target's own token, in a round without."""


class FinishReason(IntEnum):
    """Why an answer ended; numbers as in common.proto."""

    STOP = 1
    """A stop token, the end-of-sequence token or a stop string."""
    LENGTH = 2
    """max_tokens or the context length."""


class VerifyInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a verify replica serves."""

    model: str
    """Name of the model for clients."""
    model_path: str
    """Folder of the checkpoint, which holds the tokenizer."""
    tokenizer_hash: str
    """SHA-256 of the bytes of tokenizer.json, hexadecimal, for gateways; drafts compare `Hello.token_ids_hash`."""
    vocab_size: int
    context_length: int
    """Most tokens of prompt and output together."""
    dtype: str
    """"float32", "bfloat16" or "float16"."""
    eos_token_ids: tuple[int, ...]
    version: str
    """Release of the service."""


class VerifyLoad(msgspec.Struct, frozen=True, array_like=True):
    """How busy a verify replica is."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages_used: int = 0
    num_pages: int = 0
    tokens_per_second: float = 0.0
    num_healthy_drafts: int = 0


class GenerationRequest(msgspec.Struct, frozen=True, array_like=True):
    """The gateway's request to verify for one answer to a tokenized prompt.

    Verify's door checks that every field is within the model's limits, adds the model's end-of-sequence tokens to
    `stop_token_ids`, sets `disable_speculation` if there is no draft, and passes the request to the engine.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    disable_speculation: bool = False
    num_prompt_logprobs: int | None = None
    """None: no log-probabilities of the prompt; k: those of its tokens and of the k most likely at each position."""
    trace: bool = False
    """Whether updates include the tree that each round verified."""
    priority: int = 0
    """Lower values are served earlier."""
    tenant: str = ""
    """Owner of the text (outrider.rpc.call.salted_tenant): nothing learned from it serves another tenant."""
    skip_prefix_cache: bool = False
    """Whether to compute the whole prompt, even if the radix cache has a prefix of it."""
    min_tokens: int = 0
    """Tokens that end an answer are masked until it has this many tokens."""
    bad_words: list[list[int]] = []
    """Sequences of tokens that the output never contains: the last token of each is masked after the others."""
    client: str = ""
    """On whose behalf the request is made; requests of equal priority take turns by client. Verify's door sets it from
    the call's metadata: it is not in the message."""

    @property
    def answer_end(self) -> AnswerEnd:
        """The tokens that end the answer, and its shortest length."""
        return AnswerEnd(self.stop_token_ids, self.min_tokens)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of one committed token and of the top ones, under the raw distribution."""

    logprob: float
    top: Sequence[tuple[int, float]]
    """(token id, log-probability), likeliest first."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Natural-log probabilities of N consecutive prompt tokens, each given all before, under the raw distribution."""

    start: int
    """Position of the first one; at least 1, since the prompt's first token has none."""
    logprobs: NDArray[np.float32]
    """[N]."""
    ranks: NDArray[np.uint32]
    """[N]: rank of the prompt's token among all tokens, ties going to the lower id; 1 is the likeliest."""
    top_ids: NDArray[np.int32]
    """[N, K]: the K most likely tokens, likeliest first, equally likely ones by id."""
    top_logprobs: NDArray[np.float32]
    """[N, K]."""

    def __len__(self) -> int:
        return len(self.logprobs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PromptLogprobs):
            return NotImplemented
        return self.start == other.start and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("logprobs", "ranks", "top_ids", "top_logprobs")
        )


class RoundTree(msgspec.Struct, frozen=True, array_like=True):
    """The tree that a round verified for one request, and what the round committed. Parents come before children."""

    position: int
    """Position of the first token that the round committed."""
    num_tokens: int
    """Tokens that the round committed: the accepted ones, then the target's own unless a limit or stop token cut it
    off."""
    parents: Sequence[int] = ()
    """Index of each node's parent; -1 below the root."""
    token_ids: Sequence[int] = ()
    drafters: Sequence[int] = ()
    """The drafter that found each node, as an index into `drafter_names`."""
    scores: Sequence[float] = ()
    """The drafter's natural-log probability that a node is committed, given that its parent is."""
    accepted: Sequence[int] = ()
    """Indices of accepted nodes, the child of the root first."""
    drafter_names: Sequence[str] = ()


class RoundCounts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of one verify round of one answer."""

    num_draft_tokens: int
    """Tree nodes that were verified."""
    num_accepted_tokens: int
    """Draft tokens that were committed."""


class GenerationUpdate(msgspec.Struct, frozen=True, array_like=True):
    """An update of one answer: tokens that one or more rounds committed, or its end."""

    token_ids: Sequence[int] = ()
    origins: Sequence[TokenOrigin] = ()
    """One for each token."""
    logprobs: Sequence[TokenLogprobs] = ()
    """One for each token if asked for, else empty."""
    rounds: Sequence[RoundCounts] = ()
    finish_reason: FinishReason | None = None
    cached_prompt_tokens: int = 0
    """Prompt tokens whose KV came from the radix cache, in updates with tokens."""
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    """Log-probabilities of prompt tokens that chunks of prefill have computed."""
    round_trees: Sequence[RoundTree] = ()
    """Trees of `rounds`, for a request with `trace`."""
    queue_seconds: float = 0.0
    """Seconds that the request waited for its first place in a round, in updates with tokens."""
    error: OutriderError | None = None
    """Why the answer ends incomplete; over gRPC this is the call's status."""

    @property
    def last(self) -> bool:
        """Whether this is the answer's last update."""
        return self.finish_reason is not None or self.error is not None

    @property
    def num_draft_tokens(self) -> int:
        """Tree nodes verified in all of the update's rounds."""
        return sum(counts.num_draft_tokens for counts in self.rounds)

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens committed in all of the update's rounds."""
        return sum(counts.num_accepted_tokens for counts in self.rounds)


def join_updates(updates: Sequence[GenerationUpdate]) -> GenerationUpdate:
    """Join consecutive updates of one answer into one."""
    if len(updates) == 1:
        return updates[0]
    return GenerationUpdate(
        token_ids=[token for update in updates for token in update.token_ids],
        origins=[origin for update in updates for origin in update.origins],
        logprobs=[entry for update in updates for entry in update.logprobs],
        rounds=[counts for update in updates for counts in update.rounds],
        finish_reason=updates[-1].finish_reason,
        cached_prompt_tokens=max(update.cached_prompt_tokens for update in updates),
        prompt_logprobs=[part for update in updates for part in update.prompt_logprobs],
        round_trees=[tree for update in updates for tree in update.round_trees],
        queue_seconds=max(update.queue_seconds for update in updates),
        error=updates[-1].error,
    )


class Usage(msgspec.Struct, array_like=True):
    """A request's usage; the counters of rounds are sums over its answers."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Committed tokens that are part of the answers."""
    cached_prompt_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_reasoning_tokens: int = 0
    """Committed tokens of reasoning, if reasoning is separated from answers."""
    num_committed_tokens: int = 0
    """Tokens that the rounds committed, including those behind a stop string."""

    @classmethod
    def total(cls, parts: Iterable[Usage]) -> Usage:
        """Return the sum of several usages."""
        return cls(*map(sum, zip(*map(msgspec.structs.astuple, parts), strict=True)))

    @property
    def accept_length(self) -> float:
        """Mean tokens committed in a round; 0 without rounds."""
        return self.num_committed_tokens / self.num_rounds if self.num_rounds else 0.0
