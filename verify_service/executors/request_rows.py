"""Which row of the device's tables belongs to which request, and which of its pages the device knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.attention.paged import update_page_tables
from outrider.device import put
from outrider.sampling.device import DeviceSampler
from verify_service.engine.request import Request


class Rows(Protocol):
    """What a round asks of rows."""

    def row(self, request: Request) -> int:
        """The request's row."""

    def new_pages(self, request: Request) -> Sequence[tuple[int, int, int]]:
        """(row, place, page) of pages that the device does not know; from now on it does."""


class NoRows:
    """Rows of a round that is only rehearsed: nobody gets one, and no page is told of."""

    def __init__(self, spare: int) -> None:
        self._spare = spare

    def row(self, request: Request) -> int:
        """See Rows."""
        return self._spare

    def new_pages(self, request: Request) -> Sequence[tuple[int, int, int]]:
        """See Rows."""
        return ()


class RequestRows:
    """Rows of requests that run, from their first round until they end or give up their pages.

    Row `num_rows` belongs to nobody: padding and measurements use it.
    """

    def __init__(self, num_rows: int, max_pages: int, sampler: DeviceSampler, device: torch.device) -> None:
        self.page_tables = torch.zeros(num_rows + 1, max_pages, dtype=torch.int32, device=device)
        self.spare = num_rows
        self._sampler = sampler
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: dict[Request, int] = {}
        self._num_known: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, request: Request) -> int:
        """The request's row; it gets one if it has none."""
        found = self._rows.get(request)
        return self._admit(request) if found is None else found

    def forget(self, request: Request) -> None:
        """Free the row."""
        row = self._rows.pop(request, None)
        if row is not None:
            self._free.append(row)
            del self._num_known[request]

    def new_pages(self, request: Request) -> Sequence[tuple[int, int, int]]:
        """(row, place, page) of pages that the device does not know; from now on it does."""
        known, pages = self._num_known[request], request.pages
        if known == len(pages):
            return ()
        self._num_known[request] = len(pages)
        row = self._rows[request]
        return [(row, place, pages[place]) for place in range(known, len(pages))]

    def _admit(self, request: Request) -> int:
        row = self._free.pop()
        self._rows[request] = row
        # Many pages at once are a copy of their own; a round's updates have room for those that it adds.
        self._num_known[request] = 0
        self.copy_pages(request)
        self._sampler.admit(row, request.sampling, request.tokens, request.prompt_len)
        return row

    def update(self, updates: Tensor) -> None:
        """Enter what a round adds, [U, 3] on the device, into the page tables."""
        update_page_tables(self.page_tables, updates)

    def copy_pages(self, request: Request) -> None:
        """Tell the device of all new pages at once, outside a round."""
        known, pages = self._num_known[request], request.pages
        if known < len(pages):
            row = self.page_tables[self._rows[request], known : len(pages)]
            put(pages[known:], self.page_tables.device, into=row)
            self._num_known[request] = len(pages)
