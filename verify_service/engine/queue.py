"""Requests that wait for a place, and whose turn is next."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sized
from typing import TypeVar

from verify_service.engine.request import Request

_MAX_PASSES = 16
"""Turns in a row that higher priorities may take while lower ones wait."""

WaitingT = TypeVar("WaitingT", bound=Sized)


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
        self._turns: dict[int, dict[str, dict[str, deque[Request]]]] = {}
        """New requests by priority, API key and user; the first key has the next turn, and so has its first user."""
        self._num_requests = 0
        self._num_passes = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        for priority in self._priorities():
            yield from self._preempted.get(priority, ())
            for users in self._turns.get(priority, {}).values():
                for requests in users.values():
                    yield from requests

    def __contains__(self, request: object) -> bool:
        return any(one is request for one in self)

    @property
    def head(self) -> Request:
        """The request whose turn it is; the queue must not be empty."""
        if self._num_passes >= _MAX_PASSES:
            return min(self, key=lambda one: one.arrival)
        return next(iter(self))

    def add(self, request: Request) -> None:
        """Queue a new request."""
        key, user = _names(request)
        users = self._turns.setdefault(request.priority, {}).setdefault(key, {})
        users.setdefault(user, deque()).append(request)
        self._num_requests += 1

    def put_back(self, request: Request) -> None:
        """Queue a request that has had its turn and was preempted."""
        insort(self._preempted.setdefault(request.priority, []), request, key=lambda one: one.arrival)
        self._num_requests += 1

    def pop(self) -> Request:
        """Take the head out; the next turn is another client's."""
        request, best = self.head, self._priorities()[0]
        self.remove(request)
        passes_over = any(priority > request.priority for priority in self._priorities())
        aged = self._num_passes >= _MAX_PASSES
        self._num_passes = self._num_passes + 1 if passes_over and not aged else 0
        request.priority = min(request.priority, best)
        return request

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is. ValueError if it does not wait."""
        preempted = self._preempted.get(request.priority, [])
        if request in preempted:
            preempted.remove(request)
            if not preempted:
                del self._preempted[request.priority]
        else:
            self._remove_new(request)
        self._num_requests -= 1

    def _remove_new(self, request: Request) -> None:
        key, user = _names(request)
        keys = self._turns.get(request.priority, {})
        users = keys.get(key, {})
        requests = users.get(user, deque())
        if request not in requests:
            raise ValueError(f"request {request.params.request_id} does not wait")
        # Who gives up a head has had a turn, and is last from then on.
        is_user_s_turn = requests[0] is request and next(iter(users)) == user
        is_key_s_turn = is_user_s_turn and next(iter(keys)) == key
        requests.remove(request)
        _move_on(users, user, is_user_s_turn)
        _move_on(keys, key, is_key_s_turn)
        if not keys:
            del self._turns[request.priority]

    def _priorities(self) -> list[int]:
        return sorted({*self._preempted, *self._turns})


def _move_on(turns: dict[str, WaitingT], name: str, had_turn: bool) -> None:
    """Put a name behind the others if it had its turn, and take it out if nothing waits there."""
    if had_turn or not turns[name]:
        waiting = turns.pop(name)
        if waiting:
            turns[name] = waiting


def _names(request: Request) -> tuple[str, str]:
    """The API key, and the user that it names."""
    key, _, user = request.params.client.partition("/")
    return key, user
