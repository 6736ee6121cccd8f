"""Torch reference of kernels.sampling: one token at a time, with sorts."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import sampling_state as state
from kernels.sampling_state import LogprobOutputs, RoundTokens, SampleBuffers, SamplingTables, WalkOutputs

_WORD = 0xFFFFFFFF


def gumbel(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return the noise of `token_ids` [N, K] under `keys` [N, 3] at `positions` [N]: float32 [N, K]."""
    ids = token_ids.long()
    columns = [word[:, None].expand_as(ids) for word in (positions, *keys.unbind(1))]
    position, low, high, choice = columns
    words = torch.stack(philox(ids >> 2, position, choice, torch.zeros_like(ids), low, high), -1)
    x = words.gather(-1, (ids & 3)[..., None])[..., 0]
    # 1 - u is exact in float64, see outrider.sampling.noise.
    exponential = -torch.log((2.0**32 - 0.5 - x.double()) * 2.0**-32)
    return -torch.log(exponential).float()


def coins(keys: Tensor, positions: Tensor) -> Tensor:
    """Return the coins of lossy acceptance under `keys` [N, 3] at `positions` [N]: float64 [N] between 0 and 1."""
    low, high, choice = keys.unbind(1)
    zeros = torch.zeros_like(positions)
    return (philox(zeros, positions, choice, zeros + 1, low, high)[0].double() + 0.5) * 2.0**-32


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, ...]:
    """Return Philox 4x32-10 of counters and keys, given as words of one shape: four int64 tensors of 32-bit words."""
    factored, other, key = (torch.stack(pair).long() & _WORD for pair in ((c0, c2), (c1, c3), (k0, k1)))
    one_each = (2,) + (1,) * c0.ndim
    factors = torch.tensor((0xD2511F53, 0xCD9E8D57), device=c0.device).view(one_each)
    weyl = torch.tensor((0x9E3779B9, 0xBB67AE85), device=c0.device).view(one_each)
    for _ in range(10):
        # An int64 product of words has the bits of the unsigned one.
        product = (factored * factors).flip(0)
        factored, other = ((product >> 32) & _WORD) ^ other ^ key, product & _WORD
        key = (key + weyl) & _WORD
    return factored[0], other[0], factored[1], other[1]


def sample_rows(
    logits: Tensor,
    vocab_size: int,
    tokens: RoundTokens,
    tables: SamplingTables,
    buffers: SampleBuffers,
    vocab_mask: Tensor | None,
    lossy: bool,
) -> None:
    """Implement kernels.sampling.sample_rows."""
    rows = [int(tokens.table_rows[row]) if row >= 0 else -1 for row in tokens.rows.tolist()]
    noisy, ids = tables.float_params[:, state.TEMPERATURE] > 0, torch.arange(vocab_size, device=logits.device)
    noise = noise_of_rows(rows, noisy, tables.int_params, tokens.positions, ids)
    for index in range(tokens.token_ids.shape[0]):
        buffers.sampled[index], buffers.bad[index] = -1, 0
        row = int(tokens.rows[index])
        root = int(tokens.root[row]) if row >= 0 else -1
        if root < 0 or index < root:
            continue
        table_row = int(tokens.table_rows[row])
        raw = logits[index, :vocab_size].float()
        adjusted = adjust(raw, index, root, tokens, tables, table_row, vocab_mask)
        if bool((raw.isnan() | (raw == torch.inf)).any()) or not bool(adjusted.max().isfinite()):
            buffers.bad[index] = 1
            continue
        floats, ints = tables.float_params[table_row], tables.int_params[table_row]
        if float(floats[state.TEMPERATURE]) > 0:
            adjusted = adjusted.masked_fill(~kept(adjusted, floats, ints), -torch.inf)
            if lossy and accepts_loosely(floats):
                buffers.processed[index, :vocab_size] = adjusted
                buffers.totals[index] = adjusted.double().logsumexp(0)
            adjusted = adjusted + noise[index]
        # max(dim) and argmax do not promise the first of equal maxima on every device.
        buffers.sampled[index] = (adjusted == adjusted.max()).nonzero()[0, 0]


def noise_of_rows(rows: list[int], noisy: Tensor, ints: Tensor, positions: Tensor, ids: Tensor) -> dict[int, Tensor]:
    """Return noise of `ids` [N] by index in `rows`, for noisy rows; computed together, since it is many small steps."""
    is_noisy = noisy.tolist()
    drawn = [index for index, row in enumerate(rows) if row >= 0 and is_noisy[row]]
    if not drawn:
        return {}
    keys = ints[[rows[index] for index in drawn], : state.CHOICE_INDEX + 1]
    return dict(zip(drawn, gumbel(keys, positions[drawn] + 1, ids.expand(len(drawn), -1)), strict=True))


def accepts_loosely(floats: Tensor) -> bool:
    """Whether a request with these float parameters [8] has acceptance thresholds that take effect."""
    thresholds = floats[[state.ACCEPT_SINGLE, state.ACCEPT_ACC]]
    return bool(floats[state.TEMPERATURE] > 0) and bool((thresholds < 1).any())


def adjust(
    row: Tensor,
    index: int,
    root: int,
    tokens: RoundTokens,
    tables: SamplingTables,
    table_row: int,
    vocab_mask: Tensor | None,
) -> Tensor:
    """Apply penalties, bias, masks and temperature to a row of logits: float32 [V], a new tensor or `row` itself."""
    floats, flags = tables.float_params[table_row], int(tables.int_params[table_row, state.FLAGS])
    if flags & state.PENALIZED:
        counts = tables.counts[table_row] & (state.ENDS_ANSWER - 1)
        present = (tables.counts[table_row] & state.IN_PROMPT) != 0
        node = index
        while node > root:
            counts[int(tokens.token_ids[node])] += 1
            node = int(tokens.parents[node])
        repetition = floats[state.REPETITION]
        row = torch.where(present | (counts > 0), torch.where(row < 0, row * repetition, row / repetition), row)
        less = row - floats[state.FREQUENCY] * counts.float()
        row = torch.where(counts > 0, less - floats[state.PRESENCE], row)
    if flags & state.BIASED:
        row = row + tables.bias[table_row]
    if flags & state.MASKED and vocab_mask is not None:
        ids = torch.arange(len(row), device=row.device)
        row = row.masked_fill((vocab_mask[index][ids // 32] >> (ids % 32)) & 1 == 0, -torch.inf)
    if flags & state.GOES_ON and int(tokens.positions[index]) + 1 < int(tables.int_params[table_row, state.MIN_LENGTH]):
        row = row.masked_fill((tables.counts[table_row] & state.ENDS_ANSWER) != 0, -torch.inf)
    if float(floats[state.TEMPERATURE]) > 0:
        row = row / floats[state.TEMPERATURE].clamp(min=state.MIN_TEMPERATURE)
    return row


def kept(row: Tensor, floats: Tensor, ints: Tensor) -> Tensor:
    """Return bool [V]: whether top-k, top-p and min-p keep each token of a processed row [V]."""
    top_k, top_p, min_p = int(ints[state.TOP_K]), float(floats[state.TOP_P]), float(floats[state.MIN_P])
    order = row.sort(descending=True, stable=True).indices
    alive = torch.ones_like(row, dtype=torch.bool)
    if 0 < top_k < len(row):
        alive[order[top_k:]] = False
        order = order[:top_k]
    distance = row.double() - row.max().double()
    if top_p < 1:
        mass = distance[order].exp().cumsum(0)
        # The likeliest token stays; another one does if those before it have less mass than top_p.
        alive[order[1:][mass[:-1] >= top_p * mass[-1]]] = False
    if min_p > 0:
        alive &= distance >= torch.tensor(min(min_p, 1.0), dtype=torch.float64, device=row.device).log()
    return alive


def logprobs(
    logits: Tensor,
    vocab_size: int,
    tokens: RoundTokens,
    tables: SamplingTables,
    walked: WalkOutputs,
    out: LogprobOutputs,
) -> None:
    """Implement kernels.sampling.logprobs."""
    for row in range(tokens.root.shape[0]):
        wanted = int(tables.int_params[int(tokens.table_rows[row]), state.NUM_LOGPROBS])
        wanted = min(wanted, state.MAX_TOP_LOGPROBS, vocab_size)
        for place in range(int(walked.num_tokens[row]) if wanted >= 0 else 0):
            node = int(walked.accepted[row, place - 1] if place else tokens.root[row])
            values = logits[node, :vocab_size].double()
            log_total = values.max() + (values - values.max()).exp().sum().log()
            out.logprobs[row, place] = (values[int(walked.tokens[row, place])] - log_total).float()
            likeliest = values.sort(descending=True, stable=True).indices[:wanted]
            out.top_ids[row, place], out.top_logprobs[row, place] = -1, -torch.inf
            out.top_ids[row, place, :wanted] = likeliest.int()
            out.top_logprobs[row, place, :wanted] = (values[likeliest] - log_total).float()
