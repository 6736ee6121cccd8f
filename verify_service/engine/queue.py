"""Requests that wait for a place, and whose turn is next."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence

from verify_service.engine.request import Request

_NAME_LEVELS = 2
"""Parts of a client's name: the API key, and the user that it names."""

_MAX_PASSES = 16
"""Turns in a row that higher priorities may take while lower ones wait."""


class FairQueue:
    """Lower priorities first. Of one priority, those that were preempted, oldest first; then clients take turns.

    A turn goes from API key to API key, and within a key from user to user; requests of one user come in their order.
    So a client that sends a thousand requests at once delays the next one of another client by one request.

    No request waits for ever: when lower priorities have been passed over `_MAX_PASSES` times in a row, the turn goes
    to the request that has waited longest of all. It takes the best waiting priority with it, and as the oldest there
    it does not have to give way at once. So one that higher priorities keep passing, with k older ones before it, has
    its turn after at most (k + 1) * (_MAX_PASSES + 1).
    """

    def __init__(self) -> None:
        self._preempted: dict[int, list[Request]] = {}
        self._turns: dict[int, _Turns] = {}
        self._num_requests = 0
        self._num_passes = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        for priority in sorted({*self._preempted, *self._turns}):
            yield from self._preempted.get(priority, ())
            if priority in self._turns:
                yield from self._turns[priority]

    def __contains__(self, request: object) -> bool:
        return any(one is request for one in self)

    @property
    def head(self) -> Request:
        """The request whose turn it is; the queue must not be empty."""
        if self._num_passes >= _MAX_PASSES:
            return min(self, key=lambda one: one.arrival)
        priority = min((*self._preempted, *self._turns))
        if priority in self._preempted:
            return self._preempted[priority][0]
        return self._turns[priority].head

    def add(self, request: Request) -> None:
        """Queue a new request."""
        turns = self._turns.get(request.priority)
        if turns is None:
            turns = self._turns[request.priority] = _Turns(_NAME_LEVELS)
        turns.add(request, _path(request))
        self._num_requests += 1

    def put_back(self, request: Request) -> None:
        """Queue a request that has had its turn and was preempted."""
        insort(self._preempted.setdefault(request.priority, []), request, key=lambda one: one.arrival)
        self._num_requests += 1

    def pop(self) -> Request:
        """Take the head out; the next turn is another client's."""
        request, best = self.head, min((*self._preempted, *self._turns))
        self.remove(request)
        waiting = {*self._preempted, *self._turns}
        passes_over = any(priority > request.priority for priority in waiting)
        aged = self._num_passes >= _MAX_PASSES
        self._num_passes = self._num_passes + 1 if passes_over and not aged else 0
        request.priority = min(request.priority, best)
        return request

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is. ValueError if it does not wait."""
        priority = request.priority
        preempted = self._preempted.get(priority, [])
        if request in preempted:
            preempted.remove(request)
            if not preempted:
                del self._preempted[priority]
        else:
            turns = self._turns.get(priority)
            if turns is None or not turns.remove(request, _path(request)):
                raise ValueError(f"request {request.params.request_id} does not wait")
            if not turns:
                del self._turns[priority]
        self._num_requests -= 1


class _Turns:
    """Requests by one part of their clients' names; each part has its turn."""

    def __init__(self, num_levels: int) -> None:
        self._num_levels = num_levels
        self._lines: dict[str, _Turns] = {}
        """The first is next; without levels left `_requests` is the line."""
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests) + len(self._lines)

    def __iter__(self) -> Iterator[Request]:
        yield from self._requests
        for line in self._lines.values():
            yield from line

    @property
    def head(self) -> Request:
        if self._requests:
            return self._requests[0]
        return next(iter(self._lines.values())).head

    def add(self, request: Request, path: Sequence[str]) -> None:
        if not self._num_levels:
            self._requests.append(request)
            return
        line = self._lines.get(path[0])
        if line is None:
            line = self._lines[path[0]] = _Turns(self._num_levels - 1)
        line.add(request, path[1:])

    def remove(self, request: Request, path: Sequence[str]) -> bool:
        """Whether it was there. Who gives up a head has had a turn, and is last from then on."""
        if not self._num_levels:
            if request not in self._requests:
                return False
            self._requests.remove(request)
            return True
        line = self._lines.get(path[0])
        if line is None:
            return False
        was_head = self.head is request
        if not line.remove(request, path[1:]):
            return False
        if was_head or not line:
            del self._lines[path[0]]
            if line:
                self._lines[path[0]] = line
        return True


def _path(request: Request) -> list[str]:
    parts = request.params.client.split("/", _NAME_LEVELS - 1)
    return parts + [""] * (_NAME_LEVELS - len(parts))
