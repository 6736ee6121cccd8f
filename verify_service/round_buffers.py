"""What a decode round on a GPU is told, and what it answers: one small copy each way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.attention.lengths import HostLengths
from outrider.attention.paged import TreeTokens
from outrider.device import stamp
from verify_service.request_rows import RequestRows
from verify_service.round import Entry

MAX_DEPTH = 31
"""Draft tokens of one path that a round may accept."""
MAX_EXTEND = 32
"""Committed tokens of one request that a decode round may compute."""
NUM_COMMITTED = MAX_DEPTH + 1
"""Tokens that a round may commit for one request."""


class Bucket(NamedTuple):
    """Shape of a captured round."""

    tokens: int
    rows: int
    only: bool = False
    """There is no other bucket, so rows may be empty."""

    @property
    def max_row_tokens(self) -> int:
        """Tokens that one row may have. With half of the rows empty, a smaller bucket would have been taken."""
        return self.tokens if self.only else self.tokens - self.rows // 2


class RoundInput:
    """The int32 fields of `TreeTokens`, and entries of page tables that the round adds, in one piece of memory.

    Laid out for the largest bucket, in pinned memory for the host to write and on the device.
    """

    _NAMES = ("token_ids", "positions", "parents", "rows", "first", "cached_len", "root", "table_rows", "updates")

    def __init__(self, max_tokens: int, max_rows: int, spare_row: int, device: torch.device) -> None:
        self._spare_row = spare_row
        self._max_updates = max_rows + max_tokens
        sizes = (max_tokens,) * 4 + (max_rows + 1,) + (max_rows,) * 3 + (3 * self._max_updates,)
        bounds = np.cumsum([0, *sizes]).tolist()
        self._pinned = torch.zeros(bounds[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(bounds[-1], dtype=torch.int32, device=device)
        flat = self._pinned.numpy()
        spans = {name: slice(*bounds[i : i + 2]) for i, name in enumerate(self._NAMES)}
        self._host: dict[str, NDArray[np.int32]] = {name: flat[span] for name, span in spans.items()}
        self._fields = {name: self._device[span] for name, span in spans.items()}
        self._num_updates = self._max_updates
        self.clear()

    def clear(self) -> None:
        """Describe a round without tokens."""
        self._write([], [], [], [], [0], [], [], [])
        self._write_updates([])

    def fill(self, entries: Sequence[Entry], rows: RequestRows) -> None:
        """Describe a round of these entries."""
        token_ids: list[int] = []
        positions: list[int] = []
        parents: list[int] = []
        token_rows: list[int] = []
        first, cached_len, root, table_rows = [0], [], [], []
        updates: list[tuple[int, int, int]] = []
        for row, entry in enumerate(entries):
            request, extend, nodes = entry.request, entry.num_extend, entry.nodes
            start, cached = len(token_ids), request.cached_len
            last = start + extend - 1
            table_rows.append(rows.row(request))
            updates += rows.new_pages(request)
            token_ids += request.tokens[cached : cached + extend]
            positions += range(cached, cached + extend)
            parents.append(-1)
            parents += range(start, last)
            if len(nodes):
                token_ids += nodes.token_ids
                positions += [cached + extend - 1 + depth for depth in nodes.depths]
                parents += [last if parent < 0 else last + 1 + parent for parent in nodes.parents]
            token_rows += [row] * (len(token_ids) - start)
            first.append(len(token_ids))
            cached_len.append(cached)
            root.append(last if entry.samples else -1)
        self._write(token_ids, positions, parents, token_rows, first, cached_len, root, table_rows)
        self._write_updates(updates)

    def fill_chain(self, num_tokens: int, cached_len: int) -> None:
        """Describe a round of one request, in the row that belongs to nobody, for measurements."""
        count = range(num_tokens)
        chain = [index - 1 for index in count]
        positions = [cached_len + index for index in count]
        ends, spare = [0, num_tokens], [self._spare_row]
        self._write([1] * num_tokens, positions, chain, [0] * num_tokens, ends, [cached_len], [0], spare)
        self._write_updates([])

    def _write(
        self,
        token_ids: list[int],
        positions: list[int],
        parents: list[int],
        rows: list[int],
        first: list[int],
        cached_len: list[int],
        root: list[int],
        table_rows: list[int],
    ) -> None:
        host, count, num_rows = self._host, len(token_ids), len(root)
        for name, values, pad in (
            ("token_ids", token_ids, 0),
            ("positions", positions, 0),
            ("parents", parents, -1),
            ("rows", rows, -1),
        ):
            host[name][:count] = values
            host[name][count:] = pad
        host["first"][: num_rows + 1] = first
        host["first"][num_rows + 1 :] = count
        host["cached_len"][:num_rows] = cached_len
        host["cached_len"][num_rows:] = 0
        host["root"][:num_rows] = root
        host["root"][num_rows:] = -1
        host["table_rows"][:num_rows] = table_rows
        host["table_rows"][num_rows:] = self._spare_row

    def _write_updates(self, updates: Sequence[tuple[int, int, int]]) -> None:
        flat = self._host["updates"].reshape(-1, 3)
        if updates:
            flat[: len(updates)] = updates
        flat[len(updates) : self._num_updates, 0] = -1
        self._num_updates = len(updates)

    def to_device(self) -> None:
        """Copy everything; may be captured."""
        self._device.copy_(self._pinned, non_blocking=True)

    def tokens(self, bucket: Bucket) -> TreeTokens:
        """The fields on the device, cut to the bucket."""
        num_tokens, num_rows = bucket.tokens, bucket.rows
        fields = self._fields
        sizes = {"first": num_rows + 1, "cached_len": num_rows, "root": num_rows, "table_rows": num_rows}
        names = self._NAMES[:-1]
        return TreeTokens(**{name: fields[name][: sizes.get(name, num_tokens)] for name in names})

    def lengths(self, bucket: Bucket) -> HostLengths:
        """The bucket's lengths in host memory; the next round overwrites them."""
        return HostLengths(self._host["first"][: bucket.rows + 1], self._host["cached_len"][: bucket.rows])

    @property
    def updates(self) -> Tensor:
        """On the device, [U, 3] of table row, place and page; a negative row means nothing."""
        return self._fields["updates"].view(-1, 3)


class RoundOutput:
    """What a round brought each row: int32 [B, 2 + 2 * NUM_COMMITTED] of number of tokens, error, tokens, nodes.

    Before it lie two int64 clock readings in nanoseconds: when the round began and ended on the device.
    """

    _CLOCK = 4

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._width = 2 + 2 * NUM_COMMITTED
        size = self._CLOCK + max_rows * self._width
        self._pinned = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._times = self._device[: self._CLOCK].view(torch.int64)
        self._rows = self._device[self._CLOCK :].view(max_rows, self._width)
        self._host = self._pinned.numpy()

    def fields(self, bucket: Bucket) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """num_tokens [B], error [B], tokens [B, NUM_COMMITTED], accepted [B, NUM_COMMITTED]."""
        rows = self._rows[: bucket.rows]
        return rows[:, 0], rows[:, 1], rows[:, 2 : 2 + NUM_COMMITTED], rows[:, 2 + NUM_COMMITTED :]

    def stamp(self, index: int) -> None:
        """Note the device's time: 0 for the begin, 1 for the end."""
        stamp(self._times, index)

    def to_host(self, bucket: Bucket) -> None:
        """Copy the bucket's rows; may be captured."""
        end = self._CLOCK + bucket.rows * self._width
        self._pinned[:end].copy_(self._device[:end], non_blocking=True)

    def read(self, num_rows: int) -> list[list[int]]:
        """Rows [number of tokens, error, tokens ...], once the copy is done."""
        rows = self._host[self._CLOCK : self._CLOCK + num_rows * self._width].reshape(num_rows, self._width)
        read: list[list[int]] = rows[:, : 2 + NUM_COMMITTED].tolist()
        return read

    @property
    def clock(self) -> tuple[int, int]:
        """Nanoseconds at the round's begin and end."""
        begin, end = self._host[: self._CLOCK].view(np.int64).tolist()
        return begin, end
