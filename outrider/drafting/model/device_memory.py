"""Device memory of a draft model's requests: KV, page tables and features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.frontier_state import BlockStore, RegionPlan
from outrider.attention.paged import update_pages
from outrider.cache.pages import page_slots
from outrider.device import put
from outrider.drafting.model.burst import BurstShape, Int32s
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.heads import NOWHERE, BlockHead


class DeviceMemory:
    """KV pages, page tables, slot masks and features of `shape.num_rows` rows, and of a spare row for padding.

    A row's logical KV positions are first the context, in pages that the host hands out. The tree region follows, from
    the same position on in every row, in pages that stay with the row. Context pages are numbered from 0, and region
    pages follow them. Behind the region's tree slots comes the model's scratch, and then the row's pages for the first
    tokens of a cut context (see ContextCut), which are in the table only if the context is cut.
    """

    def __init__(self, model: DraftModel, shape: BurstShape) -> None:
        device, size = model.device, shape.page_size
        self._shape = shape
        self._num_context = -(-shape.max_context // size)
        num_region = -(-(shape.region + model.num_scratch) // size)
        num_own = num_region + shape.sink_pages
        num_slots = (shape.num_pages + shape.num_rows * num_own) * size
        self.kv = model.new_kv(num_slots)
        self._first_region = shape.num_pages * size
        self._region_stride = num_own * size
        self._first_sink = num_region * size
        self._host = np.zeros((shape.num_rows + 1, self._num_context + num_region), np.int32)
        regions = shape.num_pages + np.arange(shape.num_rows * num_own, dtype=np.int32)
        self._host[: shape.num_rows, self._num_context :] = regions.reshape(shape.num_rows, num_own)[:, :num_region]
        self._num_known = [0] * shape.num_rows
        self._updates: list[tuple[int, int, int]] = []
        self._moves: list[tuple[int, Sequence[int], int]] = []  # row, tree slots, context position
        masks = (shape.num_rows + 1, shape.region, shape.region // 32)
        self.plan = RegionPlan(
            page_tables=torch.from_numpy(self._host.copy()).to(device),
            slot_masks=torch.zeros(masks, dtype=torch.int32, device=device),
            page_size=size,
            region_base=self._num_context * size,
            lag=shape.lag,
        )
        self.shifts = torch.zeros(shape.num_rows + 1, dtype=torch.int32, device=device)
        """Pages that each row's table leaves out behind the first tokens; for tables that follow another model's."""
        self._shifts = [0] * (shape.num_rows + 1)
        self.features: Tensor | None = None
        """Features of tree slots (for a block head, the state that nodes leave to their children), a row of zeros, and
        a burst's features: see kernels.frontier_state."""
        self.first_given = masks[0] * shape.region + 1
        """Row of a burst's first feature in the feature store."""
        if shape.feature_size:
            store = (self.first_given + shape.max_seeds, max(shape.feature_size, model.state_size))
            self.features = torch.zeros(store, dtype=model.dtype, device=device)
        self._blocks = model.new_blocks(masks[0]) if isinstance(model, BlockHead) else None

    @property
    def num_bytes(self) -> int:
        """Device memory in use, in bytes."""
        held = [self.kv.k, self.kv.v, self.plan.page_tables, self.plan.slot_masks]
        held += [] if self.features is None else [self.features]
        held += [] if self._blocks is None else self._blocks
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @property
    def room_for_blocks(self) -> BlockStore:
        """The last block of each row, and a row for padding. Raises ValueError for a model without blocks."""
        if self._blocks is None:
            raise ValueError("blocks of a model that has none")
        return self._blocks

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """Set all context pages of a row; `flush` copies new ones to the device. Raises ValueError for too many."""
        known = self._num_known[row]
        if len(pages) > self._num_context:
            raise ValueError(f"{len(pages)} context pages in a row; it has room for {self._num_context}")
        self._host[row, known : len(pages)] = pages[known:]
        self._updates += [(row, place, pages[place]) for place in range(known, len(pages))]
        self._num_known[row] = max(known, len(pages))

    def enter_pages(self, row: int, place: int, pages: Sequence[int]) -> None:
        """Queue a copy of another model's pages to the row's table, except pages that are left out.

        `place`: place of the first page in the other model's table.
        """
        shift = self._shifts[row]
        left_out = max(shift + self._shape.sink_pages - place, 0) if shift else 0
        place += left_out - shift
        into = self.plan.page_tables[row, place : place + max(len(pages) - left_out, 0)]
        put(pages[left_out:], into.device, into=into)

    def update_pages(self, updates: Tensor) -> None:
        """As `enter_pages`, for updates int32 [U, 3], see kernels.kv_cache.update_pages; may be captured."""
        update_pages(self.plan.page_tables, updates, self.shifts, self._shape.sink_pages)

    def cut(self, row: int, shift: int, pages: Sequence[int]) -> None:
        """Queue the cut of a row: its table leaves out `shift` of the other model's `pages` behind the first tokens,
        which get pages of the row's own. 0 leaves out nothing."""
        if shift == self._shifts[row]:
            return
        self._shifts[row] = shift
        put([shift], self.shifts.device, into=self.shifts[row : row + 1])
        if shift:
            first = self.sink_start(row) // self._shape.page_size
            sinks = range(first, first + self._shape.sink_pages)
            table = [*sinks, *pages[shift + len(sinks) :]]
            put(table, self.shifts.device, into=self.plan.page_tables[row, : len(table)])

    def sink_start(self, row: int) -> int:
        """Return the KV slot of a cut row's first token; those of the other first tokens follow it."""
        return self.region_start(row) + self._first_sink

    def forget(self, row: int) -> None:
        """Forget a row's pages and block, and drop its queued updates and moves."""
        self._num_known[row] = 0
        if self._blocks is not None:
            # The next request's root may run before its features came, and would read this request's block.
            self._blocks.begins[row : row + 1].fill_(NOWHERE)
        self._updates = [update for update in self._updates if update[0] != row]
        self._moves = [move for move in self._moves if move[0] != row]

    def move(self, row: int, slots: Sequence[int], position: int) -> None:
        """Queue a move of the KV of tree slots to context positions `position`, ...; the next `flush` launches it."""
        self._check_pages(row, position, position + len(slots))
        self._moves.append((row, slots, position))

    def flush(self) -> None:
        """Queue the copy of new pages, and all moves in one launch."""
        device = self.plan.page_tables.device
        if self._updates:
            update_pages(self.plan.page_tables, put(np.array(self._updates, np.int32), device))
            self._updates = []
        if self._moves:
            self.kv.move_pairs(put(self._move_pairs(), device))
            self._moves = []

    def warm_up(self) -> None:
        """Launch the kernels of `flush`, without effect."""
        nothing = put([-1] * 6, self.plan.page_tables.device)
        update_pages(self.plan.page_tables, nothing.view(2, 3))
        self.kv.move_pairs(nothing.view(3, 2))

    def context_slots(self, row: int, start: int, end: int) -> Int32s:
        """Return the KV slots of a row's context positions start .. end - 1. Raises ValueError if pages are missing."""
        self._check_pages(row, start, end)
        return page_slots(self._host[row], self._shape.page_size, start, end)

    def region_start(self, row: int) -> int:
        """Return the KV slot of the row's tree slot 0; those of the other tree slots follow it."""
        return self._first_region + row * self._region_stride

    def take_features(self, parts: Sequence[Any]) -> None:
        """Queue the copy of a burst's features, at most as many positions as the burst has seeds."""
        if not parts or self.features is None:
            return
        end = self.first_given + sum(len(part) for part in parts)
        join_rows(parts, self.features[self.first_given : end, : self._shape.feature_size])

    def _move_pairs(self) -> Int32s:
        """Return pairs of KV slots, from and to which KV moves: [N, 2]."""
        size = self._shape.page_size
        counts = [len(slots) for _, slots, _ in self._moves]
        rows = np.array([row for row, _, _ in self._moves], np.int32).repeat(counts)
        pairs = np.empty((len(rows), 2), np.int32)
        pairs[:, 0] = self._first_region + rows * self._region_stride
        pairs[:, 0] += np.array([slot for _, slots, _ in self._moves for slot in slots], np.int32)
        starts = ((slots, position) for _, slots, position in self._moves)
        positions = np.array([start + index for slots, start in starts for index in range(len(slots))], np.int32)
        pairs[:, 1] = self._host[rows, positions // size] * size + positions % size
        return pairs

    def _check_pages(self, row: int, start: int, end: int) -> None:
        size = self._shape.page_size
        if not 0 <= start <= end <= self._num_known[row] * size:
            raise ValueError(f"context positions {start} to {end} of a row with {self._num_known[row]} pages of {size}")


def working_on(device: torch.device) -> AbstractContextManager[None]:
    """Set device and inference mode for a thread. Checking that both are set takes a tenth of the time of setting."""
    if torch.is_inference_mode_enabled() and (device.type != "cuda" or torch.cuda.current_device() == device.index):
        return nullcontext()
    return _enter(device)


@contextmanager
def _enter(device: torch.device) -> Iterator[None]:
    with torch.inference_mode(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


def join_rows(parts: Sequence[Tensor], into: Tensor) -> None:
    """Copy parts [N, feature_size], one behind the other, to `into`; in one launch if they lie on its device."""
    if len(parts) == 1:
        into.copy_(parts[0], non_blocking=True)
        return
    torch.cat(list(parts), out=into)
