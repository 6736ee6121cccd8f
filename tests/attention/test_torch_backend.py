"""The torch backend: heads that are split, normed and rotated, folded attention, and segments that share a call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.attention.base import ForwardBatch, Segment, TokenBatch
from outrider.attention.torch_backend import HeadSplit, TorchAttention, folded_attention
from outrider.cache.kv import KVCache
from outrider.layers.linear import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.parts import RopeConfig

HEADS, KV_HEADS, DIM, EPS = 6, 2, 8, 1e-5
CPU = torch.device("cpu")


def rotated(head: Tensor, position: int) -> Tensor:
    """[DIM], pair by pair."""
    angles = position / RopeConfig().theta ** (torch.arange(DIM // 2) / (DIM // 2))
    low, high = head.chunk(2)
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()])


@pytest.mark.parametrize("normed", [False, True])
def test_queries_and_keys_are_normed_and_rotated_and_values_stay(normed: bool) -> None:
    torch.manual_seed(0)
    positions = torch.tensor([0, 3, 200, 3])
    heads = torch.randn(4, HEADS + 2 * KV_HEADS, DIM)
    norm = RMSNorm((HEADS + KV_HEADS, DIM), EPS, torch.float32, CPU)
    norm.weight.uniform_(0.5, 1.5)
    batch = TokenBatch(torch.zeros(4, dtype=torch.int64), positions)
    kv = KVCache(1, 4, KV_HEADS, DIM, torch.float32)
    split = HeadSplit(batch, kv, HEADS, Rotary(RopeConfig(), DIM, CPU))
    q, k, v = split(heads.clone(), norm if normed else None)
    found = torch.cat([q, k], 1)
    assert q.shape[1] == HEADS and torch.equal(v, heads[:, HEADS + KV_HEADS :])
    for token, position in enumerate(positions.tolist()):
        for number in range(HEADS + KV_HEADS):
            head = heads[token, number]
            if normed:
                head = head * (head.square().mean() + EPS).rsqrt() * norm.weight[number]
            torch.testing.assert_close(found[token, number], rotated(head, position), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("size", "count"), [(1, 1), (1, 5), (3, 4)])
def test_folded_attention_equals_that_of_each_query_head_alone(size: int, count: int, masked: bool) -> None:
    torch.manual_seed(1)
    q = torch.randn(size * count, HEADS, DIM)
    k, v = torch.randn(2, size, KV_HEADS, 9, DIM)
    group = HEADS // KV_HEADS
    hidden = torch.rand(size, 1, count, 9) < 0.5
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf) if masked else None
    found = folded_attention(q, k, v, None if mask is None else mask.repeat(1, 1, group, 1))
    rows = q.view(size, count, HEADS, DIM)
    expected = torch.empty_like(rows)
    for head in range(HEADS):
        own_k, own_v = (part[:, head // group, None] for part in (k, v))
        attended = scaled_dot_product_attention(rows[:, None, :, head], own_k, own_v, attn_mask=mask)
        expected[:, :, head] = attended[:, 0]
    torch.testing.assert_close(found, expected.view(size * count, -1), rtol=1e-4, atol=1e-5)


SLOTS = 40


def rotary() -> Rotary:
    return Rotary(RopeConfig(kind="default", theta=10000.0), DIM, torch.device("cpu"))


def visible(segment: Segment) -> torch.Tensor:
    """bool [n, L]."""
    n, length = segment.num_queries, segment.kv_slots.numel()
    seen = torch.ones(n, length, dtype=torch.bool)
    if segment.mask is None:
        return seen.tril(length - n)
    seen[:, length - segment.mask.shape[1] :] = segment.mask
    return seen


def attend(segments: list[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
    """By the backend, and key by key."""
    generator = torch.Generator().manual_seed(3)
    kv = KVCache(1, SLOTS, KV_HEADS, DIM, torch.float32)
    for cache in (kv.k, kv.v):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    count = sum(segment.num_queries for segment in segments)
    heads = torch.randn(count, HEADS + 2 * KV_HEADS, DIM, generator=generator)
    # Positions of 0 leave queries and keys unrotated.
    batch = ForwardBatch(torch.zeros(count).long(), torch.zeros(count).long(), segments)
    ours = TorchAttention().plan(batch, kv, HEADS, rotary()).attend(0, heads, None)
    expected, start = [], 0
    for segment in segments:
        seen = visible(segment)
        for i in range(segment.num_queries):
            slots = segment.kv_slots[seen[i]]
            k, v = (cache[0, slots].repeat_interleave(HEADS // KV_HEADS, 1) for cache in (kv.k, kv.v))
            weights = (torch.einsum("hd,lhd->hl", heads[start + i, :HEADS], k) * DIM**-0.5).softmax(-1)
            expected.append(torch.einsum("hl,lhd->hd", weights, v).flatten())
        start += segment.num_queries
    return ours, torch.stack(expected)


def segment(first: int, length: int, num_queries: int, columns: int, seed: int) -> Segment:
    """Slots first, first + 1, ...; a random mask over the last `columns` in which all see themselves."""
    mask = torch.rand(num_queries, columns, generator=torch.Generator().manual_seed(seed)) < 0.5
    own = torch.arange(num_queries)
    mask[own, columns - num_queries + own] = True
    return Segment(num_queries, torch.arange(first, first + length), mask)


@pytest.mark.parametrize(("num_queries", "columns"), [(1, 1), (1, 5), (3, 3), (3, 8), (4, 12)])
def test_masks_reach_back_before_the_queries(num_queries: int, columns: int) -> None:
    torch.testing.assert_close(*attend([segment(2, 12, num_queries, columns, 1)]))


def test_segments_of_all_kinds_in_one_batch() -> None:
    kinds = [segment(0, 9, 2, 6, 1), Segment(3, torch.arange(9, 15)), segment(15, 10, 1, 7, 2), segment(25, 8, 4, 4, 3)]
    torch.testing.assert_close(*attend(kinds))


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (3, 9)])
def test_masks_that_do_not_fit_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="does not fit 3 queries over 8 positions"):
        attend([Segment(3, torch.arange(8), torch.ones(shape, dtype=torch.bool))])
