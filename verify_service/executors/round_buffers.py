"""Decode rounds on a GPU: the shapes they are padded to, rows of requests, and one small copy each way."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from struct import Struct
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.attention.base import HostLengths
from outrider.attention.paged import RoundTokens, update_pages
from outrider.device import put, stamp
from outrider.models.capacity import TOKEN_BUCKETS, row_buckets, width_buckets
from outrider.sampling.device import DeviceSampler
from verify_service.engine.request import Request
from verify_service.engine.round import Entry
from verify_service.executors.ranks import PAGES, ExecutorLink

MAX_DEPTH = 31
"""Most draft tokens of one path that a round may accept."""
NUM_COMMITTED = MAX_DEPTH + 1
"""Most tokens that a round may commit for one request."""
_WIDTH = 2 + 2 * NUM_COMMITTED
_CLOCK = 6
"""Words of a round's output: of each row (_WIDTH), and before the rows (_CLOCK)."""
_USUAL_COMMITTED = 4
"""Most rounds commit no more tokens than this for a request; longer rows are read in a second step."""


class Bucket(NamedTuple):
    """Shape of a captured round."""

    tokens: int
    rows: int
    only: bool = False
    """Whether there is no other bucket, so that rows may be empty."""
    is_bare: bool = False
    """Whether nothing is done for a drafter inside rounds: no trees are taken, no features stored."""

    @property
    def max_row_tokens(self) -> int:
        """Most tokens that one row may have. With half of the rows empty, a smaller bucket would have been taken."""
        return self.tokens if self.only else self.tokens - self.rows // 2


@cache
def _int32s(count: int) -> Struct:
    return Struct(f"{count}i")


@dataclass(eq=False, slots=True)
class _Lists:
    """The fields of a round that is being laid out."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=lambda: [0])
    cached_lens: list[int] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    table_rows: list[int] = field(default_factory=list)


def _list_tokens(entries: Sequence[Entry], lists: _Lists) -> None:
    """List the tokens of entries of any kind."""
    token_ids, positions, parents, first = lists.token_ids, lists.positions, lists.parents, lists.first
    for row, entry in enumerate(entries):
        tokens, extend, nodes, cached = entry.request.tokens, entry.num_extend, entry.nodes, entry.start
        last = len(token_ids) + extend - 1
        token_ids += [-1] if entry.is_ahead else tokens[cached : cached + extend]
        positions += range(cached, cached + extend)
        parents += (-1, *range(last + 1 - extend, last))
        if nodes.token_ids:
            base = cached + extend - 1
            token_ids += nodes.token_ids
            positions += [base + depth for depth in nodes.depths]
            # A parent of -1 is the root.
            parents += [last + 1 + parent for parent in nodes.parents]
        lists.rows += [row] * (len(token_ids) - first[-1])
        first.append(len(token_ids))
        lists.roots.append(last if entry.samples else -1)


class _HostInput:
    """The fields of a round in pinned memory, and how many updates of page tables were written to it."""

    def __init__(self, size: int, spans: Mapping[str, slice], pinned: bool) -> None:
        self.memory = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        flat: NDArray[np.int32] = self.memory.numpy()
        self.bytes = flat.data
        self.fields = {name: flat[span] for name, span in spans.items()}
        self.updates = self.fields["updates"].reshape(-1, 3)
        self.num_updates = len(self.updates)


class RoundInput:
    """The int32 fields of `RoundTokens`, and entries of page tables that the round adds, in one piece of memory.

    Laid out for the largest bucket, once on the device and twice in pinned memory. The host writes the latter two in
    turn, since the device may not have read what was written last.
    """

    def __init__(self, max_tokens: int, max_rows: int, spare_row: int, device: torch.device) -> None:
        self._spare_row = spare_row
        sizes = RoundTokens.sizes(max_tokens, max_rows) | {"updates": 3 * (max_rows + max_tokens)}
        bounds = np.cumsum([0, *sizes.values()]).tolist()
        self._device = torch.zeros(bounds[-1], dtype=torch.int32, device=device)
        self._starts = dict(zip(sizes, bounds, strict=False))
        spans = {name: slice(start, start + sizes[name]) for name, start in self._starts.items()}
        fields = {name: self._device[span] for name, span in spans.items()}
        self.updates = fields.pop("updates").view(-1, 3)
        """On the device, [U, 3] of table row, place and page; entries with a negative row are unused."""
        self._tokens = RoundTokens(**fields)
        self._host, self._other = (_HostInput(bounds[-1], spans, device.type == "cuda") for _ in range(2))
        self._largest = Bucket(max_tokens, max_rows)
        self.clear()

    def clear(self) -> None:
        """Describe a round without tokens, whatever bucket it is run in."""
        self._send(_Lists(), self._largest, [])

    def fill(self, entries: Sequence[Entry], rows: RequestRows | None, bucket: Bucket) -> None:
        """Describe a round of these entries; fields are written as far as the bucket reads them.

        Without `rows` no request gets a row, and no page is sent to the device.

        The round before the last one must be over.
        """
        lists, updates = _Lists(), list[tuple[int, int, int]]()
        if rows is None:
            lists.table_rows = [self._spare_row] * len(entries)
        else:
            lists.table_rows, updates = rows.find(entries, len(self._host.updates))
        lists.cached_lens = [entry.start for entry in entries]
        # Nearly all rounds are like this before trees are added on the device; the general way takes twice as long.
        if all(entry.num_extend == 1 and entry.samples and not entry.nodes.token_ids for entry in entries):
            count = len(entries)
            lists.token_ids = [-1 if entry.is_ahead else entry.request.tokens[entry.start] for entry in entries]
            lists.positions, lists.parents = lists.cached_lens, [-1] * count
            lists.rows = lists.roots = list(range(count))
            lists.first = list(range(count + 1))
        else:
            _list_tokens(entries, lists)
        self._send(lists, bucket, updates)

    def fill_chain(self, token_ids: list[int], cached_len: int, bucket: Bucket) -> None:
        """Describe a round of one request, in the spare row, for measurements."""
        num_tokens = len(token_ids)
        count = range(num_tokens)
        positions, parents = [cached_len + i for i in count], [i - 1 for i in count]
        chain = (token_ids, positions, parents, [0] * num_tokens)
        self._send(_Lists(*chain, [0, num_tokens], [cached_len], [0], [self._spare_row]), bucket, [])

    def _send(self, lists: _Lists, bucket: Bucket, updates: Sequence[tuple[int, int, int]]) -> None:
        """Pad fields to the bucket and queue the copy to the device, in few calls: each takes as long as a request."""
        self._host, self._other = self._other, self._host
        num_tokens, num_rows = bucket.tokens, bucket.rows
        self._put("token_ids", num_tokens, lists.token_ids, 0)
        self._put("positions", num_tokens, lists.positions, 0)
        self._put("parents", num_tokens, lists.parents, -1)
        self._put("rows", num_tokens, lists.rows, -1)
        self._put("first", num_rows + 1, lists.first, lists.first[-1])
        self._put("cached_len", num_rows, lists.cached_lens, 0)
        self._put("root", num_rows, lists.roots, -1)
        self._put("table_rows", num_rows, lists.table_rows, self._spare_row)
        self._write_updates(updates)
        self._device.copy_(self._host.memory, non_blocking=True)

    def _put(self, name: str, size: int, values: list[int], rest: int) -> None:
        """Write `values` to a field, and `rest` behind them up to `size`; numpy takes twice as long for a list."""
        put = _int32s(size).pack_into
        put(self._host.bytes, 4 * self._starts[name], *values, *[rest] * (size - len(values)))

    def _write_updates(self, updates: Sequence[tuple[int, int, int]]) -> None:
        host = self._host
        if updates:
            host.updates[: len(updates)] = updates
        if len(updates) < host.num_updates:
            host.updates[len(updates) : host.num_updates, 0] = -1
        host.num_updates = len(updates)

    def tokens(self, bucket: Bucket) -> RoundTokens:
        """Return the fields on the device, cut to the bucket."""
        return self._tokens.head(bucket.tokens, bucket.rows)

    def lengths(self, bucket: Bucket) -> HostLengths:
        """Return the bucket's lengths in host memory; later rounds overwrite them."""
        return HostLengths(
            self._host.fields["first"][: bucket.rows + 1], self._host.fields["cached_len"][: bucket.rows]
        )


class RoundOutput:
    """A round's output for each row: int32 [B, 2 + 2 * NUM_COMMITTED] of number of tokens, error, tokens, nodes.

    Before the rows lie three int64 clock readings in nanoseconds: when the round began and ended on the device, and
    when the drafting behind the round before it ended.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = torch.zeros(_CLOCK + max_rows * _WIDTH, dtype=torch.int32, device=device)
        self._times = self._device[:_CLOCK].view(torch.int64)
        self._rows = self._device[_CLOCK:].view(max_rows, _WIDTH)
        self._used = {rows: self._device[: _CLOCK + rows * _WIDTH] for rows in range(max_rows + 1)}

    def fields(self, bucket: Bucket) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return num_tokens [B], error [B], tokens [B, NUM_COMMITTED], accepted [B, NUM_COMMITTED]."""
        rows = self._rows[: bucket.rows]
        return rows[:, 0], rows[:, 1], rows[:, 2 : 2 + NUM_COMMITTED], rows[:, 2 + NUM_COMMITTED :]

    def rows(self, bucket: Bucket) -> Tensor:
        """Return all fields: [B, 2 + 2 * NUM_COMMITTED]."""
        return self._rows[: bucket.rows]

    def stamp(self, index: int) -> None:
        """Note the device's time: `index` 0 at a round's begin, 1 at its end, 2 at the end of drafting behind it."""
        stamp(self._times, index)

    def to_host(self, num_rows: int) -> RoundAnswers:
        """Queue a copy of the first rows, which the next round overwrites."""
        return RoundAnswers(self._used[num_rows].to("cpu", non_blocking=True, copy=True))


class RoundAnswers:
    """A round's output on the host, once its copy is done."""

    def __init__(self, copied: Tensor) -> None:
        self._copied = copied

    def read(self) -> list[list[int]]:
        """Return rows of [number of tokens, error, tokens ...], which may have unused words at their end."""
        rows: NDArray[np.int32] = self._copied.numpy()[_CLOCK:].reshape(-1, _WIDTH)
        read: list[list[int]] = rows[:, : 2 + _USUAL_COMMITTED].tolist()
        for row, answer in enumerate(read):
            if answer[0] > _USUAL_COMMITTED:
                read[row] = rows[row, : 2 + NUM_COMMITTED].tolist()
        return read

    @property
    def clock(self) -> tuple[int, int, int]:
        """Nanoseconds at the round's begin and end, and at the end of the drafting before it."""
        begin, end, drafted = self._copied.numpy()[:_CLOCK].view(np.int64).tolist()
        return begin, end, drafted


class RowListener(Protocol):
    """Follows all changes of rows."""

    def admitted(self, request: Request, row: int) -> None:
        """Note that a request got a row. Its first `cached_len` tokens come from the radix cache."""

    def paged(self, pages: Sequence[int]) -> None:
        """Note that a request in a row got further pages, which hold nothing yet."""

    def enter(self, row: int, place: int, pages: Sequence[int]) -> None:
        """Enter pages of a row, from `place` on, in page tables that the listener keeps."""

    def update(self, updates: Tensor) -> None:
        """Enter what a round adds in page tables that the listener keeps; see RequestRows.update."""


class RequestRows:
    """Rows of requests that run, from their first round until they end or give up their pages.

    Row `num_rows` is spare: padding and measurements use it.
    """

    def __init__(
        self, num_rows: int, max_pages: int, sampler: DeviceSampler, device: torch.device, link: ExecutorLink
    ) -> None:
        """`link`: to the other ranks of the model, which have page tables of their own."""
        self._link = link
        self.page_tables = torch.zeros(num_rows + 1, max_pages, dtype=torch.int32, device=device)
        self.spare = num_rows
        self._sampler = sampler
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: dict[Request, int] = {}
        self._num_known: dict[Request, int] = {}
        self.listener: RowListener | None = None
        """Follows all changes of rows, if set; must be set before any row is taken."""

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, request: Request) -> int:
        """Return the request's row; it gets one if it has none."""
        found = self._rows.get(request)
        return self._admit(request) if found is None else found

    def forget(self, request: Request) -> None:
        """Free the request's row, if it has one."""
        row = self._rows.pop(request, None)
        if row is not None:
            self._free.append(row)
            del self._num_known[request]

    def find(self, entries: Sequence[Entry], most: int) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Return the rows of entries' requests, and (row, place, page) of their pages that the device does not know.

        From now on it does. If there are more than `most` such pages, those of some requests get a copy of their own:
        with small pages, room for a tree may take so many.
        """
        found: list[int] = []
        updates: list[tuple[int, int, int]] = []
        for entry in entries:
            request = entry.request
            found.append(self.row(request))
            if self._num_known[request] != len(request.pages):
                updates += self._new_pages(request, most - len(updates))
        return found, updates

    def _new_pages(self, request: Request, most: int) -> Sequence[tuple[int, int, int]]:
        known, pages = self._num_known[request], request.pages
        if len(pages) - known > most:
            self.copy_pages(request)
            return ()
        self._num_known[request] = len(pages)
        if self.listener is not None:
            self.listener.paged(pages[known:])
        row = self._rows[request]
        return [(row, place, pages[place]) for place in range(known, len(pages))]

    def _admit(self, request: Request) -> int:
        row = self._free.pop()
        self._rows[request] = row
        # Many pages at once get a copy of their own; a round's updates have room only for those that it adds.
        self._num_known[request] = 0
        if self.listener is not None:
            self.listener.admitted(request, row)
        self._copy_pages(request)
        sampling, end = request.sampler.params, request.params.answer_end
        masked = request.bad_words is not None
        self._sampler.admit(row, sampling, request.tokens, request.prompt_len, end, masked)
        return row

    def update(self, updates: Tensor) -> None:
        """Enter what a round adds, [U, 3] on the device, into the page tables."""
        update_pages(self.page_tables, updates)
        if self.listener is not None:
            self.listener.update(updates)

    def copy_pages(self, request: Request) -> None:
        """Tell the device of all new pages at once, outside a round."""
        if self.listener is not None:
            self.listener.paged(request.pages[self._num_known[request] :])
        self._copy_pages(request)

    def _copy_pages(self, request: Request) -> None:
        known, pages = self._num_known[request], request.pages
        if known < len(pages):
            self.enter(self._rows[request], known, pages[known:])
            self._num_known[request] = len(pages)

    def enter(self, row: int, place: int, pages: Sequence[int]) -> None:
        """Queue a copy of pages to a row of the page tables, from `place` on."""
        self._link.broadcast(PAGES, (row, place), pages)
        put(pages, self.page_tables.device, into=self.page_tables[row, place : place + len(pages)])
        if self.listener is not None:
            self.listener.enter(row, place, pages)


class Buckets:
    """The shapes that rounds are padded to: a round takes the smallest that holds it."""

    def __init__(self, max_tokens: int, max_rows: int, fixed: bool = False) -> None:
        """`fixed`: the largest shape is the only one, for rounds whose results must not depend on it."""
        self.tokens = [max_tokens] if fixed else width_buckets(TOKEN_BUCKETS, max_tokens)
        self.rows = [max_rows] if fixed else row_buckets(max_rows)
        self._only = fixed

    def fit(self, num_tokens: int, num_rows: int) -> Bucket:
        """Return the smallest bucket that holds a round. Raises ValueError for a round that is too large for all."""
        if num_tokens > self.tokens[-1] or num_rows > self.rows[-1]:
            raise ValueError(
                f"a round of {num_tokens} tokens in {num_rows} rows is over {self.tokens[-1]} in {self.rows[-1]}"
            )
        rows = self.rows[bisect_left(self.rows, num_rows)]
        tokens = self.tokens[bisect_left(self.tokens, max(num_tokens, min(rows, self.tokens[-1])))]
        return Bucket(tokens, rows, self._only)

    def bare(self, rows: int) -> Bucket:
        """Return the smallest bucket of so many rows, without what a drafter inside rounds needs."""
        return self.fit(1, rows)._replace(is_bare=True)

    def width(self, num_tokens: int) -> int:
        """Return the number of tokens that a round of `num_tokens` is padded to."""
        return self.tokens[min(bisect_left(self.tokens, num_tokens), len(self.tokens) - 1)]

    @property
    def widths(self) -> tuple[int, ...]:
        """Token counts, at least two, whose times make a cost curve."""
        return tuple(self.tokens) if len(self.tokens) > 1 else (1, max(self.tokens[0], 2))

    def all(self) -> list[Bucket]:
        """Return all buckets, largest first, so that the first capture sizes a shared memory pool."""
        found = {self.fit(tokens, rows) for rows in self.rows for tokens in self.tokens}
        return sorted(found, reverse=True)
