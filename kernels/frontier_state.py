"""Device memory of drafting: a burst's candidates, requests and tokens, blocks of block heads, grown trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kernels.sampling_state import RoundTokens

# Fields of a pool entry.
ROW, PARENT, TOKEN, POSITION, SLOT, FEATURE, SCORE, BASE = range(8)
NUM_FIELDS = 8

# Words of the header.
STEP, NUM_SEEDS, FLOOR = range(3)
HEADER_WORDS = 4

# Words of each row of new roots, before its new tree slots.
NEW_ROOT, NEW_ROOT_SLOT, SHIFT, NUM_NEW_SLOTS = range(4)
REROOT_WORDS = 4
NOT_HERE = -2
"""Value of NEW_ROOT_SLOT for a new root that is not in the pool and has nothing below it."""

# Words before the fields of new seeds, which a running burst gets.
FIRST_SEED, NUM_NEW_SEEDS = range(2)
SEED_HEADER_WORDS = 4

MAX_ENTRIES = 1 << 20
"""Most entries of a pool."""


@dataclass(frozen=True, slots=True)
class CandidatePool:
    """Nodes that a burst may run: C entries, seeds first, then from `max_seeds` on the candidates of its steps.

    Attributes:
        entries: int32 [8, C], one row a field. ROW: row of the burst. PARENT: tree slot of the parent, -1 if everything
            before the token is context. TOKEN. POSITION: in the sequence. SLOT: tree slot that the entry must take, -1
            for any; once it has run, the slot that it took. FEATURE: row of the given features, -1 for the feature that
            the parent's step returned. SCORE: path score, bits of a float32, -inf once the entry is used up. BASE: path
            score to which edge scores of its candidates are added, bits of a float32.
        max_seeds: number of entries for seeds.
    """

    entries: Tensor
    max_seeds: int

    @property
    def capacity(self) -> int:
        """Number of entries, C."""
        return self.entries.shape[1]


@dataclass(frozen=True, slots=True)
class BurstRows:
    """The requests of a burst: B rows with a region of R tree slots each, W = R / 32 words. All int32.

    Attributes:
        table_rows: [B], the row's index in page tables and slot masks; padding rows share one that no request owns.
        context_len: [B], KV positions of the context.
        num_free: [B], tree slots that the burst was given.
        next_free: [B], how many of these tree slots are taken; steps raise it.
        live: [B, W], bit t % 32 of word t // 32 is set where tree slot t holds a live node when the burst begins.
        free: [B, R], tree slots in the order in which they are taken; the slot given as number n lies at n % R.
    """

    table_rows: Tensor
    context_len: Tensor
    num_free: Tensor
    next_free: Tensor
    live: Tensor
    free: Tensor

    def head(self, num_rows: int) -> BurstRows:
        """Return the first `num_rows` rows."""
        return BurstRows(*(getattr(self, name)[:num_rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step: M places, row by row, parents before children, then padding.

    Attributes:
        token_ids: int32 [M], 0 for padding.
        rotary: int32 [M], KV position of the token; 0 for padding.
        rows: int32 [M], row of the burst, -1 for padding.
        table_rows: int32 [M], the row's index in tables, -1 for padding.
        first: int32 [B + 1], where each row's tokens begin.
        kv_slots: int32 [M], -1 for padding.
        mask: int32 [M, W], tree slots that the token sees, itself included; 0 for padding.
        picked: int32 [M], pool index; -1 for padding.
        slots: int32 [M], tree slot; -1 for padding.
        positions: int32 [M], position of the token in the sequence; 0 for padding.
        bases: float32 [M], path score to which edge scores of the token's candidates are added; -inf for padding.
        sources: int64 [M], row of the feature store that the token reads.
        targets: int64 [M], row of the feature store that the step writes.
        order: int32 [M], -1 between steps: pool indices, the best first.
        links: int32 [3, M], scratch.
        keys: int64 [at least C], scratch for the choice from a pool of C entries.
        tally: int64 [1], 0 between launches.
    """

    token_ids: Tensor
    rotary: Tensor
    rows: Tensor
    table_rows: Tensor
    first: Tensor
    kv_slots: Tensor
    mask: Tensor
    picked: Tensor
    slots: Tensor
    positions: Tensor
    bases: Tensor
    sources: Tensor
    targets: Tensor
    order: Tensor
    links: Tensor
    keys: Tensor
    tally: Tensor

    @classmethod
    def new(cls, width: int, num_rows: int, words: int, device: torch.device, capacity: int = 0) -> StepTokens:
        """Return memory for `width` tokens of `num_rows` rows, from pools of at most `capacity` entries.

        Torch references need no `capacity`.
        """

        def ints(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            token_ids=ints(width),
            rotary=ints(width),
            rows=ints(width, value=-1),
            table_rows=ints(width, value=-1),
            first=ints(num_rows + 1),
            kv_slots=ints(width, value=-1),
            mask=ints(width, words),
            picked=ints(width, value=-1),
            slots=ints(width, value=-1),
            positions=ints(width),
            bases=torch.full((width,), float("-inf"), device=device),
            sources=ints(width, dtype=torch.int64),
            targets=ints(width, dtype=torch.int64),
            order=ints(width, value=-1),
            links=ints(3, width),
            keys=ints(capacity, dtype=torch.int64),
            tally=ints(1, dtype=torch.int64),
        )


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """Where tree slots and features of all rows lie; the same for every burst.

    The feature store has a row for each tree slot of each of the T table rows, a row of zeros, then the given features.

    Attributes:
        page_tables: int32 [T, P], rows contiguous.
        slot_masks: int32 [T, R, W], tree slots that the token in a slot sees, its own included.
        page_size: tokens in a page.
        region_base: logical position of tree slot 0, the same in every row.
        lag: a token's position minus its KV position.
    """

    page_tables: Tensor
    slot_masks: Tensor
    page_size: int
    region_base: int
    lag: int


class BlockStore(NamedTuple):
    """Guesses of block heads for N requests: the G places of each request's latest block, request by request.

    The last request is for padding.
    """

    begins: Tensor
    """int32 [N], position of the block's root."""
    rows: Tensor
    """[N * G, hidden]."""
    logits: Tensor
    """float32 [N * G, vocab_size], without the logits that DSPARK's sequential part adds."""


class BlockRoots(NamedTuple):
    """The roots of the blocks of R requests. int32 tensors on the device."""

    token_ids: Tensor
    """[M], tokens that include the roots."""
    places: Tensor
    """[R], index of the root in `token_ids`; read only where there is a root."""
    there: Tensor
    """[R], negative where there is no root."""
    positions: Tensor
    """[R], positions in the sequence; 0 where there is no root."""
    table_rows: Tensor
    """[R]"""
    context_len: Tensor
    """[R], length of the context that the block sees."""


class BlockLayout(NamedTuple):
    """R blocks of S places each, block by block, with W words of mask a place. int32 tensors on the device."""

    tokens: Tensor
    """[R], the roots' token ids; 0 where there is none."""
    rows: Tensor
    """[R], the roots' table rows; -1 where there is none."""
    token_ids: Tensor
    """[R * S], mask tokens, except for the first of each block, which is the root's."""
    positions: Tensor
    """[R * S], in the sequence."""
    first: Tensor
    """[R + 1], where blocks begin."""
    slots: Tensor
    """[R * S], scratch KV slots; -1 where there is no root."""
    mask: Tensor
    """[R * S, W], bits of the tree slots that the block sees, if given, then bits of all places of the block."""


@dataclass(frozen=True, slots=True)
class CommittedTokens(RoundTokens):
    """The tokens that a round committed, laid out for a drafter's forward: E slots over the round's B rows.

    All fields are int32. `positions` and `cached_len` are places in the drafter's page tables, which may
    leave out pages of the sequence. Each token's parent is the token before it in its row. `root` is the slot of a
    row's last token, 0 for rows without tokens.
    """

    rotary: Tensor
    """[E], KV position of the token in the sequence, with no pages left out."""
    context_len: Tensor
    """[B], places of the row once these tokens are context; 0 for rows without tokens."""
    sources: Tensor
    """[E], the target's KV slot of the position before the token, whose feature it takes; `spare` for padding."""
    draft_rows: Tensor
    """[B], `table_rows` where the row has tokens, otherwise -1."""
    root_positions: Tensor
    """[B], position in the sequence of the row's last token; 0 for rows without tokens."""

    _OF_ROWS: ClassVar = RoundTokens._OF_ROWS | {"context_len", "draft_rows", "root_positions"}

    @classmethod
    def new(cls, num_tokens: int, num_rows: int, device: torch.device) -> CommittedTokens:
        """Return memory for `num_tokens` tokens of `num_rows` rows."""
        sizes = cls.sizes(num_tokens, num_rows).items()
        return cls(**{name: torch.zeros(n, dtype=torch.int32, device=device) for name, n in sizes})


@dataclass(frozen=True, slots=True)
class GrownTrees:
    """Chosen nodes of the trees that were grown behind a round.

    Attributes:
        order: int32 [N], pool indices, the best node first, parents before children; -1 after them.
        pool: holds the nodes; ROW is a row of the tables, BASE holds path scores, SLOT the tree slot of nodes that were
            run.
    """

    order: Tensor
    pool: CandidatePool

    @classmethod
    def new(cls, most_nodes: int, device: torch.device) -> GrownTrees:
        """Return memory for `most_nodes` nodes, with none chosen."""
        order = torch.full((most_nodes,), -1, dtype=torch.int32, device=device)
        return cls(order, CandidatePool(torch.zeros(NUM_FIELDS, most_nodes, dtype=torch.int32, device=device), 0))


@dataclass(frozen=True, slots=True)
class NodePicker:
    """Memory to choose the best N nodes of a pool, and for the chosen nodes, at most L.

    Attributes:
        trees: the chosen nodes in a pool of their own.
        choice: the choice's scratch: `order` int32 [N], `keys` and `tally`.
        header: int32 [4], the header that the choice reads.
        rows: a row that lets every node be chosen.
    """

    trees: GrownTrees
    choice: StepTokens
    header: Tensor
    rows: BurstRows

    @classmethod
    def new(cls, trees: GrownTrees, num_nodes: int, capacity: int, num_rows: int, floor: float) -> NodePicker:
        """Return memory to choose `num_nodes` nodes from pools of `capacity` entries and `num_rows` rows into `trees`.

        Nodes with path scores below `floor` are not chosen.
        """
        device = trees.order.device
        ones = torch.ones(num_rows, dtype=torch.int32, device=device)
        zeros = torch.zeros_like(ones)
        empty = zeros[:, None]
        header = torch.zeros(HEADER_WORDS, dtype=torch.int32)
        header[STEP] = 1
        header[FLOOR : FLOOR + 1] = torch.tensor([floor], dtype=torch.float32).view(torch.int32)
        return cls(
            trees=trees,
            choice=StepTokens.new(num_nodes, 1, 1, device, capacity),
            header=header.to(device),
            rows=BurstRows(zeros, zeros, ones, zeros, empty, empty),
        )


@dataclass(frozen=True, slots=True)
class MergeLimits:
    """Limits on the trees that a round takes. All int32.

    Attributes:
        row_of: [T], the round's row of each row of the tables; -1 if its tree is ignored.
        max_nodes: [B], most nodes that are added to a row of the round.
        max_depth: [B], how far below the root grown nodes may lie.
        most: [1], how many of the best nodes of all trees are considered.
    """

    row_of: Tensor
    max_nodes: Tensor
    max_depth: Tensor
    most: Tensor
