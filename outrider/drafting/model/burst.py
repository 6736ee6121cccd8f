"""The input and output of a burst of draft steps, and the shapes that bursts are padded to. Torch-free.

A step runs the model over up to `width` tree nodes of any requests. The pool holds the nodes that could be run: at
first the seeds, then also the candidates that the steps of this burst bring. Each step takes the best of the pool, so a
burst deepens a tree without help of the host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.models.capacity import row_buckets, width_buckets
from outrider.models.drafters.config import ALL_SEEN, ContextWindow

Ints = NDArray[np.intp]
Int32s = NDArray[np.int32]

FORCED = np.float32(1e30)
"""Path score of a forced seed, which the first step must take: an uncached token without final KV, or the root.

Forced seeds of a request follow each other, parents first, and state their tree slots. If the last one is the root,
path scores of its candidates count from 0; candidates of the others do not enter the pool. If a slot is live already,
its KV is replaced and the nodes below it stay.
"""
NUM_SEED_FIELDS = 8


class Seeds:
    """N nodes that a burst may run, parents before children; at most `BurstShape.max_seeds`.

    Attributes:
        fields: int32 [8, N], whose rows are the following fields in the device's format.
        rows: int32 [N], index into `Burst.rows`.
        parents: int32 [N], tree slot of the parent; -1 if everything before the node is context.
        tokens: int32 [N], token ids of the target's vocabulary.
        positions: int32 [N], absolute position of the token in the sequence.
        slots: int32 [N], tree slot of a forced seed; -1 lets the runner take a free slot of the row.
        features: int32 [N], row of `Burst.features` that the node takes; -1 for the feature computed at its parent.
        scores: float32 [N], path score from the current root, at most 0; FORCED for a forced seed.
        bases: float32 [N], path score that the edge scores of its candidates are added to: the node's own; 0 for the
            root; -inf for other forced seeds.
    """

    __slots__ = ("bases", "features", "fields", "parents", "positions", "rows", "scores", "slots", "tokens")

    def __init__(self, fields: Int32s) -> None:
        self.fields = fields
        self.rows, self.parents, self.tokens, self.positions, self.slots, self.features = fields[:6]
        self.scores, self.bases = fields[6:].view(np.float32)

    def __len__(self) -> int:
        return int(self.fields.shape[1])


@dataclass(slots=True)
class RowStates:
    """The requests of a burst, B of them, as arrays. Not to be changed."""

    rows: Int32s
    """[B] rows of the runner, from `BurstRunner.open`."""
    context_lens: Int32s
    """[B] places of the context that hold KV: all tokens from position 0 on, but one less if the model takes features,
    and less the part that the context leaves out."""
    live: NDArray[np.bool_]
    """[B, region] tree slots that hold live nodes, including committed ones that are not context yet. An ancestor that
    is not live any more is context."""
    free: Int32s
    """[B, region] tree slots that the burst may fill, without those of forced seeds; of row i only those from
    `free_starts[i]` to before `free_ends[i]` count."""
    free_starts: Int32s
    """[B]"""
    free_ends: Int32s
    """[B]"""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class Burst:
    """The input of a burst. Not to be changed."""

    rows: RowStates
    seeds: Seeds
    num_steps: int
    width: int
    """Most nodes of a step; rounded up to a bucket."""
    floor: float
    """Path score below which no node is run."""
    features: Sequence[Any] = ()
    """Target features of forced seeds: parts [F_i, feature_size] as `BurstRunner.project` returned them, or slices of
    such parts; joined in this order they are [F, feature_size]."""
    min_chance: float = 0.0
    """The burst may end before a step whose nodes' chances (exp of their path scores) have a smaller sum."""


@dataclass(slots=True)
class Reroots:
    """Commits to N requests of a burst that goes on. Not to be changed.

    Nodes that are not below the new roots are not run any more, and path scores count from the new roots. Uncached
    tokens that must be run, and roots that were not in the pool, are further forced seeds.
    """

    rows: Int32s
    """[N] indices into `Burst.rows`."""
    indices: Int32s
    """[N] pool index of each new root; -1 if the root is known to have been run, so that its tree slot is given, or if
    it is a further seed."""
    slots: Int32s
    """[N] tree slot of each new root, or -1; if the pool index is -1 as well, the tree has no nodes."""
    shifts: NDArray[np.float32]
    """[N] path score of each new root, counted from the root before; at most 0."""
    free: Sequence[Int32s]
    """N arrays of further tree slots that the burst may fill."""
    seeds: Seeds | None = None
    """Further forced seeds. Together with forced seeds not run yet, they fit in one step."""
    first_seed: int = 0
    """Pool index of the first further seed; the further seeds follow those that the burst has."""
    features: Sequence[Any] = ()
    """Target features of the further seeds; see `Burst.features`."""


@dataclass(slots=True)
class BurstResult:
    """The result of a burst or of a part: S steps of M nodes with k candidates each. Not to be changed.

    Candidate j of node m of step s has pool index first + (s * M + m) * k + j; seed i has index i.
    """

    first: int
    """Pool index of the first candidate; the seeds and the candidates of earlier parts come before."""
    picked: NDArray[np.int32]
    """[S, M] pool index of each node that was run; -1 for none."""
    slots: NDArray[np.int32]
    """[S, M] tree slot of each node that was run; -1 for none."""
    tokens: NDArray[np.int32]
    """[S, M, k] candidate children, in the target's vocabulary, best first; -1 for none."""
    scores: NDArray[np.float32]
    """[S, M, k] edge scores of the candidates: natural-log chances, at most 0; -inf for none."""
    cut: bool = False
    """Whether the burst ended early because of an interruption; steps that were not run have no nodes."""

    @classmethod
    def empty(cls, first: int, num_steps: int, width: int, branching: int) -> BurstResult:
        """Return a result without nodes, to be filled."""
        picked, slots = np.full((2, num_steps, width), -1, np.int32)
        tokens = np.full((num_steps, width, branching), -1, np.int32)
        return cls(first, picked, slots, tokens, np.full(tokens.shape, -np.inf, np.float32))


@dataclass(frozen=True, slots=True)
class BurstShape:
    """The sizes that a runner is built for."""

    num_rows: int
    """Most requests at once."""
    region: int
    """Tree slots of a request; a multiple of 32."""
    branching: int
    """k, the candidates of a node in bursts of several requests."""
    max_seeds: int
    max_steps: int
    max_width: int
    page_size: int
    num_pages: int
    """Context pages of all requests."""
    max_context: int
    """Most context tokens of a request."""
    feature_size: int
    """Width of the (projected) target features that the model takes; 0 for none. If it takes features, the token at
    position p is paired with the feature of position p - 1 and its KV lies at context position p - 1; the first token
    of a sequence has no KV of its own."""
    lone_branching: int = 0
    """Candidates of a node in bursts of one request; 0 for `branching`."""

    window: ContextWindow = ALL_SEEN
    """The part of a long context that the model is shown."""
    sink_pages: int = 0
    """Pages that each row has for the first tokens of a cut context, if the context pages are another model's."""
    has_blocks: bool = False
    """Whether a root's forward guesses a block of tokens, so that steps below the root cost little."""

    def branching_of(self, num_rows: int) -> int:
        """Return the number of a node's candidates in bursts of `num_rows` requests."""
        return (num_rows == 1 and self.lone_branching) or self.branching

    @property
    def most_branching(self) -> int:
        """Most candidates of a node in any burst."""
        return max(self.branching, self.lone_branching)

    @property
    def most_entries(self) -> int:
        """Most seeds and candidates, together, of any burst."""
        return self.max_seeds + self.max_steps * self.max_width * self.most_branching

    @property
    def lag(self) -> int:
        """How far a token's KV position lies before its own position."""
        return 1 if self.feature_size else 0


class Extent(NamedTuple):
    """Context tokens of a request to compute."""

    row: int
    tokens: Sequence[int]
    start: int
    """Position of the first token in the sequence, which follows the context so far. For the first tokens of a cut
    context, the gap is added to the position."""
    features: Sequence[Any] = ()
    """If the model takes features: parts as `BurstRunner.project` returned them, or slices of such parts. Joined in
    this order they are [len(tokens), feature_size]; each is of the position before its token."""
    gap: int = 0
    """KV positions that the context leaves out; see ContextCut."""


WIDTHS = (8, 16, 32, 64, 128)
SHORT_WIDTH = 64
"""Most nodes of a step in a `short` bucket: one request of a small model, with a short context."""


class StepBucket(NamedTuple):
    """Shape of a captured step."""

    width: int
    """Nodes."""
    rows: int
    branching: int
    """Candidates of a node."""
    short: bool = False
    """Whether the step is for a lone request with a short context."""
    fresh: bool = False
    """Whether the step takes features that have come; used only for block heads."""

    @property
    def sizes(self) -> StepBucket:
        """The shape of the step's inputs and outputs: the bucket without `short` and `fresh`."""
        return self._replace(short=False, fresh=False)

    @property
    def num_candidates(self) -> int:
        """Entries that a step adds to the pool."""
        return self.width * self.branching

    @property
    def num_words(self) -> int:
        """Words of a step's result: entry and slot of each node, and token and score of each candidate."""
        return 2 * self.width + 2 * self.num_candidates


class StepBuckets:
    """The shapes of captured steps; a burst takes the smallest one that holds it."""

    def __init__(self, shape: BurstShape, short_context: int = 0) -> None:
        """`short_context`: most tokens of a short context; 0 if no context counts as short."""
        self.widths = width_buckets(WIDTHS, shape.max_width)
        self.rows = row_buckets(shape.num_rows)
        self._shape = shape
        self._short_context = short_context

    def fit(self, width: int, num_rows: int, longest: int | None = None) -> StepBucket:
        """Return the bucket of a burst, with at least one node for each row if there is such a width.

        `longest`: tokens of the longest context, None for any number.
        """
        rows = self.rows[bisect_left(self.rows, num_rows)]
        found = self.widths[bisect_left(self.widths, min(max(width, rows), self.widths[-1]))]
        short = longest is not None and 0 < self._short_context >= longest
        return StepBucket(found, rows, self._shape.branching_of(rows), short and rows == 1 and found <= SHORT_WIDTH)

    def sizes(self) -> list[StepBucket]:
        """Return the distinct `StepBucket.sizes` of all buckets, largest first."""
        return sorted({bucket.sizes for bucket in self.all()}, reverse=True)

    def all(self) -> list[StepBucket]:
        """Return all buckets, largest first, so that the first capture sizes the shared memory pool."""
        lengths = (None, 0) if self._short_context else (None,)
        found = {self.fit(*each) for each in product(self.widths, self.rows, lengths)}
        if self._shape.has_blocks:
            found |= {bucket._replace(fresh=True) for bucket in found}
        return sorted(found, reverse=True)
