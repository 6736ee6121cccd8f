"""Keys and values go where they are told."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.cache.kv import KVCache

NUM_SLOTS = 12


def filled() -> KVCache:
    kv = KVCache(2, NUM_SLOTS, 1, 2, torch.float32)
    kv.k.copy_(torch.arange(kv.k.numel()).view_as(kv.k))
    kv.v.copy_(-kv.k)
    return kv


@given(st.permutations(range(NUM_SLOTS)), st.permutations(range(NUM_SLOTS)), st.integers(0, NUM_SLOTS))
def test_move_reads_all_before_it_writes(src: list[int], dst: list[int], count: int) -> None:
    kv, before = filled(), filled()
    kv.move(torch.tensor(src[:count], dtype=torch.int64), torch.tensor(dst[:count], dtype=torch.int64))
    origin = list(range(NUM_SLOTS))
    for source, target in zip(src[:count], dst[:count], strict=True):
        origin[target] = source
    assert torch.equal(kv.k, before.k[:, origin])
    assert torch.equal(kv.v, before.v[:, origin])


def test_write_touches_one_layer_and_its_slots() -> None:
    kv, before = filled(), filled()
    k, v = torch.full((2, 1, 2), 7.0), torch.full((2, 1, 2), 8.0)
    kv.write(1, torch.tensor([9, 4]), k, v)
    assert torch.equal(kv.k[0], before.k[0])
    assert torch.equal(kv.k[1, [9, 4]], k) and torch.equal(kv.v[1, [9, 4]], v)
    rest = [slot for slot in range(NUM_SLOTS) if slot not in (9, 4)]
    assert torch.equal(kv.k[1, rest], before.k[1, rest])


def test_bytes_per_slot_is_what_the_tensors_take() -> None:
    kv = filled()
    assert KVCache.bytes_per_slot(2, 1, 2, torch.float32) * NUM_SLOTS == kv.k.nbytes + kv.v.nbytes
