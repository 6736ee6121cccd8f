"""Which requests take part in a round, and with how many tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.tree.mirror import TreeMirror
from verify_service.budget import Budget
from verify_service.drafts import Drafts, Link
from verify_service.memory import Memory
from verify_service.request import Request
from verify_service.round import Entry, Nodes


class Scheduler:
    """Continuous batching at round granularity: first come, first served; the youngest gives way.

    Requests move waiting -> running -> (preempted -> waiting ->) ended. A running request holds pages; a waiting one
    holds none.
    """

    def __init__(self, memory: Memory, drafts: Drafts, budget: Budget, max_running: int, chunk_size: int) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._memory = memory
        self._drafts = drafts
        self._budget = budget
        self._max_running = max_running
        self._chunk_size = chunk_size

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take out an ended request, wherever it is, and free its pages at once."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._memory.release(request)
        self._drafts.close(request)

    def plan(self) -> list[Entry]:
        """Admit what fits and lay out the next round, without tree nodes. Pages cover every token of it."""
        self._admit()
        entries: list[Entry] = []
        chunk = self._chunk_size
        for request in list(self.running):
            missing = request.committed_len - request.cached_len
            extend = missing if missing == 1 else min(missing, chunk)
            if extend and self._make_room(request, request.cached_len + extend):
                chunk -= extend if missing > 1 else 0
                entries.append(Entry(request, extend))
        return entries

    def candidates(self, entries: Sequence[Entry]) -> list[tuple[Entry, Link]]:
        """Entries that sample and whose trees have nodes to offer."""
        linked = [(entry, self._drafts.link(entry.request)) for entry in entries if entry.samples]
        return [(entry, link) for entry, link in linked if link is not None and link.mirror.num_nodes]

    def add_nodes(self, entries: Sequence[Entry]) -> None:
        """Give the round the tree nodes that pay, over all requests."""
        chosen = self.candidates(entries)
        num_extend = sum(entry.num_extend for entry in entries)
        num_roots = sum(entry.samples for entry in entries)
        picks = self._budget.choose(num_extend, num_roots, [link.mirror.path_scores for _, link in chosen])
        for (entry, link), pick in zip(chosen, picks, strict=True):
            rows = pick + 1
            rows = rows[link.mirror.depth[rows] <= entry.request.draft_room]
            length = entry.request.cached_len + entry.num_extend + len(rows)
            # Nodes are worth no preemption: without pages the round goes without them.
            if len(rows) and self._memory.reserve(entry.request, length):
                entry.nodes = take_nodes(link.mirror, rows)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_running:
            request = self.waiting[0]
            # One page more than it has tokens, lest it be preempted by its first round.
            if not self._memory.fits(request.committed_len + self._memory.page_size) and self.running:
                return
            self.waiting.popleft()
            self._memory.attach(request)
            if request.num_cached_prompt_tokens is None:
                request.num_cached_prompt_tokens = request.cached_len
            self.running.append(request)
            self.running.sort(key=lambda running: running.arrival)
            if self._drafts.link(request) is None:
                self._drafts.admit(request)
            else:
                self._drafts.resume(request)

    def _make_room(self, request: Request, length: int) -> bool:
        """Reserve pages, preempting the youngest until they suffice; False when the request itself gave way.

        Requests are planned oldest first, so none that is in the round already is preempted.
        """
        while request in self.running:
            if self._memory.reserve(request, length):
                return True
            self._preempt(self.running[-1])
        return False

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self.running.remove(request)
        self._memory.release(request)
        self._drafts.pause(request)
        self.waiting.appendleft(request)


def take_nodes(mirror: TreeMirror, rows: NDArray[np.int64]) -> Nodes:
    """Rows of a mirror, ascending and with their parents, as a round's nodes."""
    place = {0: -1} | {row: index for index, row in enumerate(rows.tolist())}
    return Nodes(
        token_ids=mirror.token[rows].tolist(),
        parents=[place[parent] for parent in mirror.parent[rows].tolist()],
        depths=mirror.depth[rows].tolist(),
    )
