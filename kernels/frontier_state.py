"""Device memory of drafting: a burst's candidates, requests and tokens, block heads' blocks, trees grown in a round."""

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

# Words of each row of new roots, in front of its new tree slots.
NEW_ROOT, NEW_ROOT_SLOT, SHIFT, NUM_NEW_SLOTS = range(4)
REROOT_WORDS = 4
NOT_HERE = -2
"""In place of a new root's tree slot: it is not in the pool, and nothing is below it."""

# Words in front of new seeds, which a burst gets as it goes on; their fields follow.
FIRST_SEED, NUM_NEW_SEEDS = range(2)
SEED_HEADER_WORDS = 4

MAX_ENTRIES = 1 << 20
"""Of a pool."""


@dataclass(frozen=True, slots=True)
class CandidatePool:
    """Nodes that a burst may run: C entries, seeds first, the candidates of its steps from `max_seeds` on.

    Attributes:
        entries: int32 [8, C], one row a field. ROW: row of the burst. PARENT: tree slot of the parent, -1 where all
            before the token is context. TOKEN. POSITION: in the sequence. SLOT: tree slot that the entry must take, -1
            for any, and, once it was run, the one that it took. FEATURE: row of the given features, -1 for what the
            parent's step returned. SCORE: path score, bits of a float32, -inf once it is used up. BASE: path score from
            which its candidates count, likewise.
        max_seeds: entries of seeds.
    """

    entries: Tensor
    max_seeds: int

    @property
    def capacity(self) -> int:
        """Entries in all, C."""
        return self.entries.shape[1]


@dataclass(frozen=True, slots=True)
class BurstRows:
    """The requests of a burst: B rows with a region of R tree slots each, W = R / 32 words. All int32.

    Attributes:
        table_rows: [B], the row's place in page tables and slot masks; padding rows share one that nobody owns.
        context_len: [B], KV positions of the context.
        num_free: [B], tree slots that the burst was given.
        next_free: [B], how many of them are taken; steps raise it.
        live: [B, W], bit t % 32 of word t // 32 is set where tree slot t holds a live node when the burst begins.
        free: [B, R], tree slots to take, in this order; what was given as number n lies at n % R.
    """

    table_rows: Tensor
    context_len: Tensor
    num_free: Tensor
    next_free: Tensor
    live: Tensor
    free: Tensor

    def head(self, num_rows: int) -> BurstRows:
        """The first `num_rows` rows."""
        return BurstRows(*(getattr(self, name)[:num_rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step: M places, those of a row one after the other, parents before children; padding behind.

    Attributes:
        token_ids: int32 [M], 0 for padding.
        rotary: int32 [M], KV position of the token; 0 for padding.
        rows: int32 [M], row of the burst, -1 for padding.
        table_rows: int32 [M], the row's place in tables, -1 for padding.
        first: int32 [B + 1], where each row's tokens begin.
        kv_slots: int32 [M], -1 for padding.
        mask: int32 [M, W], tree slots that the token sees, itself included; 0 for padding.
        picked: int32 [M], pool index; -1 for padding.
        slots: int32 [M], tree slot; -1 for padding.
        positions: int32 [M], position of the token in the sequence; 0 for padding.
        bases: float32 [M], path score from which its candidates count; -inf for padding.
        sources: int64 [M], row of the feature store that the token reads.
        targets: int64 [M], row of the feature store that the step writes.
        order: int32 [M], -1 between steps: pool indices, the best first.
        links: int32 [3, M], scratch.
        keys: int64 [at least C], scratch of the choice from a pool of C entries.
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
        """Memory for `width` tokens of `num_rows` rows, from pools of at most `capacity` entries.

        References need no `capacity`.
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

    Rows of the feature store: one for each tree slot of each of the T table rows, one of zeros, then the given ones.

    Attributes:
        page_tables: int32 [T, P], rows contiguous.
        slot_masks: int32 [T, R, W], tree slots that a slot's token sees, itself included.
        page_size: tokens in a page.
        region_base: logical position of tree slot 0, the same in every row.
        lag: how far a token's KV position lies before its position.
    """

    page_tables: Tensor
    slot_masks: Tensor
    page_size: int
    region_base: int
    lag: int


class BlockStore(NamedTuple):
    """What the blocks of N requests say, G guesses each: of each the last one's places, one behind another.

    The last request is for padding.
    """

    begins: Tensor
    """int32 [N], the position of the root whose block it is."""
    rows: Tensor
    """[N * G, hidden]."""
    logits: Tensor
    """float32 [N * G, vocab_size], without what DSPARK's sequential part adds."""


class BlockRoots(NamedTuple):
    """The roots of the blocks of R requests. Tensors on the device, int32 but for `places`."""

    token_ids: Tensor
    """[M], tokens among which the roots are."""
    places: Tensor
    """int32 or int64 [R], which of them; read only where there is a root."""
    there: Tensor
    """[R], negative where there is no root."""
    positions: Tensor
    """[R], in the sequence; 0 where there is no root."""
    table_rows: Tensor
    """[R]"""
    context_len: Tensor
    """[R], positions of the context that the block sees, from the first on."""


class BlockLayout(NamedTuple):
    """The places of R blocks of S, one block behind another, W words of mask each. Tensors int32 on the device."""

    tokens: Tensor
    """[R], the roots' token ids; 0 where there is none."""
    rows: Tensor
    """[R], the roots' table rows; -1 where there is none."""
    token_ids: Tensor
    """[R * S], masks but for the first of each block, which is the root's."""
    positions: Tensor
    """[R * S], in the sequence."""
    first: Tensor
    """[R + 1], where blocks begin."""
    slots: Tensor
    """[R * S], their scratch; -1 where there is no root."""
    mask: Tensor
    """[R * S, W], bits of the tree slots that the block sees, if any are given, then those of all its own places."""


@dataclass(frozen=True, slots=True)
class CommittedTokens(RoundTokens):
    """The tokens that a round committed, as a drafter's forward takes them: E slots over the round's B rows.

    Fields of RoundTokens are int32; `positions` and `cached_len` are places in the drafter's page tables, which may
    leave out pages of the sequence, each token hangs below the one before it in its row, and `root` is the slot of a
    row's last token, 0 where it has none.
    """

    rotary: Tensor
    """int32 [E], KV position of the token in the sequence: nothing is left out."""
    context_len: Tensor
    """int32 [B], places that the row has when these tokens are context; 0 where it has none."""

    sources: Tensor
    """int64 [E], target KV slot whose feature goes with the token: that of the position before it; `spare` for padding.
    """
    last: Tensor
    """int64 [B], as `root`."""
    draft_rows: Tensor
    """int32 [B], `table_rows` where the row has tokens, else -1."""
    root_positions: Tensor
    """int32 [B], position in the sequence of the row's last token; 0 where it has none."""

    _OF_ROWS: ClassVar = RoundTokens._OF_ROWS | {"context_len", "last", "draft_rows", "root_positions"}

    @classmethod
    def new(cls, num_tokens: int, num_rows: int, device: torch.device) -> CommittedTokens:
        """Memory for `num_tokens` tokens of `num_rows` rows."""
        kinds = dict.fromkeys(("sources", "last"), torch.int64)
        sizes = cls.sizes(num_tokens, num_rows).items()
        return cls(**{name: torch.zeros(n, dtype=kinds.get(name, torch.int32), device=device) for name, n in sizes})


@dataclass(frozen=True, slots=True)
class GrownTrees:
    """Nodes that were chosen of the trees grown behind a round.

    Attributes:
        order: int32 [N], pool indices, the best node first, parents before children; -1 behind them.
        pool: what the trees were grown in; ROW is a row of the tables, BASE holds path scores, SLOT the tree slot of
            nodes that were run.
    """

    order: Tensor
    pool: CandidatePool

    @classmethod
    def new(cls, most_nodes: int, device: torch.device) -> GrownTrees:
        """Memory for so many nodes, none yet."""
        order = torch.full((most_nodes,), -1, dtype=torch.int32, device=device)
        return cls(order, CandidatePool(torch.zeros(NUM_FIELDS, most_nodes, dtype=torch.int32, device=device), 0))


@dataclass(frozen=True, slots=True)
class NodePicker:
    """Memory for the choice of the best N nodes of a pool, and for the nodes that were chosen, L at most.

    Attributes:
        trees: the chosen nodes in a pool of their own.
        choice: the choice's scratch: `order` int32 [N], `keys` and `tally`.
        header: int32 [4], as the choice reads it.
        rows: under which all nodes may be chosen.
    """

    trees: GrownTrees
    choice: StepTokens
    header: Tensor
    rows: BurstRows

    @classmethod
    def new(cls, trees: GrownTrees, num_nodes: int, capacity: int, num_rows: int, floor: float) -> NodePicker:
        """Memory for the choice of `num_nodes` of pools of `capacity` entries and `num_rows` rows, which go to `trees`.

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
        row_of: [T], the round's row of each row of the tables; -1 where its tree is not wanted.
        max_nodes: [B], nodes that a row of the round takes at most, beside those that it has.
        max_depth: [B], how far below the root they may lie.
        most: [1], how many of the best nodes of all trees are looked at.
    """

    row_of: Tensor
    max_nodes: Tensor
    max_depth: Tensor
    most: Tensor
