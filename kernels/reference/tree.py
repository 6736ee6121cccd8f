"""Torch reference of kernels.tree."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import sampling_state as state
from kernels.reference.sampling import accepts_loosely, coins, gumbel
from kernels.sampling_state import RoundTokens, SampleBuffers, SamplingTables, WalkOutputs


def expand_tree(
    tokens: RoundTokens,
    page_tables: Tensor,
    page_size: int,
    slots: Tensor,
    mask: Tensor,
    path: Tensor,
    int_params: Tensor | None = None,
) -> None:
    """Implement kernels.tree.expand_tree."""
    slots.fill_(-1)
    mask.zero_()
    path.fill_(-1)
    first, cached_len, table_rows = tokens.first.tolist(), tokens.cached_len.tolist(), tokens.table_rows.tolist()
    token_ids, positions, parents = tokens.token_ids.tolist(), tokens.positions.tolist(), tokens.parents.tolist()
    for token, row in enumerate(tokens.rows.tolist()):
        if row < 0:
            continue
        begin, cached = first[row], cached_len[row]
        if int_params is not None and token_ids[token] < 0:
            tokens.token_ids[token] = int_params[table_rows[row], state.LAST_TOKEN]
        logical = cached + token - begin
        slots[token] = page_tables[table_rows[row], logical // page_size] * page_size + logical % page_size
        places, ancestor = [], token
        for _ in range(positions[token] - cached + 1):
            places.append(ancestor - begin)
            ancestor = parents[ancestor]
        path[token, : len(places)] = torch.tensor(places[::-1], dtype=path.dtype)
        words = [0] * mask.shape[1]
        for place in places:
            words[place // 32] |= 1 << place % 32
        mask[token] = torch.tensor([word - (word >> 31 << 32) for word in words], dtype=mask.dtype)


def walk(
    tokens: RoundTokens,
    tables: SamplingTables,
    buffers: SampleBuffers,
    out: WalkOutputs,
    max_row_tokens: int,
    vocab_size: int,
    lossy: bool,
) -> None:
    """Implement kernels.tree.walk."""
    max_depth = out.tokens.shape[1]
    for row in range(tokens.root.shape[0]):
        out.num_tokens[row], out.error[row] = 0, 0
        out.tokens[row], out.accepted[row] = -1, -1
        committed: list[int] = []
        accepted: list[int] = []
        node = int(tokens.root[row])
        table_row, end = int(tokens.table_rows[row]), int(tokens.first[row + 1])
        while node >= 0 and len(committed) < max_depth:
            if int(buffers.bad[node]):
                out.error[row] = state.UNUSABLE_LOGITS
                break
            children = {
                int(tokens.token_ids[child]): child
                for child in range(node + 1, end)
                if int(tokens.parents[child]) == node
            }
            token = int(buffers.sampled[node])
            if lossy and children and accepts_loosely(tables.float_params[table_row]):
                token = _choose(list(children), token, node, table_row, tokens, tables, buffers, vocab_size)
            if not 0 <= token < vocab_size:
                out.error[row] = state.ILLEGAL_TOKEN
                break
            committed.append(token)
            node = children.get(token, -1)
            if node >= 0:
                accepted.append(node)
        # If a walk stops at the last column, its bonus token may be a node, which does not count as accepted.
        accepted = accepted[: max(len(committed) - 1, 0)]
        out.num_tokens[row] = len(committed)
        out.tokens[row, : len(committed)] = torch.tensor(committed, dtype=torch.int32)
        out.accepted[row, : len(accepted)] = torch.tensor(accepted, dtype=torch.int32)
        if committed:
            tables.int_params[table_row, state.LAST_TOKEN] = committed[-1]
        if int(tables.int_params[table_row, state.FLAGS]) & state.PENALIZED:
            for token in committed:
                tables.counts[table_row, token] += 1


def _choose(
    children: list[int],
    sampled: int,
    node: int,
    table_row: int,
    tokens: RoundTokens,
    tables: SamplingTables,
    buffers: SampleBuffers,
    vocab_size: int,
) -> int:
    """Return the child that the acceptance thresholds accept, or a token sampled from all but the children."""
    floats, keys = tables.float_params[table_row], tables.int_params[[table_row], : state.CHOICE_INDEX + 1]
    processed: Tensor = buffers.processed[node, :vocab_size]
    position = tokens.positions[node : node + 1] + 1
    coin = float(coins(keys, position)[0])
    chances = (processed[children].double() - buffers.totals[node]).exp().tolist()
    accumulated = 0.0
    for child, chance in zip(children, chances, strict=True):
        accumulated += chance
        if chance > 0 and (
            coin < accumulated / float(floats[state.ACCEPT_ACC]) or chance >= float(floats[state.ACCEPT_SINGLE])
        ):
            return child
    rest = processed.clone()
    rest[children] = -torch.inf
    if not bool(rest.max().isfinite()):
        return sampled
    scores = rest + gumbel(keys, position, torch.arange(vocab_size, device=rest.device)[None])[0]
    return int((scores == scores.max()).nonzero()[0, 0])
