"""Bursts for the tests of the frontier's kernels: pools, rows and candidates made up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import ModuleType

import torch
from torch import Tensor

from kernels import frontier
from kernels.frontier_state import (
    FIRST_SEED,
    NOT_HERE,
    NUM_FIELDS,
    NUM_NEW_SEEDS,
    REROOT_WORDS,
    SCORE,
    SEED_HEADER_WORDS,
    SLOT,
    BurstRows,
    CandidatePool,
    RegionPlan,
    StepTokens,
)

BRANCHING = 3
MAX_STEPS = 6
PAGE = 4
MORE = 12
"""Seeds that a burst may get as it goes on."""


@dataclass
class Entry:
    """A seed."""

    row: int
    token: int
    score: float
    position: int
    parent: int = -1
    slot: int = -1
    feature: int = -1
    base: float | None = None

    def words(self) -> list[int]:
        base = self.base if self.base is not None else (self.score if self.score <= 0 else float("-inf"))
        bits = torch.tensor([self.score, base]).view(torch.int32).tolist()
        return [self.row, self.parent, self.token, self.position, self.slot, self.feature, *bits]


class Burst:
    """All state of a burst on one device."""

    def __init__(
        self,
        seeds: list[Entry],
        free: list[list[int]],
        width: int,
        *,
        floor: float = -100.0,
        region: int = 32,
        lag: int = 0,
        device: str,
        seed: int = 0,
    ) -> None:
        self.region, self.width, self.num_seeds = region, width, len(seeds)
        generator = torch.Generator().manual_seed(seed)
        num_rows, words, max_seeds = len(free), region // 32, max(len(seeds) + 2 + MORE, 4)
        tables = num_rows + 2

        def ints(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32).to(device)

        floor_bits = int(torch.tensor([floor]).view(torch.int32))
        self.header = ints([0, len(seeds), floor_bits, 0])
        self.seeds = torch.full((NUM_FIELDS, max_seeds), 77, dtype=torch.int32)
        for index, entry in enumerate(seeds):
            self.seeds[:, index] = torch.tensor(entry.words(), dtype=torch.int32)
        self.seeds = self.seeds.to(device)
        capacity = max_seeds + MAX_STEPS * width * BRANCHING
        self.pool = CandidatePool(torch.full((NUM_FIELDS, capacity), 55, dtype=torch.int32).to(device), max_seeds)
        full = torch.full((num_rows, region), 99, dtype=torch.int32)
        for row, slots in enumerate(free):
            full[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
        self.rows = BurstRows(
            table_rows=torch.randperm(tables - 1, generator=generator)[:num_rows].int().to(device),
            context_len=ints([5] * num_rows),
            num_free=ints([len(slots) for slots in free]),
            next_free=ints([0] * num_rows),
            live=torch.randint(-(2**31), 2**31 - 1, (num_rows, words), generator=generator).int().to(device),
            free=full.to(device),
        )
        pages = -(-region // PAGE) + 2
        self.plan = RegionPlan(
            page_tables=torch.randperm(tables * pages, generator=generator).view(tables, pages).int().to(device),
            slot_masks=torch.randint(-(2**31), 2**31 - 1, (tables, region, words), generator=generator)
            .int()
            .to(device),
            page_size=PAGE,
            region_base=2 * PAGE,
            lag=lag,
        )
        self.step = StepTokens.new(width, num_rows, words, torch.device(device), capacity)
        self.results = torch.zeros(MAX_STEPS, width * (2 + 2 * BRANCHING), dtype=torch.int32, device=device)

    @classmethod
    def random(
        cls,
        seed: int,
        num_rows: int,
        width: int,
        *,
        lag: int,
        region: int,
        num_free: int,
        forced: int,
        device: str,
        num_seeds: int = 12,
    ) -> Burst:
        """Some rows with a forced chain, seeds of all scores (some equal) below low slots, high slots free."""
        source = random.Random(seed)
        entries: list[Entry] = []
        for row in range(num_rows):
            slots = source.sample(range(region // 2), forced if source.random() < 0.7 else 0)
            above = source.choice([-1, region // 2 - 1])
            for index, slot in enumerate(slots):
                feature = source.choice([-1, index])
                base = 0.0 if index == len(slots) - 1 else None
                entries.append(Entry(row, source.randrange(90), 1e30, 30 + index, above, slot, feature, base))
                above = slot
        while len(entries) < num_seeds:
            score = -source.choice([0.5, 1.0, 2.5, source.uniform(0, 9)])
            parent = source.randrange(-1, region // 2)
            entries.append(Entry(source.randrange(num_rows), source.randrange(90), score, 40, parent))
        high = range(region // 2, region)
        free = [source.sample(high, min(source.randint(0, num_free), len(high))) for _ in range(num_rows)]
        return cls(entries, free, width, floor=-8.0, region=region, lag=lag, device=device, seed=seed)

    def begin(self, functions: ModuleType = frontier) -> None:
        functions.begin_burst(self.header, self.seeds, self.pool, self.rows, self.plan)

    def choose(self, functions: ModuleType = frontier) -> None:
        functions.choose_entries(self.header, self.pool, self.rows, self.step, BRANCHING)

    def place(self, functions: ModuleType = frontier) -> None:
        functions.place_entries(self.pool, self.rows, self.step, self.plan)

    def append(self, tokens: Tensor, scores: Tensor, functions: ModuleType = frontier) -> None:
        functions.append_candidates(self.header, self.pool, self.step, tokens, scores, self.results)

    def run_step(self, tokens: Tensor, scores: Tensor, functions: ModuleType = frontier) -> None:
        self.choose(functions)
        self.place(functions)
        device = self.header.device
        self.append(tokens.to(device), scores.to(device), functions)

    def reroot_input(self, roots: dict[int, tuple[int, int, float]], more: dict[int, list[int]]) -> Tensor:
        """The input of `reroot`: by row the new root's pool index, tree slot and path score; by row more tree slots."""
        reroots = torch.full((len(self.rows.table_rows), REROOT_WORDS + self.region), 88, dtype=torch.int32)
        reroots[:, :REROOT_WORDS] = torch.tensor([-1, -1, 0, 0], dtype=torch.int32)
        for row, (index, slot, score) in roots.items():
            bits = int(torch.tensor([score]).view(torch.int32))
            reroots[row, :3] = torch.tensor([index, slot, bits], dtype=torch.int32)
        for row, slots in more.items():
            reroots[row, 3] = len(slots)
            reroots[row, REROOT_WORDS : REROOT_WORDS + len(slots)] = torch.tensor(slots, dtype=torch.int32)
        return reroots.to(self.header.device)

    def reroot(self, reroots: Tensor, functions: ModuleType = frontier) -> None:
        functions.reroot_pool(self.header, self.pool, self.rows, self.plan, reroots, self.width * BRANCHING)

    def add(self, seeds: list[Entry], functions: ModuleType = frontier) -> None:
        more = torch.full((SEED_HEADER_WORDS + NUM_FIELDS * MORE,), 66, dtype=torch.int32)
        more[FIRST_SEED], more[NUM_NEW_SEEDS] = self.num_seeds, len(seeds)
        for index, entry in enumerate(seeds):
            more[SEED_HEADER_WORDS:].view(NUM_FIELDS, MORE)[:, index] = torch.tensor(entry.words(), dtype=torch.int32)
        functions.add_seeds(self.pool, more.to(self.header.device))
        self.num_seeds += len(seeds)

    def random_more(self, source: random.Random) -> list[Entry]:
        """At most two further forced seeds of some row, as far as there is room."""
        row, slots = source.randrange(len(self.rows.table_rows)), source.sample(range(self.region // 2), 2)
        chain = [Entry(row, 7, 1e30, 40, source.randrange(-1, 5), slots[0])]
        chain += [Entry(row, 8, 1e30, 41, slots[0], slots[1], base=0.0)]
        room = self.pool.max_seeds - self.num_seeds
        return chain[: min(source.randrange(3), room)]

    def random_reroot_input(self, source: random.Random) -> Tensor:
        """New roots that were run, by this burst or before, or not, and slots that nothing held, for some rows."""
        limit = self.pool.max_seeds + int(self.header[0]) * self.width * BRANCHING
        entries = self.pool.entries[:, :limit].cpu()
        scores = entries[SCORE].contiguous().view(torch.float32)
        roots: dict[int, tuple[int, int, float]] = {}
        more: dict[int, list[int]] = {}
        for row in range(len(self.rows.table_rows)):
            own = (entries[0] == row).nonzero()[:, 0].tolist()
            own = [index for index in own if scores[index] > float("-inf") or entries[SLOT, index] >= 0]
            if any(scores[index] > 1e29 for index in own):
                continue
            if own and source.random() < 0.5:
                roots[row] = (source.choice(own), -1, -source.uniform(0.0, 3.0))
            elif source.random() < 0.5:
                slot = source.choice([NOT_HERE, source.randrange(self.region)])
                roots[row] = (-1, slot, -source.uniform(0.0, 3.0))
            given = self.rows.free[row, : int(self.rows.num_free[row])].tolist()
            spare = [slot for slot in range(self.region // 2, self.region) if slot not in given]
            more[row] = source.sample(spare, min(source.randrange(5), len(spare)))
        return self.reroot_input(roots, more)

    def candidates(self, generator: torch.Generator, low: float = -3.0, high: float = 0.0) -> tuple[Tensor, Tensor]:
        """What a model might propose; some nodes have fewer."""
        shape, device = (self.width, BRANCHING), self.header.device
        tokens = torch.randint(-1, 90, shape, generator=generator).int()
        scores = torch.rand(shape, generator=generator) * (high - low) + low
        return tokens.to(device), (scores * 4).round().div(4).to(device)

    def seen(self, place: int) -> set[int]:
        return _bits(self.step.mask[place])

    def stored(self, row: int, slot: int) -> set[int]:
        return _bits(self.plan.slot_masks[int(self.rows.table_rows[row]), slot])

    def store(self, row: int, slot: int, seen: set[int]) -> None:
        words = _words(seen, self.region).to(self.header.device)
        self.plan.slot_masks[int(self.rows.table_rows[row]), slot] = words

    def set_live(self, row: int, slots: set[int]) -> None:
        self.rows.live[row] = _words(slots, self.region).to(self.header.device)

    def clear_masks(self) -> None:
        self.plan.slot_masks.zero_()

    def compare(self, other: Burst) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name and both values of all that kernels write, but for scratch."""
        yield "header", self.header.cpu(), other.header.cpu()
        yield "slot_masks", self.plan.slot_masks.cpu(), other.plan.slot_masks.cpu()
        yield "results", self.results.cpu(), other.results.cpu()
        yield "pool", self.pool.entries.cpu(), other.pool.entries.cpu()
        for group in ("rows", "step"):
            mine, theirs = getattr(self, group), getattr(other, group)
            for field in fields(mine):
                if field.name not in ("links", "keys"):
                    yield field.name, getattr(mine, field.name).cpu(), getattr(theirs, field.name).cpu()


def make_burst(seeds: list[Entry], free: list[list[int]], width: int, **options: object) -> Burst:
    """A burst of these seeds."""
    return Burst(seeds, free, width, **options)  # type: ignore[arg-type]


def _bits(words: Tensor) -> set[int]:
    return {32 * index + bit for index, word in enumerate(words.tolist()) for bit in range(32) if word >> bit & 1}


def _words(slots: set[int], region: int) -> Tensor:
    values = [sum(1 << slot % 32 for slot in slots if slot // 32 == word) for word in range(region // 32)]
    return torch.tensor([value - (1 << 32) if value >> 31 else value for value in values], dtype=torch.int32)
