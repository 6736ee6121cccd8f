"""A round: what goes into one forward, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.errors import OutriderError
from outrider.tokens import TokenLogprobs
from verify_service.request import Request


@dataclass(frozen=True, slots=True)
class Nodes:
    """Tree nodes of one request in a round, parents first.

    Entry i hangs below entry `parents[i]`, or below the root where that is -1. Depths count from the root, so a
    child of the root has depth 1.
    """

    token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    depths: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(eq=False, slots=True)
class Entry:
    """One request's part of a round.

    `num_extend` committed tokens from `cached_len` on are computed. When they reach the root (`samples`), the nodes
    below it are verified and tokens are sampled; else this is a chunk of prefill.
    """

    request: Request
    num_extend: int
    nodes: Nodes = field(default_factory=Nodes)

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the root."""
        return self.request.cached_len + self.num_extend == self.request.committed_len

    @property
    def num_tokens(self) -> int:
        """Token slots that the entry takes in the forward."""
        return self.num_extend + len(self.nodes)


@dataclass(frozen=True, slots=True)
class Result:
    """What the target says to an entry: the accepted draft tokens and the bonus token, or nothing after a chunk."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    error: OutriderError | None = None
    """This request alone failed."""

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens."""
        return max(len(self.token_ids) - 1, 0)
