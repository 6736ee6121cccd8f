"""The reference backend in plain torch, for any device, and the attention of draft steps on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention_tiles import ScoreRules
from kernels.cpu.stack import Queries
from outrider.attention.base import (
    PLAIN,
    AttentionBackend,
    AttentionPlan,
    ForwardBatch,
    LayerRules,
    Segment,
    TokenBatch,
)
from outrider.cache.kv import KVCache
from outrider.device import bf16_flag
from outrider.layers.linear import RMSNorm
from outrider.layers.rotary import Rotary, rotate

# Attention is folded if the folded product has at most this many rows. Measured on 2 Zen 4 cores, folding halves the
# time of 1 to 4 queries (bfloat16, one query, 1000 keys: 109 against 560 us); at 16 queries it gains nothing.
FOLD_ROWS = 32
# A separate call costs as much as this many padded (query, key) pairs: 50 us against 25 ns, measured on 2 Zen 4 cores.
PAIRS_PER_CALL = 2000
# A query's result must not depend on the queries and keys beside it. Torch's CPU kernel sums the weights of keys in
# vectors of 16 and the rest one by one, and it sums products of fewer than 4 rows in another order. So keys are padded
# to whole vectors, queries to MIN_QUERIES, and a mask is given unless it is just the lower triangle. A query in
# bfloat16 then gets the same bits beside 0 to 300 others (Zen 4 with avx512_bf16, torch 2.13).
KEY_STEP = 16
MIN_QUERIES = 4
# A position behind all others.
_NEAR = 1 << 62


class TorchAttention(AttentionBackend):
    """scaled_dot_product_attention over gathered keys, one call for each group of segments."""

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend."""
        if not isinstance(batch, ForwardBatch):
            raise ValueError("the torch backend needs a batch of segments")
        members: list[Member] = []
        start = 0
        for segment in batch.segments:
            _check(segment)
            members.append(Member(start, segment))
            start += segment.num_queries
        if start != batch.token_ids.numel() or start != batch.positions.numel() or start == 0:
            raise ValueError(f"segments have {start} queries, the batch {batch.token_ids.numel()} tokens")
        own = [segment.kv_slots[-segment.num_queries :] for segment in batch.segments]
        groups = [_GroupAttention(group, batch.positions, kv, num_heads) for group in group_segments(members)]
        order = row_order(groups, start)
        if len(groups) == 1 and order is None:
            groups[0].rows = None
        return _TorchPlan(kv, HeadSplit(batch, kv, num_heads, rotary), torch.cat(own), groups, order)


@dataclass
class _TorchPlan(AttentionPlan):
    """Attention of all groups; `order` picks the batch's rows out of the groups' padded rows."""

    kv: KVCache
    split: HeadSplit
    own_slots: Tensor
    calls: list[_GroupAttention]
    order: Tensor | None

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None, rules: LayerRules = PLAIN) -> Tensor:
        q, k, v = self.split(heads, qk_norm, rules.rotary)
        self.kv.write(layer, self.own_slots, k, v)
        all_k, all_v = self.kv.k_layers[layer], self.kv.v_layers[layer]
        outputs = [call(q, all_k, all_v, rules) for call in self.calls]
        rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return rows if self.order is None else rows.index_select(0, self.order)


class Member(NamedTuple):
    """A segment and its first row in the batch."""

    start: int
    segment: Segment


class _GroupAttention:
    """Attention of segments that share a call. Queries are padded to the largest count, keys to the longest segment."""

    def __init__(self, members: list[Member], positions: Tensor, kv: KVCache, num_heads: int) -> None:
        self.members = members
        self._positions = positions
        segments = [member.segment for member in members]
        size = len(members)
        num_queries = max(segment.num_queries for segment in segments)
        longest = max(segment.kv_slots.numel() for segment in segments)
        length = -(-longest // KEY_STEP) * KEY_STEP
        self._num_heads = num_heads
        num_kv_heads, head_dim = kv.k.shape[2:]
        per_kv_head = num_heads // num_kv_heads
        # One segment with an empty context, for which the lower triangle is the whole mask.
        self._is_causal = size == 1 and segments[0].mask is None and 1 < num_queries == longest
        self._fold = not self._is_causal and num_queries * per_kv_head <= FOLD_ROWS
        least = length if self._is_causal else -(-MIN_QUERIES // per_kv_head) if self._fold else MIN_QUERIES
        self.num_queries = num_queries = max(num_queries, least)
        self._read_shape = (size, length, num_kv_heads, head_dim)
        self._dtype = kv.k.dtype
        device = segments[0].kv_slots.device
        slots = torch.empty(size, length, dtype=torch.int64, device=device)
        rows = torch.arange(num_queries, device=device).repeat(size, 1)
        for i, (start, segment) in enumerate(members):
            # Padding is real memory, hidden by the mask: spare slots or the segment's first one, and its last query.
            used = segment.kv_slots.numel()
            slots[i, :used] = segment.kv_slots
            if used < length <= used + segment.num_spare:
                slots[i, used:] = segment.kv_slots[-1] + 1 + torch.arange(length - used, device=device)
            else:
                slots[i, used:] = segment.kv_slots[0]
            rows[i].clamp_(max=segment.num_queries - 1).add_(start)
        self._slots = _as_slice(slots.view(-1)) if size == 1 else slots.view(-1)
        self._query_rows = rows.view(-1)
        self.rows: Tensor | None = self._query_rows
        """The batch's row of each padded query; None if they are the same."""
        self._masks: dict[tuple[int, bool], Tensor] = {}

    def __call__(self, q: Tensor, all_k: Tensor, all_v: Tensor, rules: LayerRules) -> Tensor:
        """Attend with q [M, num_heads, head_dim]; return [B * n, num_heads * head_dim] for n padded queries of each."""
        if self.rows is not None:
            q = q.index_select(0, self.rows)
        k, v = self._read(all_k), self._read(all_v)
        size, length, _, head_dim = self._read_shape
        # No query lies `length` or more positions behind a key, so a window that large hides nothing.
        window = rules.scores.window if rules.scores.window < length else 0
        if self._fold or _is_capped(rules.scores):
            return folded_attention(q, k, v, self._mask(window, True), rules)
        is_causal = self._is_causal and not window
        mask = None if is_causal else self._mask(window, False)
        q = q.view(size, self.num_queries, self._num_heads, head_dim).transpose(1, 2)
        output = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=rules.scale, enable_gqa=True
        )
        return output.transpose(1, 2).reshape(size * self.num_queries, -1)

    def _mask(self, window: int, fold: bool) -> Tensor:
        """Return what is added to scores, [B, 1, n, L], made once per forward; with `fold`, the n rows are repeated for
        each head of a group."""
        mask = self._masks.get((window, fold))
        if mask is None:
            _, length, num_kv_heads, _ = self._read_shape
            segments = [member.segment for member in self.members]
            allowed = torch.stack([_allowed(segment, self.num_queries, length) for segment in segments])
            if window:
                allowed &= self._within(window, length)
            # Torch would convert a bool mask to numbers in every layer.
            hidden = ~allowed.unsqueeze(1)
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
            mask.masked_fill_(hidden, float("-inf"))
            if fold:
                mask = mask.repeat(1, 1, self._num_heads // num_kv_heads, 1)
            self._masks[window, fold] = mask
        return mask

    def _within(self, window: int, length: int) -> Tensor:
        """Return bool [B, n, L]: whether a key lies less than `window` positions before a query.

        Keys whose place only a mask tells, which are nodes of earlier forwards, all count as near.
        """
        queries = self._positions.index_select(0, self._query_rows).view(len(self.members), -1, 1)
        keys = torch.arange(length, device=queries.device).repeat(len(self.members), 1)
        for row, (start, segment) in zip(keys, self.members, strict=True):
            n, used = segment.num_queries, segment.kv_slots.numel()
            if segment.mask is not None:
                row[used - segment.mask.shape[1] : used] = _NEAR
            row[used - n : used] = self._positions[start : start + n]
        return keys.unsqueeze(1) > queries - window

    def _read(self, cache: Tensor) -> Tensor:
        """Read the segments' slots of [num_slots, num_kv_heads, head_dim] as [B, num_kv_heads, L, head_dim]."""
        read = cache[self._slots] if isinstance(self._slots, slice) else cache.index_select(0, self._slots)
        return read.view(self._read_shape).transpose(1, 2)


def _check(segment: Segment) -> None:
    n, length = segment.num_queries, segment.kv_slots.numel()
    if not 1 <= n <= length:
        raise ValueError(f"a segment of {length} slots cannot have {n} queries")
    if segment.mask is None:
        return
    rows, columns = segment.mask.shape
    if rows != n or not n <= columns <= length:
        raise ValueError(f"a mask of {rows} x {columns} does not fit {n} queries over {length} positions")


def group_segments(members: list[Member]) -> list[list[Member]]:
    """Split a batch into groups; a segment joins the group before it if the padding costs no more than a call."""
    groups: list[list[Member]] = []
    queries = keys = 0
    for member in sorted(members, key=lambda member: (member.segment.num_queries, member.segment.kv_slots.numel())):
        num_queries, length = member.segment.num_queries, member.segment.kv_slots.numel()
        if groups:
            # Queries only grow in this order; keys may be fewer than the group's or more.
            size = len(groups[-1])
            joined_queries, joined_keys = max(queries, num_queries), max(keys, length)
            padding = (size + 1) * joined_queries * joined_keys - size * queries * keys - num_queries * length
            if padding <= PAIRS_PER_CALL:
                groups[-1].append(member)
                queries, keys = joined_queries, joined_keys
                continue
        groups.append([member])
        queries, keys = num_queries, length
    return groups


def row_order(groups: list[_GroupAttention], num_rows: int) -> Tensor | None:
    """Return where each batch row lies in the padded rows, group after group; None if rows are in order already."""
    order = torch.empty(num_rows, dtype=torch.int64)
    offset = 0
    for group in groups:
        for start, segment in group.members:
            order[start : start + segment.num_queries] = torch.arange(offset, offset + segment.num_queries)
            offset += group.num_queries
    if offset == num_rows and bool((order == torch.arange(num_rows)).all()):
        return None
    return order.to(groups[0].members[0].segment.kv_slots.device)


def _allowed(segment: Segment, num_rows: int, length: int) -> Tensor:
    """Return bool [num_rows, length]: context, the queries' own part, then padding. Padded rows may see anything."""
    n, used = segment.num_queries, segment.kv_slots.numel()
    allowed = torch.ones(num_rows, length, dtype=torch.bool, device=segment.kv_slots.device)
    allowed[:n, used:] = False
    if segment.mask is None:
        allowed[:n, used - n : used].tril_()
    else:
        allowed[:n, used - segment.mask.shape[1] : used] = segment.mask
    return allowed


def _as_slice(slots: Tensor) -> Tensor | slice:
    """Return consecutive slots as a slice, to be read in place. Checked only on a CPU, where this costs no sync."""
    if slots.device.type != "cpu":
        return slots
    first, length = int(slots[0]), slots.numel()
    if int(slots[-1]) - first == length - 1 and bool((slots[1:] - slots[:-1] == 1).all()):
        return slice(first, first + length)
    return slots


class HeadSplit:
    """Splits the heads of a forward's M tokens into q, k and v; made once, used by every layer."""

    def __init__(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> None:
        """See AttentionBackend.plan. Of `kv`, only the number of heads and the dtype matter."""
        self._sizes = (num_heads, kv.k.shape[2])
        self._positions, self._dtype, self._rotary = batch.positions, kv.k.dtype, rotary
        self._angles: dict[Rotary, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, heads: Tensor, qk_norm: RMSNorm | None, rotary: Rotary | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [M, num_heads, head_dim], k and v [M, num_kv_heads, head_dim], views of larger tensors; q and k are
        normed, if there is a norm, and rotated. See AttentionPlan.attend."""
        num_heads, num_kv_heads = self._sizes
        qk, v = heads.split((num_heads + num_kv_heads, num_kv_heads), 1)
        if qk_norm is not None:
            qk = qk_norm(qk)
        rotary = rotary or self._rotary
        if rotary.turns:
            if rotary not in self._angles:
                self._angles[rotary] = rotary.angles(self._positions, self._dtype)
            qk = rotate(qk, *self._angles[rotary])
        q, k = qk.split(self._sizes, 1)
        return q, k, v


def folded_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rules: LayerRules = PLAIN) -> Tensor:
    """Attention of B rows of n queries each, with H query heads in groups of G to a kv head.

    Args:
        q: [B * n, H, D].
        k: [B, K, L, D], like the values `v`.
        mask: what is added to scores, in the dtype of `q`, broadcast to [B, K, G * n, L]: the same n rows G times.
            None if every query sees every key.
        rules: the layer's; the mask includes the window.

    Returns [B * n, H * D].
    """
    rows = _fold_heads(q, k)
    if _is_capped(rules.scores):
        scale = q.shape[2] ** -0.5 if rules.scale is None else rules.scale
        output = _capped_attention(rows, k, v, mask, scale, rules.scores)
    else:
        output = scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=rules.scale)
    return _unfold_heads(output, q.shape[1] // k.shape[1])


def _is_capped(scores: ScoreRules) -> bool:
    """Whether scores have a cap or sinks, which torch's own attention does not support."""
    return bool(scores.softcap) or scores.sinks is not None


def _capped_attention(
    rows: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, scores: ScoreRules
) -> Tensor:
    """Attend with folded rows [B, K, G * n, D], capped scores and sinks; weights are float32."""
    if rows.device.type == "cpu" and rows.dtype == torch.bfloat16 and not bf16_flag():
        # Without instructions for bfloat16, products in it take many times as long.
        return _capped_attention(rows.float(), k.float(), v.float(), mask, scale, scores).to(rows.dtype)
    products = torch.matmul(rows, k.transpose(2, 3)).float() * scale
    if scores.softcap:
        products = torch.tanh(products / scores.softcap) * scores.softcap
    if mask is not None:
        products = products + mask
    if scores.sinks is None:
        weights = products.softmax(-1)
    else:
        size, num_kv_heads, num_rows = products.shape[:3]
        sinks = scores.sinks.view(num_kv_heads, -1, 1)
        sinks = sinks.expand(-1, -1, num_rows // sinks.shape[1]).reshape(1, num_kv_heads, num_rows, 1)
        weights = torch.cat((products, sinks.expand(size, -1, -1, -1)), -1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(v.dtype), v)


def _fold_heads(q: Tensor, k: Tensor) -> Tensor:
    """Fold [B * n, H, D] to [B, K, G * n, D] for keys [B, K, L, D]."""
    size, num_kv_heads, _, head_dim = k.shape
    num_rows, group = q.shape[0], q.shape[1] // num_kv_heads
    count = num_rows // size
    rows = q.view(size, count, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    return rows.reshape(size, num_kv_heads, group * count, head_dim)


def _unfold_heads(rows: Tensor, group: int) -> Tensor:
    """Unfold [B, K, G * n, D] to [B * n, K * G * D]."""
    size, num_kv_heads, folded, head_dim = rows.shape
    count = folded // group
    return rows.view(size, num_kv_heads, group, count, head_dim).permute(0, 3, 1, 2, 4).reshape(size * count, -1)


@dataclass(slots=True)
class RowSteps:
    """One request's nodes in a draft step.

    Attributes:
        row: the request's row in the burst.
        slots: int64 [n], tree slots of the step's nodes.
        places: int64 [L + u], KV slots of the context and of the tree's first u slots, which include all in use.
        seen: bool [n, u], which of these u tree slots each node sees.
    """

    row: int
    slots: Tensor
    places: Tensor
    seen: Tensor


@dataclass(slots=True)
class StepBatch(TokenBatch):
    """The nodes of a draft step, row by row; their keys and values go to `kv_slots`, int64 [M]."""

    kv_slots: Tensor
    rows: Sequence[RowSteps]

    def queries(self) -> tuple[list[Queries], Tensor]:
        """See TokenBatch."""
        return [Queries(len(part.slots), part.places, part.seen) for part in self.rows], self.kv_slots


class RegionAttention(AttentionBackend):
    """Keeps the keys and values of a burst's requests side by side, context first, gathered once for all steps.

    Keys and values of new nodes go to the cache, too.
    """

    def __init__(self, kv: KVCache, places: Sequence[Tensor], region: int) -> None:
        """`places`: for each request of the burst, KV slots of its context and tree region, int64 [L + region]."""
        self.kv, self._places = kv, places
        self.lengths = [len(found) - region for found in places]
        """Length of each context."""
        self.held: list[list[tuple[Tensor, Tensor]]] = []
        """Keys and values of each request, by layer."""

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend. Raises TypeError for a batch that is not a StepBatch."""
        if not isinstance(batch, StepBatch):
            raise TypeError(f"{type(batch).__name__} is no step of a burst")
        if not self.held:
            layers = range(len(self.kv.k_layers))
            self.held = [[_gather(self.kv, layer, places) for layer in layers] for places in self._places]
        return _RegionPlan(self, batch, num_heads, rotary)


class _RegionPlan(AttentionPlan):
    def __init__(self, region: RegionAttention, batch: StepBatch, num_heads: int, rotary: Rotary) -> None:
        self._region, self._batch = region, batch
        self._split = HeadSplit(batch, region.kv, num_heads, rotary)
        self._places = [part.slots + region.lengths[part.row] for part in batch.rows]
        k = region.kv.k
        self._masks = [_mask(part, k.dtype).repeat(num_heads // k.shape[2], 1) for part in batch.rows]

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None, rules: LayerRules = PLAIN) -> Tensor:
        q, k, v = self._split(heads, qk_norm, rules.rotary)
        region = self._region
        region.kv.write(layer, self._batch.kv_slots, k, v)
        outputs, first = [], 0
        for part, places, mask in zip(self._batch.rows, self._places, self._masks, strict=True):
            end = first + len(part.slots)
            keys, values = region.held[part.row][layer]
            keys.index_copy_(1, places, k[first:end].transpose(0, 1))
            values.index_copy_(1, places, v[first:end].transpose(0, 1))
            seen_keys, seen_values = (held[:, : mask.shape[1]].unsqueeze(0) for held in (keys, values))
            if rules.scores.window:
                mask = _within(mask, self._batch.positions[first:end], region.lengths[part.row], rules.scores.window)
            outputs.append(folded_attention(q[first:end], seen_keys, seen_values, mask, rules))
            first = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _mask(part: RowSteps, dtype: torch.dtype) -> Tensor:
    """Return [n, L + u]: 0 where a node sees a key, else -inf."""
    mask = torch.zeros(len(part.slots), len(part.places), dtype=dtype)
    mask[:, len(part.places) - part.seen.shape[1] :].masked_fill_(~part.seen, -torch.inf)
    return mask


def _within(mask: Tensor, positions: Tensor, length: int, window: int) -> Tensor:
    """Return a row's mask that also hides its context of `length` before the window; all of its tree counts as near."""
    far = torch.arange(length, device=mask.device) <= positions.unsqueeze(1) - window
    mask = mask.clone()
    mask[:, :length].masked_fill_(far.repeat(len(mask) // len(far), 1), float("-inf"))
    return mask


def _gather(kv: KVCache, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of a layer, each [K, L + region, D]."""
    keys, values = (
        cache.index_select(0, places).transpose(0, 1).contiguous() for cache in (kv.k_layers[layer], kv.v_layers[layer])
    )
    return keys, values
