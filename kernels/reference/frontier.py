"""Torch reference of kernels.frontier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.frontier_state import (
    BASE,
    FEATURE,
    FIRST_SEED,
    FLOOR,
    NEW_ROOT,
    NEW_ROOT_SLOT,
    NUM_FIELDS,
    NUM_NEW_SEEDS,
    NUM_NEW_SLOTS,
    NUM_SEEDS,
    PARENT,
    POSITION,
    REROOT_WORDS,
    ROW,
    SCORE,
    SEED_HEADER_WORDS,
    SHIFT,
    SLOT,
    STEP,
    TOKEN,
    BurstRows,
    CandidatePool,
    RegionPlan,
    StepTokens,
)

_NEVER = float("-inf")
_PADDING = {
    "token_ids": 0, "rotary": 0, "rows": -1, "table_rows": -1, "kv_slots": -1, "mask": 0, "picked": -1, "slots": -1,
    "positions": 0, "bases": _NEVER, "order": -1,
}  # fmt: skip
"""Values of a step's places without a token, except for `sources` and `targets`."""


def begin_burst(header: Tensor, seeds: Tensor, pool: CandidatePool, rows: BurstRows, plan: RegionPlan) -> None:
    """Implement kernels.frontier.begin_burst."""
    count = int(header[NUM_SEEDS])
    pool.entries[:, :count] = seeds[:, :count]
    _scores(pool)[count : pool.max_seeds] = _NEVER
    table_rows = rows.table_rows.long()
    plan.slot_masks[table_rows] = plan.slot_masks[table_rows] & rows.live[:, None, :]


def reroot_pool(
    header: Tensor, pool: CandidatePool, rows: BurstRows, plan: RegionPlan, reroots: Tensor, step_size: int
) -> None:
    """Implement kernels.frontier.reroot_pool."""
    limit = min(pool.max_seeds + int(header[STEP]) * step_size, pool.capacity)
    scores, bases = _scores(pool)[:limit], pool.entries[BASE].view(torch.float32)[:limit]
    shifts = reroots[:, SHIFT].contiguous().view(torch.float32)
    ran = (scores == _NEVER).tolist()
    for row, line in enumerate(reroots[:, :REROOT_WORDS].tolist()):
        root, slot, count, start = line[NEW_ROOT], line[NEW_ROOT_SLOT], line[NUM_NEW_SLOTS], int(rows.num_free[row])
        places = (torch.arange(count, device=reroots.device) + start) % rows.free.shape[1]
        rows.free[row, places] = reroots[row, REROOT_WORDS : REROOT_WORDS + count]
        rows.num_free[row] = start + count
        if root < 0 and slot == -1:
            continue
        if root >= 0:
            slot = int(pool.entries[SLOT, root]) if ran[root] else -1
        there = ((pool.entries[ROW, :limit] == row) & (scores > _NEVER)).nonzero()[:, 0]
        parents = pool.entries[PARENT, there].long()
        alive = there == root
        if slot >= 0:
            seen = plan.slot_masks[int(rows.table_rows[row]), parents.clamp(0), slot // 32] >> slot % 32 & 1
            alive |= (parents >= 0) & (seen == 1)
        scores[there[~alive]] = _NEVER
        stays = there[alive]
        scores[stays] = (scores[stays] - shifts[row]).clamp(max=0.0)
        bases[stays] = (bases[stays] - shifts[row]).clamp(max=0.0)


def add_seeds(pool: CandidatePool, seeds: Tensor) -> None:
    """Implement kernels.frontier.add_seeds."""
    first, count = seeds[FIRST_SEED], seeds[NUM_NEW_SEEDS]
    pool.entries[:, first : first + count] = seeds[SEED_HEADER_WORDS:].view(NUM_FIELDS, -1)[:, :count]


def choose_entries(header: Tensor, pool: CandidatePool, rows: BurstRows, step: StepTokens, branching: int) -> None:
    """Implement kernels.frontier.choose_entries."""
    limit = pool.max_seeds + int(header[STEP]) * step.order.shape[0] * branching
    scores = _scores(pool)[:limit]
    usable = (scores >= header[FLOOR : FLOOR + 1].view(torch.float32)) & (scores > _NEVER)
    full = rows.next_free >= rows.num_free
    usable &= (pool.entries[SLOT, :limit] >= 0) | ~full[pool.entries[ROW, :limit].clamp(0, len(full) - 1).long()]
    found = usable.nonzero()[:, 0]
    best = found[scores[found].argsort(descending=True, stable=True)][: step.order.shape[0]]
    step.order[: len(best)] = best.int()


def place_entries(pool: CandidatePool, rows: BurstRows, step: StepTokens, plan: RegionPlan) -> None:
    """Implement kernels.frontier.place_entries."""
    chosen = [index for index in step.order.tolist() if index >= 0]
    num_tables, region, _ = plan.slot_masks.shape
    zero_row = num_tables * region
    for name, value in (_PADDING | {"sources": zero_row, "targets": zero_row - region}).items():
        getattr(step, name).fill_(value)
    tokens: list[dict[str, Any]] = []
    own: set[tuple[int, int]] = set()
    late: set[tuple[int, int]] = set()
    next_free, num_free, table_rows = rows.next_free.tolist(), rows.num_free.tolist(), rows.table_rows.tolist()
    entries, bases = pool.entries[:, chosen].T.tolist(), pool.entries[BASE].view(torch.float32)
    for index, entry in zip(chosen, entries, strict=True):
        row, parent, position, slot, feature = (entry[field] for field in (ROW, PARENT, POSITION, SLOT, FEATURE))
        if (row, parent) in late or (plan.lag and feature < 0 and (row, parent) in own):
            if slot >= 0:
                late.add((row, slot))
            continue
        if slot < 0:
            if next_free[row] >= num_free[row]:
                continue
            slot = int(rows.free[row, next_free[row] % rows.free.shape[1]])
            next_free[row] += 1
        own.add((row, slot))
        table_row = table_rows[row]
        mask = plan.slot_masks[table_row, parent].clone() if parent >= 0 else torch.zeros_like(step.mask[0])
        mask[slot // 32] |= 1 << slot % 32 if slot % 32 < 31 else -(1 << 31)
        plan.slot_masks[table_row, slot] = mask
        logical = plan.region_base + slot
        page = int(plan.page_tables[table_row, logical // plan.page_size])
        parent_row = table_row * region + parent if parent >= 0 else zero_row
        tokens.append({
            "token_ids": entry[TOKEN], "rotary": max(position - plan.lag, 0), "rows": row, "table_rows": table_row,
            "kv_slots": page * plan.page_size + logical % plan.page_size, "mask": mask, "picked": index, "slots": slot,
            "positions": position, "bases": bases[index],
            "sources": zero_row + 1 + feature if feature >= 0 else parent_row, "targets": table_row * region + slot,
        })  # fmt: skip
        _scores(pool)[index] = _NEVER
        pool.entries[SLOT, index] = slot
    rows.next_free.copy_(torch.tensor(next_free, dtype=torch.int32))
    tokens.sort(key=lambda token: token["rows"])
    for name in tokens[0] if tokens else ():
        values = [token[name] for token in tokens]
        there = torch.tensor(values) if isinstance(values[0], int) else torch.stack(values)
        getattr(step, name)[: len(tokens)] = there
    step.first.copy_(torch.tensor([sum(token["rows"] < row for token in tokens) for row in range(len(step.first))]))


def append_candidates(
    header: Tensor, pool: CandidatePool, step: StepTokens, tokens: Tensor, scores: Tensor, results: Tensor
) -> None:
    """Implement kernels.frontier.append_candidates."""
    width, branching = tokens.shape
    number, size = int(header[STEP]), width * branching
    if number >= results.shape[0]:
        return
    there = (step.picked[:, None] >= 0) & (tokens >= 0) & (scores <= 0)
    edges = torch.where(there, scores, _NEVER)
    path = (step.bases[:, None] + edges).contiguous()
    start = pool.max_seeds + number * size
    new = pool.entries[:, start : start + size].view(-1, width, branching)
    new[ROW], new[PARENT] = step.rows[:, None], step.slots[:, None]
    new[TOKEN], new[POSITION] = tokens, step.positions[:, None] + 1
    new[SLOT] = new[FEATURE] = -1
    new[SCORE] = new[BASE] = path.view(torch.int32)
    result = results[number]
    result[:width], result[width : 2 * width] = step.picked, step.slots
    result[2 * width : 2 * width + size] = torch.where(there, tokens, -1).view(-1)
    result[2 * width + size :] = edges.view(torch.int32).view(-1)
    header[STEP] += 1


def _scores(pool: CandidatePool) -> Tensor:
    return pool.entries[SCORE].view(torch.float32)
