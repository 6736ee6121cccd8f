"""A tree that grows over several forwards, through the backend that a draft runner uses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.attention.paged import PagedBatch
from outrider.attention.triton_backend import TritonAttention
from outrider.cache.kv import KVCache
from outrider.layers.rotary import Rotary
from outrider.models.parts import RopeConfig

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 16, 4
CONTEXT, BASE, REGION = 9, 16, 32
PARENTS = [-1, 0, 0, 1, 1, 2, 4]
# Where the nodes come to lie in the region, and the order in which they are run: any, parents first.
SLOTS = [5, 2, 31, 0, 7, 9, 30]
STEPS = [[0, 2], [1, 5], [4], [6, 3]]


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ancestors(node: int) -> list[int]:
    """The node and those above it."""
    return [] if node < 0 else [node, *ancestors(PARENTS[node])]


def bits(places: list[int]) -> int:
    """A mask word as a signed number."""
    word = sum(1 << place for place in places)
    return word - (1 << 32) if word >> 31 else word


def batch(nodes: list[int], tables: Tensor, places: list[int], masks: list[int], region_base: int | None) -> PagedBatch:
    return PagedBatch(
        token_ids=ints([0] * len(nodes)),
        positions=ints([CONTEXT + len(ancestors(node)) - 1 for node in nodes]),
        first=ints([0, len(nodes)]),
        cached_len=ints([CONTEXT]),
        table_rows=ints([0]),
        page_tables=tables,
        slots=ints([int(tables[0, place // PAGE]) * PAGE + place % PAGE for place in places]),
        page_size=PAGE,
        max_row_tokens=len(nodes),
        mask=ints(masks).unsqueeze(1),
        region_base=region_base,
    )


def test_a_tree_grown_in_steps_is_the_tree_run_at_once() -> None:
    torch.manual_seed(0)
    tables = torch.randperm((BASE + REGION) // PAGE).to(torch.int32).unsqueeze(0)
    kv = KVCache(1, tables.numel() * PAGE, KV_HEADS, DIM, torch.float32)
    kv.k.normal_()
    kv.v.normal_()
    rotary = Rotary(RopeConfig(), DIM, torch.device("cpu"))
    heads = torch.randn(len(PARENTS), HEADS + 2 * KV_HEADS, DIM)
    everything = list(range(len(PARENTS)))
    masks = [bits(ancestors(node)) for node in everything]
    whole = batch(everything, tables, [CONTEXT + node for node in everything], masks, None)
    # In a copy, for it writes where the steps find what nobody may read.
    copy = KVCache(1, kv.num_slots, KV_HEADS, DIM, torch.float32)
    copy.k.copy_(kv.k)
    copy.v.copy_(kv.v)
    expected = TritonAttention().plan(whole, copy, HEADS, rotary).attend(0, heads, None)
    for nodes in STEPS:
        masks = [bits([SLOTS[above] for above in ancestors(node)]) for node in nodes]
        step = batch(nodes, tables, [BASE + SLOTS[node] for node in nodes], masks, BASE)
        result = TritonAttention().plan(step, kv, HEADS, rotary).attend(0, heads[nodes], None)
        torch.testing.assert_close(result, expected[nodes])


def test_a_region_needs_a_mask_and_has_no_deterministic_mode() -> None:
    tables = torch.arange((BASE + REGION) // PAGE, dtype=torch.int32).unsqueeze(0)
    kv = KVCache(1, tables.numel() * PAGE, KV_HEADS, DIM, torch.float32)
    rotary = Rotary(RopeConfig(), DIM, torch.device("cpu"))
    step = batch([0], tables, [BASE], [1], BASE)
    step.path = ints([0]).unsqueeze(1)
    with pytest.raises(ValueError, match="deterministic"):
        TritonAttention().plan(step, kv, HEADS, rotary)
    step.path = step.mask = None
    with pytest.raises(ValueError, match="a mask"):
        TritonAttention().plan(step, kv, HEADS, rotary)
