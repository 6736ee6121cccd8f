"""What a burst of draft steps is told, and what it answers. Torch-free.

A step runs the model over up to `width` tree nodes of any requests. The pool holds what could be run: at first the
seeds, then also the candidates that the steps of this burst bring. Each step takes the best of the pool, so that a
burst deepens a tree without the host looking at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.sampling.params import SamplingParams

FORCED = np.float32(1e30)
"""Path score of a seed that the first step must take: committed tokens whose KV is missing, and the root.

Forced seeds of a request follow each other, parents first, and have their tree slots given. The last one is the root:
its candidates count from 0, those of the others do not enter the pool. A slot that is not live yet is taken; one that
is live is filled anew, and what hangs below it stays.
"""


@dataclass(frozen=True, slots=True)
class Seeds:
    """Nodes that a burst may run, parents before children; N of them, at most `BurstShape.max_seeds`."""

    rows: NDArray[np.int32]
    """[N] index into `Burst.rows`."""
    parents: NDArray[np.int32]
    """[N] tree slot of the parent; -1 where all before the node is context."""
    tokens: NDArray[np.int32]
    """[N] token ids of the target's vocabulary."""
    positions: NDArray[np.int32]
    """[N] absolute position of the token in the sequence."""
    scores: NDArray[np.float32]
    """[N] path score from the current root, at most 0; FORCED for a forced seed."""
    slots: NDArray[np.int32]
    """[N] tree slot of a forced seed; -1 lets the runner take one of the row's free ones."""
    features: NDArray[np.int32]
    """[N] row of `Burst.features` that the node takes; -1 takes what its parent's step brought."""


@dataclass(slots=True)
class RowState:
    """One request of a burst. Not to be changed; making a frozen one takes three times as long."""

    row: int
    """Its row of the runner, from `BurstRunner.open`."""
    context_len: int
    """Tokens whose KV lies in the context, from position 0 on (less one for a drafter of features: see BurstShape)."""
    live: NDArray[np.bool_]
    """[region] tree slots that hold live nodes, committed ones that are not context yet included. An ancestor that is
    not live any more is context."""
    free: Sequence[int]
    """Tree slots that the burst may fill, forced seeds' not included."""


@dataclass(frozen=True, slots=True)
class Burst:
    """What a burst is told."""

    rows: Sequence[RowState]
    seeds: Seeds
    num_steps: int
    width: int
    """Nodes of a step at most; rounded up to a bucket."""
    floor: float
    """Path score below which nothing is run."""
    features: Sequence[object] = ()
    """Target features of forced seeds: parts [F_i, feature_size] as `BurstRunner.project` returned them, or slices of
    those, which joined in this order are [F, feature_size]."""


@dataclass(frozen=True, slots=True)
class BurstResult:
    """What a burst brought. S steps of M nodes, k candidates each.

    Candidate j of node m of step s has pool index len(seeds) + (s * M + m) * k + j; seed i has index i.
    """

    picked: NDArray[np.int32]
    """[S, M] pool index of each node that was run, the best first within no particular order of rows; -1 for none."""
    slots: NDArray[np.int32]
    """[S, M] tree slot that it took; -1 for none."""
    tokens: NDArray[np.int32]
    """[S, M, k] candidate children, of the target's vocabulary, best first; -1 for none."""
    scores: NDArray[np.float32]
    """[S, M, k] their edge scores: natural-log chances, at most 0; -inf for none."""


class PendingBurst(Protocol):
    """A burst that was launched."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> BurstResult:
        """The results; waits without holding the interpreter."""


@dataclass(frozen=True, slots=True)
class BurstShape:
    """What a runner is built for."""

    num_rows: int
    """Requests at once."""
    region: int
    """Tree slots of a request; a multiple of 32."""
    branching: int
    """k, candidates of a node."""
    max_seeds: int
    max_steps: int
    max_width: int
    page_size: int
    num_pages: int
    """Context pages of all requests."""
    max_context: int
    """Context tokens of a request at most."""
    feature_size: int
    """Width of the (projected) target features that the model takes; 0 for none. If it takes features, the token at
    position p is paired with the feature of position p - 1 and its KV lies at context position p - 1; the first token
    of a sequence has no KV of its own."""

    @property
    def lag(self) -> int:
        """How far a token's KV position lies before its own position."""
        return 1 if self.feature_size else 0


class BurstRunner(Protocol):
    """Runs a draft model. One thread calls it; all calls take effect in their order; at most two bursts are pending."""

    shape: BurstShape

    def open(self, row: int, sampling: SamplingParams) -> None:
        """A request begins in a free row."""

    def close(self, row: int) -> None:
        """Its row is free."""

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """All context pages of the row, in order; they only ever grow at their end."""

    def extend(self, row: int, tokens: Sequence[int], start: int, features: object | None) -> None:
        """Compute KV of context tokens at sequence positions `start`, ...; it follows the context so far.

        `features` [len(tokens), feature_size], of the positions one before, for a model that takes them.
        """

    def move(self, row: int, slots: Sequence[int], position: int) -> None:
        """KV of the tree slots moves to context KV positions `position`, `position` + 1, ..."""

    def project(self, features: object) -> object:
        """Target features as the model takes them: [N, feature_size] on its device, to be cut along its first axis.

        `features` is a `Features` message of outrider.tree.messages with its values in `data`, or a tensor
        [N, layers * hidden]; its memory may be used again as soon as this returns.
        """

    def launch(self, burst: Burst) -> PendingBurst:
        """Queue a burst; returns before it has run."""
