"""Segments of like size, padded to one rectangle: a few large calls beat many small ones on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.attention.base import Segment

# A call of its own costs what this many padded (query, key) pairs cost: 50 us against 25 ns, measured on 2 Zen 4 cores.
PAIRS_PER_CALL = 2000


class Member(NamedTuple):
    """A segment and its first row in the batch."""

    start: int
    segment: Segment


class Group:
    """Segments that share a call: queries padded to the most of them, keys to the longest.

    Attributes:
        shape: (segments, queries, keys) of the padded call.
        slots: int64 [segments * keys], or a slice where one segment's slots follow each other.
        rows: int64 [segments * queries], the batch row of each padded query.
        mask: bool [segments, 1, queries, keys], True where a query may attend; None when every query sees every key.
        is_causal: one segment with an empty context, for which the lower triangle is the whole mask.
    """

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        segments = [member.segment for member in members]
        num_queries = max(segment.num_queries for segment in segments)
        length = max(segment.kv_slots.numel() for segment in segments)
        self.shape = (len(members), num_queries, length)
        device = segments[0].kv_slots.device
        slots = torch.empty(len(members), length, dtype=torch.int64, device=device)
        rows = torch.arange(num_queries, device=device).repeat(len(members), 1)
        for i, (start, segment) in enumerate(members):
            # What pads is real memory that the mask hides: the segment's own first slot, its own last query.
            used = segment.kv_slots.numel()
            slots[i, :used] = segment.kv_slots
            slots[i, used:] = segment.kv_slots[0]
            rows[i].clamp_(max=segment.num_queries - 1).add_(start)
        self.slots = _as_slice(slots.view(-1)) if len(members) == 1 else slots.view(-1)
        self.rows = rows.view(-1)
        self.is_causal = len(members) == 1 and segments[0].mask is None and 1 < num_queries == length
        self.mask: Tensor | None = None
        hides = segments[0].mask is not None and segments[0].mask.shape[1] > 1
        if not self.is_causal and (len(members) > 1 or num_queries > 1 or hides):
            self.mask = torch.stack([_allowed(segment, num_queries, length) for segment in segments]).unsqueeze(1)


def group_segments(members: list[Member]) -> list[Group]:
    """Split a batch into groups; a segment joins the one before it while the padding costs less than a call."""
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
    return [Group(group) for group in groups]


def row_order(groups: list[Group], num_rows: int) -> Tensor | None:
    """Where each batch row lies in the groups' padded rows, one group after the other; None when in order already."""
    order = torch.empty(num_rows, dtype=torch.int64)
    offset = 0
    for group in groups:
        num_queries = group.shape[1]
        for start, segment in group.members:
            order[start : start + segment.num_queries] = torch.arange(offset, offset + segment.num_queries)
            offset += num_queries
    if offset == num_rows and bool((order == torch.arange(num_rows)).all()):
        return None
    return order.to(groups[0].rows.device)


def _allowed(segment: Segment, num_rows: int, length: int) -> Tensor:
    """bool [num_rows, length]: context, then the queries' own part, then padding. Padded rows may see anything."""
    n, used = segment.num_queries, segment.kv_slots.numel()
    allowed = torch.ones(num_rows, length, dtype=torch.bool, device=segment.kv_slots.device)
    allowed[:n, used:] = False
    if segment.mask is None:
        allowed[:n, used - n : used].tril_()
    else:
        allowed[:n, used - segment.mask.shape[1] : used] = segment.mask
    return allowed


def _as_slice(slots: Tensor) -> Tensor | slice:
    """Slots that follow each other are read in place. Asked on a CPU only, where it costs no sync."""
    if slots.device.type != "cpu":
        return slots
    first, length = int(slots[0]), slots.numel()
    if int(slots[-1]) - first == length - 1 and bool((slots[1:] - slots[:-1] == 1).all()):
        return slice(first, first + length)
    return slots
