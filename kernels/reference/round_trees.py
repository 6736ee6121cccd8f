"""Torch reference of kernels.round_trees."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.frontier_state import (
    BASE,
    FEATURE,
    FLOOR,
    NUM_SEEDS,
    PARENT,
    POSITION,
    ROW,
    SCORE,
    SLOT,
    STEP,
    TOKEN,
    BurstRows,
    CandidatePool,
    CommittedTokens,
    GrownTrees,
    MergeLimits,
)
from kernels.sampling_state import RoundTokens


def lay_out_committed(
    tokens: RoundTokens, num_tokens: Tensor, committed: Tensor, drafts: Tensor, page_tables: Tensor, shifts: Tensor,
    out: CommittedTokens, page_size: int, lag: int, spare: int,
) -> None:  # fmt: skip
    """Implement kernels.round_trees.lay_out_committed."""
    padding = {"token_ids": 0, "positions": 0, "rotary": 0, "parents": -1, "rows": -1, "sources": spare}
    for field, value in padding.items():
        getattr(out, field).fill_(value)
    place = 0
    for row, table_row in enumerate(tokens.table_rows.tolist()):
        root = int(tokens.root[row])
        count = int(num_tokens[row]) if int(drafts[row]) and root >= 0 else 0
        begin = int(tokens.positions[root]) + 1 if count else 0
        gap = int(shifts[table_row]) * page_size
        out.first[row] = place
        for index in range(count):
            position = begin + index
            out.token_ids[place] = committed[row, index]
            out.positions[place] = position - lag - gap
            out.rotary[place] = position - lag
            out.parents[place] = place - 1 if index else -1
            out.rows[place] = row
            page = int(page_tables[table_row, (position - 1 - gap) // page_size])
            out.sources[place] = page * page_size + (position - 1) % page_size
            place += 1
        out.table_rows[row] = table_row
        out.cached_len[row] = begin - lag - gap if count else 0
        out.context_len[row] = begin + count - lag - gap if count else 0
        out.root[row] = place - 1 if count else 0
        out.draft_rows[row] = table_row if count else -1
        out.root_positions[row] = begin + count - 1 if count else 0
    out.first[tokens.table_rows.shape[0]] = place


def plant_roots(
    header: Tensor, pool: CandidatePool, rows: BurstRows, at: CommittedTokens, tokens: Tensor, scores: Tensor,
    floor: float, lag: int,
) -> None:  # fmt: skip
    """Implement kernels.round_trees.plant_roots."""
    num_rows, branching = tokens.shape
    there = at.draft_rows >= 0
    header[STEP], header[NUM_SEEDS], header[3] = 0, pool.max_seeds, 0
    header[FLOOR : FLOOR + 1] = torch.tensor([floor], dtype=torch.float32).view(torch.int32)
    rows.table_rows.copy_(at.table_rows)
    rows.context_len.copy_(at.context_len)
    rows.num_free.copy_(torch.where(there, rows.free.shape[1], 0))
    rows.next_free.zero_()
    valid = there[:, None] & (tokens >= 0) & (scores <= 0)
    edges = torch.where(valid, scores, float("-inf"))
    seeds = pool.entries[:, : pool.max_seeds].view(-1, num_rows, branching)
    seeds[ROW] = torch.arange(num_rows, dtype=torch.int32)[:, None]
    seeds[PARENT] = seeds[SLOT] = -1
    seeds[TOKEN], seeds[POSITION] = tokens, at.root_positions[:, None] + 1
    seeds[FEATURE] = seeds[ROW] if lag else -1
    seeds[SCORE] = seeds[BASE] = edges.view(torch.int32)


def reopen_pool(header: Tensor, pool: CandidatePool, step_size: int) -> None:
    """Allow all seeds and entries that steps added to be chosen, whether run or not, but none after them."""
    scores = pool.entries[SCORE].view(torch.float32)
    scores.copy_(pool.entries[BASE].view(torch.float32))
    scores[pool.max_seeds + int(header[STEP]) * step_size :] = float("-inf")


def export_nodes(pool: CandidatePool, tables: Tensor, order: Tensor, trees: GrownTrees) -> None:
    """Copy the chosen entries, in their order, to `trees`, and reset `order` to -1."""
    chosen = order[order >= 0].long()
    order.fill_(-1)
    count = len(chosen)
    trees.pool.entries[:, :count] = pool.entries[:, chosen]
    trees.pool.entries[ROW, :count] = tables[pool.entries[ROW, chosen].long()]
    trees.order.fill_(-1)
    trees.order[:count] = torch.arange(count, dtype=torch.int32, device=order.device)


def merge_trees(base: RoundTokens, trees: GrownTrees, limits: MergeLimits, out: RoundTokens, scores: Tensor) -> None:
    """Implement kernels.round_trees.merge_trees."""
    num_rows = base.table_rows.shape[0]
    chosen = [index for index in trees.order[: int(limits.most)].tolist() if index >= 0]
    fields = trees.pool.entries[:, chosen].t().tolist()
    paths = trees.pool.entries[BASE, chosen].view(torch.float32).tolist()
    of_row: dict[int, list[int]] = {row: [] for row in range(num_rows)}
    for number, entry in enumerate(fields):
        row = int(limits.row_of[entry[ROW]])
        root = int(base.root[row]) if row >= 0 else -1
        if root >= 0 and entry[POSITION] - int(base.positions[root]) <= int(limits.max_depth[row]):
            of_row[row].append(number)
    for name, value in (("token_ids", 0), ("positions", 0), ("parents", -1), ("rows", -1)):
        getattr(out, name).fill_(value)
    scores.fill_(1.0)
    place = 0
    for row in range(num_rows):
        begin, end = int(base.first[row]), int(base.first[row + 1])
        moved, root = place - begin, int(base.root[row])
        out.first[row] = place
        out.root[row] = root + moved if root >= 0 else -1
        there: dict[tuple[int, int], int] = {}
        for token in range(begin, end):
            parent = int(base.parents[token])
            _put(out, place, int(base.token_ids[token]), int(base.positions[token]), row)
            out.parents[place] = parent + moved if parent >= 0 else -1
            there[int(out.parents[place]), int(out.token_ids[place])] = place
            place += 1
        room = int(limits.max_nodes[row])
        place_of: dict[tuple[int, int], int] = {}
        for number in of_row[row]:
            entry = fields[number]
            above = place_of.get((entry[ROW], entry[PARENT])) if entry[PARENT] >= 0 else root + moved
            if above is None:
                continue
            node = there.get((above, entry[TOKEN]))
            if node is None:
                if not room:
                    continue
                node, place, room = place, place + 1, room - 1
                _put(out, node, entry[TOKEN], entry[POSITION], row)
                out.parents[node] = above
            scores[node] = paths[number]
            if entry[SLOT] >= 0:
                place_of[entry[ROW], entry[SLOT]] = node
    out.first[num_rows] = place
    out.table_rows.copy_(base.table_rows)


def _put(out: RoundTokens, place: int, token: int, position: int, row: int) -> None:
    out.token_ids[place], out.positions[place], out.rows[place] = token, position, row
