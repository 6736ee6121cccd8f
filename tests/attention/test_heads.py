from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.attention.base import TokenBatch
from outrider.attention.torch_backend import HeadSplit, folded_attention
from outrider.cache.kv import KVCache
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.config import RopeConfig

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
