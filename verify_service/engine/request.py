"""One request as the engine sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.grammar.compiler import GrammarState
from outrider.protocol.generation import FinishReason, GenerationRequest, GenerationUpdate
from outrider.sampling.sampler import RequestSampler


@dataclass(eq=False, slots=True)
class Request:
    """State of a request.

    Between rounds `cached_len < committed_len`: the last committed token is the root, whose KV the next round
    computes. Until prefill is done, or after a preemption, more tokens than the root wait.
    """

    params: GenerationRequest
    """What was asked for."""
    tokens: list[int]
    """All committed tokens, prompt first."""
    prompt_len: int
    sampler: RequestSampler
    sink: Callable[[GenerationUpdate], None]
    """Called with every update; must not block."""
    priority: int
    """Lower is earlier, and is preempted later; it may rise above that of `params` while the request waits."""
    num_scored: int = 0
    """First positions of the prompt that log-probabilities of the token after them were told for, if asked for."""
    arrival: int = 0
    """Order of admission; of equal priority the youngest is preempted first."""
    arrived_at: float = 0.0
    """Seconds on the monotonic clock."""
    queue_seconds: float = 0.0
    """How long it waited for its first place in a round."""
    cached_len: int = 0
    num_cached_prompt_tokens: int | None = None
    """Prompt tokens that the radix cache had when the request was first admitted; None before that."""
    pages: list[int] = field(default_factory=list)
    """Page table: position p lies in page `pages[p // page_size]`."""
    feature_epoch: int = 0
    """`Memory.feature_epoch` when it got its pages: while that is the same, so are their features."""
    grammar: GrammarState | None = None
    """State of its grammar, if it has one; set before the request is scheduled."""
    finished: bool = False

    @classmethod
    def begin(cls, params: GenerationRequest, sink: Callable[[GenerationUpdate], None], vocab_size: int) -> Request:
        """A request at its start; `EngineLimits.check` has seen it."""
        tokens = list(params.prompt_token_ids)
        sampler = RequestSampler(params.sampling, tokens, vocab_size, params.answer_end, params.bad_words)
        return cls(params, tokens, len(tokens), sampler, sink, params.priority)

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among running requests: the last one gives way first."""
        return self.priority, self.arrival

    @property
    def committed_len(self) -> int:
        """Tokens agreed."""
        return len(self.tokens)

    @property
    def past_prompt(self) -> bool:
        """Whether decoding is what first computes the next token: it is the prompt's last one or lies behind it."""
        return self.cached_len >= self.prompt_len - 1

    @property
    def most_shared(self) -> int:
        """Committed tokens whose KV may come from the radix cache: not the root's, nor any whose logits are needed."""
        if self.params.skip_prefix_cache and self.num_cached_prompt_tokens is None:
            return 0  # what it computed itself, it may take back after a preemption
        most = len(self.tokens) - 1
        return most if self.params.num_prompt_logprobs is None else min(most, self.num_scored)

    @property
    def draft_room(self) -> int:
        """Draft tokens that a round may accept; the last place is the bonus token's."""
        return self.params.max_tokens + self.prompt_len - len(self.tokens) - 1

    def cut(self, token_ids: Sequence[int]) -> tuple[Sequence[int], FinishReason | None]:
        """The tokens of a round that may be committed, and why the answer ends with them if it does."""
        room, stop_ids = self.draft_room + 1, self.params.stop_token_ids
        if not stop_ids.isdisjoint(token_ids):
            stop = next(index for index, token in enumerate(token_ids) if token in stop_ids)
            if stop < room:
                return token_ids[: stop + 1], FinishReason.STOP
        return token_ids[:room], FinishReason.LENGTH if len(token_ids) >= room else None
