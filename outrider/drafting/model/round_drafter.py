"""Drafting inside the round: behind a verify round, on its device, trees grow from the tokens just committed.

A round's work on the device is one sequence without the host in between. First come verify's forward, sampling and
walk. Then come, in this module, the drafter's forward over the committed tokens with the target's true features
(extension), steps of best-first growth over all requests, and the choice of the best nodes. The next round's graph
hangs these below its roots. Draft KV lies in slots with the same numbers as the target's, so that pages, the radix
cache and preemption are the target's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.frontier_state import (
    BASE,
    NUM_FIELDS,
    PARENT,
    ROW,
    SLOT,
    TOKEN,
    BlockRoots,
    BurstRows,
    CommittedTokens,
    GrownTrees,
    MergeLimits,
    NodePicker,
)
from kernels.round_trees import lay_out_committed, merge_trees, pick_nodes, plant_roots
from kernels.sampling_state import RoundTokens
from outrider.attention.base import AttentionBackend
from outrider.attention.paged import MAX_PATH, PagedBatch, PromptChunk, TreeBuffers, choose_splits
from outrider.device import num_processors, put
from outrider.drafting.model.burst import BurstShape, StepBucket
from outrider.drafting.model.cuda_forward import BlockSteps, ContextForward, DraftSteps
from outrider.drafting.model.device_memory import DeviceMemory
from outrider.graphs import GraphPool
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.heads import BlockHead
from outrider.sampling.params import SamplingParams
from outrider.sampling.proposer import Proposer

MAX_CHOSEN = 256
"""Largest number of nodes, over all requests, that a round is given."""


@dataclass(frozen=True, slots=True)
class RowLimits:
    """The part of each row's grown tree that a round takes, and whether the row's next tree is to be grown."""

    table_rows: list[int] = field(default_factory=list)
    max_nodes: list[int] = field(default_factory=list)
    max_depth: list[int] = field(default_factory=list)
    is_drafted: list[bool] = field(default_factory=list)


NO_ROWS = RowLimits()


class GrownNodes(NamedTuple):
    """Nodes for one row of a round, parents first: those that the host gave, then grown ones, likeliest first."""

    token_ids: list[int]
    parents: list[int]
    """Index of each node's parent; -1 below the root."""
    scores: list[float]
    """Path scores of grown nodes; 1 for nodes that only the host gave."""


class VerifiedTrees(NamedTuple):
    """The tokens of a round with its trees, on the host, one row's behind the other's."""

    token_ids: list[int]
    parents: list[int]
    scores: list[float]
    first: list[int]
    """Where each row's tokens begin, and where the last one's end."""

    def nodes(self, row: int, num_extend: int) -> GrownNodes:
        """Return the nodes of a row, which are behind its first `num_extend` tokens."""
        begin, end = self.first[row] + num_extend, self.first[row + 1]
        parents = [max(parent - begin, -1) for parent in self.parents[begin:end]]
        return GrownNodes(self.token_ids[begin:end], parents, self.scores[begin:end])


class RoundTrees:
    """The tokens of a round with its trees, in memory for the largest round: one copy to the device, and one back."""

    def __init__(self, max_tokens: int, max_rows: int, device: torch.device) -> None:
        pinned = device.type == "cuda"

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        def host_ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, pin_memory=pinned)

        parts = [max_rows + 1, max_rows, max_rows, max_rows, 1]
        self._staged_limits, self._limits = host_ints(sum(parts)), ints(sum(parts))
        self._host_limits = [part.numpy() for part in self._staged_limits.split(parts)]
        self._row_of, self._max_nodes, self._max_depth, self._drafted, self._most = self._limits.split(parts)
        parts = [max_tokens, max_tokens, max_tokens, max_rows + 1]
        self._read, self._nodes = host_ints(sum(parts)), ints(sum(parts))
        token_ids, parents, scores, first = self._read.split(parts)
        self._host_nodes = [part.numpy() for part in (token_ids, parents, scores.view(torch.float32), first)]
        token_ids, parents, scores, first = self._nodes.split(parts)
        self._scores = scores.view(torch.float32)
        self._fetched = host_ints(1 + NUM_FIELDS, MAX_CHOSEN)
        self._fetched_at = torch.cuda.Event() if pinned else None
        positions, rows, root, table_rows = ints(max_tokens), ints(max_tokens), ints(max_rows), ints(max_rows)
        self._tokens = RoundTokens(token_ids, positions, parents, rows, first, root, table_rows, cached_len=root)
        self.set_limits(NO_ROWS)

    def set_limits(self, rows: RowLimits, num_nodes: int = 0) -> None:
        """Set what the rows of the next round take, in their order, of the best `num_nodes` nodes of all trees.

        All other rows take nothing.
        """
        count = len(rows.table_rows)
        row_of, *of_rows, most = self._host_limits
        row_of[:] = -1
        taking = [row for row, max_nodes in enumerate(rows.max_nodes) if max_nodes]
        row_of[[rows.table_rows[row] for row in taking]] = taking
        most[0] = num_nodes
        for limits, given in zip(of_rows, (rows.max_nodes, rows.max_depth, rows.is_drafted), strict=True):
            limits[:count] = given
            limits[count:] = 0

    def to_device(self) -> None:
        """Queue the copy of the limits that `set_limits` has set; may be captured."""
        self._limits.copy_(self._staged_limits, non_blocking=True)

    def drafted(self, num_rows: int) -> Tensor:
        """Return flags on the device, int32 [num_rows], 1 where the next tree is to be grown."""
        flags: Tensor = self._drafted[:num_rows]
        return flags

    def tokens(self, base: RoundTokens) -> RoundTokens:
        """Return the memory that `merge` writes a round of the base's size to."""
        own = self._tokens.head(base.token_ids.shape[0], base.table_rows.shape[0])
        return replace(own, cached_len=base.cached_len)

    def merge(self, base: RoundTokens, grown: GrownTrees) -> RoundTokens:
        """Hang grown trees below the roots of a round that the host laid out, perhaps with nodes; may be captured."""
        out, num_rows, num_tokens = self.tokens(base), base.table_rows.shape[0], base.token_ids.shape[0]
        limits = MergeLimits(self._row_of, self._max_nodes[:num_rows], self._max_depth[:num_rows], self._most)
        seen = GrownTrees(grown.order[:num_tokens], grown.pool)
        merge_trees(base, seen, limits, out, self._scores[:num_tokens])
        return out

    def fetch(self, grown: GrownTrees) -> None:
        """Queue the copy of all chosen nodes to the host, before a round has taken any."""
        self._fetched[0].copy_(grown.order, non_blocking=True)
        self._fetched[1:].copy_(grown.pool.entries, non_blocking=True)
        if self._fetched_at is not None:
            self._fetched_at.record()

    def fetched(self, table_row: int, max_nodes: int) -> GrownNodes:
        """Return the best nodes that were fetched for a row of the tables; waits for the copy."""
        if self._fetched_at is not None:
            self._fetched_at.synchronize()
        order, entries = self._fetched[0].numpy(), self._fetched[1:].numpy()
        mine = (np.flatnonzero((order >= 0) & (entries[ROW] == table_row)))[:max_nodes]
        token_ids, slots, above = (entries[field, mine].tolist() for field in (TOKEN, SLOT, PARENT))
        places = {slot: place for place, slot in enumerate(slots) if slot >= 0}
        return GrownNodes(
            token_ids,
            [places[slot] if slot >= 0 else -1 for slot in above],
            entries[BASE, mine].view(np.float32).tolist(),
        )

    def to_host(self) -> None:
        """Queue the copy of the merged round; may be captured."""
        self._read.copy_(self._nodes, non_blocking=True)

    def read(self, num_rows: int) -> VerifiedTrees:
        """Return the first rows of the last round, once it has ended and before the next one has."""
        first = self._host_nodes[-1][: num_rows + 1].tolist()
        token_ids, parents, scores = (part[: first[-1]].tolist() for part in self._host_nodes[:-1])
        return VerifiedTrees(token_ids, parents, scores, first)


_LEAST_WIDTH = 16
"""Least number of nodes in a step: up to 32 cost hardly more than one."""
MAX_COMMITTED = 32
"""Largest number of tokens that a round commits for one request."""

FeatureRows = Callable[[Tensor], Tensor]
"""Returns the target's features [N, feature_size] of KV slots int32 [N], as the drafter takes them; may be captured."""


class RoundResults(NamedTuple):
    """Results of a verify round of B rows on the device, in tensors whose addresses are fixed."""

    tokens: RoundTokens
    num_tokens: Tensor
    """int32 [B], tokens that each row committed."""
    committed: Tensor
    """int32 [B, D], the committed tokens."""
    drafts: Tensor
    """int32 [B], not 0 where the row's tree is to be grown; the drafter has KV of all tokens committed before."""


class RoundShape(NamedTuple):
    """Sizes of a verify round: slots for the tokens that it commits, and rows."""

    tokens: int
    rows: int


class ChoiceShape(NamedTuple):
    """The number of nodes to choose, and the rows of the round behind which they are chosen."""

    nodes: int
    rows: int


class RoundExecutor(Protocol):
    """The executor behind whose rounds trees grow."""

    def results(self, shape: RoundShape) -> RoundResults:
        """Return the results of rounds of this shape."""

    def note_drafted(self) -> None:
        """Queue, behind the drafting of a round, a note of the device's time; may be captured."""


class RoundDrafter:
    """Grows trees behind the rounds of one executor, whose rows and pages it uses. One thread calls it."""

    def __init__(
        self,
        model: DraftModel,
        shape: BurstShape,
        attention: AttentionBackend,
        rounds: RoundExecutor,
        features: FeatureRows | None,
        *,
        max_round_tokens: int,
        vocab_limit: int,
        floor: float,
        chunk_size: int = 2048,
        compiling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`shape`: has the executor's rows and pages; `max_seeds` is ignored. `features`: for a model that takes them.

        `vocab_limit`: target ids at or past this are never proposed. `floor`: least path score of a node. `compiling`:
        see GraphPool.
        """
        device = model.device
        shape = replace(shape, max_seeds=shape.num_rows * shape.most_branching)
        self.shape = shape
        self._model = model
        self._attention = attention
        self._rounds = rounds
        self._features = features
        self._floor = floor
        self.memory = DeviceMemory(model, shape)
        self._proposer = Proposer(
            shape.num_rows + 1,
            max(shape.max_width, shape.num_rows),
            model.vocab_size,
            vocab_limit,
            model.target_ids,
            device,
            scale=model.edge_scale,
        )
        self._contexts = ContextForward(model, self.memory, shape, attention, chunk_size)
        num_rows, seeds = shape.num_rows, shape.max_seeds

        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        free = torch.arange(shape.region, dtype=torch.int32, device=device).repeat(num_rows, 1)
        of_rows = (ints(num_rows), ints(num_rows), ints(num_rows), ints(num_rows))
        rows = BurstRows(*of_rows, ints(num_rows, shape.region // 32), free)
        results = ints(shape.max_steps * shape.max_width * (2 + 2 * shape.most_branching))  # never read
        kind: type[DraftSteps] = BlockSteps if isinstance(model, BlockHead) else DraftSteps
        self._steps = kind(model, self.memory, attention, self._proposer, shape, ints(4), rows, results, _num_seeds)
        self._committed = CommittedTokens.new(max_round_tokens, num_rows, device)
        self._trees = TreeBuffers(max_round_tokens, MAX_PATH, device)
        self._root_tokens, self._root_scores = ints(seeds), torch.zeros(seeds, dtype=torch.float32, device=device)
        self._pickers: dict[ChoiceShape, NodePicker] = {}
        self.grown = GrownTrees.new(MAX_CHOSEN, device)
        """The nodes chosen last."""
        self.extensions = GraphPool[RoundShape]("extensions of drafts", self._extend, compiling=compiling)
        self.steps = GraphPool[StepBucket]("draft steps", self._steps.run, compiling=compiling)
        self.choices = GraphPool[ChoiceShape]("choices of nodes", self._choose, compiling=compiling)

    @property
    def lag(self) -> int:
        """How far a token's KV position lies before its position in the sequence."""
        return self.shape.lag

    def admit(self, row: int, sampling: SamplingParams) -> None:
        """Begin a request in a free row. The caller enters the executor's pages in `memory` as the row gets them."""
        self.memory.cut(row, 0, ())
        self._proposer.admit(row, sampling)

    def cut(self, row: int, shift: int, pages: Sequence[int]) -> None:
        """Leave out `shift` pages behind a row's first tokens; see DeviceMemory.cut."""
        self.memory.cut(row, shift, pages)

    def compute_context(self, chunks: Sequence[PromptChunk], feature_slots: Sequence[int]) -> None:
        """Queue the drafter's forward over committed tokens; a chunk sees earlier chunks of its row.

        A chunk's `start` and `slots` are KV places and slots of the drafter. A token at position p has the place
        p - `lag`, less what the row leaves out; with a lag, a sequence's first token has none. `feature_slots`: for a
        model with features, the target KV slot of the position before each token.
        """
        given = None
        if self._features is not None:
            given = self._features(put(feature_slots, self._model.device))
        self._contexts.run_at(chunks, given)

    def grow(self, shape: RoundShape, num_steps: int, num_nodes: int) -> None:
        """Queue the drafting behind a round of this shape: `num_steps` steps, and the choice of `num_nodes` nodes.

        The first step is the extension itself, which brings the children of the new roots.
        """
        step = self.step_shape(shape.rows)
        self.extensions.run(shape)
        for _ in range(num_steps - 1):
            self.steps.run(step)
        self.choices.run(ChoiceShape(num_nodes, shape.rows))

    def step_shape(self, num_rows: int) -> StepBucket:
        """Return the shape of steps behind rounds of `num_rows` rows: a few nodes per request, depth before width."""
        width = min(max(_LEAST_WIDTH, 2 * num_rows), self.shape.max_width)
        return StepBucket(width, num_rows, self.shape.branching_of(num_rows))

    def capture(self, shapes: Sequence[RoundShape], choices: Sequence[ChoiceShape]) -> None:
        """Capture extensions behind rounds of these shapes, steps, and choices. Overwrites the KV cache."""
        steps = sorted({self.step_shape(shape.rows) for shape in shapes}, reverse=True)
        self._steps.clear()
        self.extensions.capture(sorted(shapes, reverse=True), True)
        self._steps.clear()
        self.steps.capture(steps, True)
        self._steps.clear()
        self.choices.capture(sorted(choices, reverse=True), True)
        self._contexts.capture()

    def _extend(self, shape: RoundShape) -> None:
        """Run the drafter over the committed tokens, and begin a tree below each new root; may be captured."""
        results, out = self._rounds.results(shape), self._committed.head(*shape)
        plan, model, rows = self.memory.plan, self._model, shape.rows
        lay_out_committed(
            results.tokens,
            results.num_tokens,
            results.committed,
            results.drafts,
            plan.page_tables,
            self.memory.shifts,
            out,
            page_size=plan.page_size,
            lag=plan.lag,
            spare=self.shape.num_pages * plan.page_size,
        )
        longest = min(shape.tokens, MAX_COMMITTED)
        heads = (model.num_heads, model.num_kv_heads)
        splits = choose_splits(shape.tokens, rows, longest, *heads, num_processors(model.device))
        batch = self._trees.batch(out, plan.page_tables, plan.page_size, longest, splits, by_path=False)
        batch.positions = out.rotary
        logits = self._run_roots(out, batch)
        step = self.step_shape(rows)
        flat, size = slice(rows * step.branching), (rows, step.branching)
        found, scores = self._root_tokens[flat].view(size), self._root_scores[flat].view(size)
        self._proposer(logits, out.draft_rows, out.root_positions, found, scores)
        planted = (self._steps.header, self._steps.pool(step), self._steps.rows.head(rows))
        plant_roots(*planted, out, found, scores, self._floor, plan.lag)

    def _run_roots(self, out: CommittedTokens, batch: PagedBatch) -> Tensor:
        """Run the drafter over committed tokens, and store what each row's root leaves to its children.

        The root is a row's last token. Returns the roots' logits float32 [B, vocab_size].
        """
        model, kv, store = self._model, self.memory.kv, self.memory.features
        given = None if self._features is None else self._features(out.sources)
        if isinstance(self._steps, BlockSteps) and isinstance(model, BlockHead):
            model.extend(batch, given, batch.slots, kv, self._attention)
            length = out.root_positions
            at = BlockRoots(out.token_ids, out.root, out.draft_rows, length, out.table_rows, out.context_len)
            layout = self._steps.run_blocks(at)
            nothing = torch.zeros(length.shape[0], model.state_size, dtype=model.dtype, device=length.device)
            logits, left = self._steps.read(layout.rows, layout.tokens, length, nothing)
            if store is not None:
                store[self.memory.first_given :][: left.shape[0], : model.state_size].copy_(left)
            return logits
        hidden, features = model.forward(batch, given, kv, self._attention)
        if store is not None and features is not None:
            into = store[self.memory.first_given :][: out.root.shape[0], : self.shape.feature_size]
            into.copy_(features.index_select(0, out.root))
        return model.logits(hidden.index_select(0, out.root))

    def _choose(self, shape: ChoiceShape) -> None:
        """Choose the best nodes of all trees; may be captured."""
        step = self.step_shape(shape.rows)
        pool = self._steps.pool(step)
        picker = self._pickers.get(shape)
        if picker is None:
            made = NodePicker.new(self.grown, shape.nodes, pool.capacity, shape.rows, self._floor)
            # Another thread may compile the choice of the same shape.
            picker = self._pickers.setdefault(shape, made)
        tables = self._steps.rows.table_rows[: shape.rows]
        pick_nodes(self._steps.header, pool, tables, step.num_candidates, picker)
        self._rounds.note_drafted()


def _num_seeds(bucket: StepBucket) -> int:
    return bucket.rows * bucket.branching
