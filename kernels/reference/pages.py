"""See kernels.pages."""

from __future__ import annotations

from torch import Tensor


def update_pages(page_tables: Tensor, updates: Tensor) -> None:
    """As kernels.pages.update_pages."""
    for row, place, page in updates.tolist():
        if row >= 0:
            page_tables[row, place] = page
