"""What a round brought: what is committed at once, and what is told of it while the next one runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.protocol.tokens import FinishReason, RoundTree, TokenOrigin
from verify_service.engine.gaps import Phases
from verify_service.engine.round import Entry, Pending, Result
from verify_service.engine.tracing import round_tree
from verify_service.frames.submission import Update


class Commit(NamedTuple):
    """What a round did for one request."""

    entry: Entry
    result: Result
    tokens: Sequence[int]
    """Committed ones."""
    finish: FinishReason | None

    def update(self) -> Update:
        """What the request is told; after a chunk of prefill no more than log-probabilities of the prompt."""
        if self.result.error is not None:
            return Update(error=self.result.error)
        if not self.tokens:
            return Update(prompt_logprobs=self.result.prompt_logprobs)
        num_nodes, num_accepted = len(self.entry.nodes), self.result.num_accepted
        own = TokenOrigin.BONUS if num_nodes else TokenOrigin.PLAIN
        return Update(
            token_ids=self.tokens,
            origins=[TokenOrigin.ACCEPTED if i < num_accepted else own for i in range(len(self.tokens))],
            logprobs=self.result.logprobs[: len(self.tokens)],
            num_draft_tokens=num_nodes,
            num_accepted_tokens=min(num_accepted, len(self.tokens)),
            num_cached_prompt_tokens=self.entry.request.num_cached_prompt_tokens or 0,
            finish=self.finish,
            prompt_logprobs=self.result.prompt_logprobs,
            tree=self._tree() if self.entry.request.trace else None,
        )

    def _tree(self) -> RoundTree:
        """What the round verified. The request's next round has not been committed yet."""
        nodes, request = self.entry.nodes, self.entry.request
        position = len(request.tokens) - len(self.tokens)
        return round_tree(position, nodes.parents, nodes.token_ids, self.entry.marks, self.tokens)


class RoundDone(NamedTuple):
    """A round that was committed and that nobody has been told of. Times in seconds."""

    entries: Sequence[Entry]
    commits: Sequence[Commit | None]
    """None for a request that was cancelled while the round ran."""
    pending: Pending
    num_tokens: int
    prefills: bool
    """Whether prefill was part of it, so that its time says little of a round of so many tokens."""
    seconds: float
    held: float
    host_gap: float | None
    """From the end of the round before to this one's launch, holding aside; None after a pause."""
    ready: int = 0
    """Nodes that it would have taken without any hold."""
    phases: Phases = ()
    """What lay between the round before and this one."""

    @property
    def gap(self) -> float | None:
        """How long the device had nothing to do before it, holding aside; as it measured itself if it did."""
        if self.host_gap is None or self.pending.gap_seconds is None:
            return self.host_gap
        return max(self.pending.gap_seconds - self.held, 0.0)
