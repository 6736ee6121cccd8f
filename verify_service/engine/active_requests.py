"""Requests that were let in, until they are told their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from outrider.errors import OverloadedError, UnavailableError
from verify_service.engine.inbox import VerifyInbox
from verify_service.engine.limits import EngineLimits
from verify_service.engine.request import Request


class ActiveRequests:
    """The requests of an engine that nobody has told their end. Any thread may add to them."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._requests: set[Request] = set()
        self._num_added = 0
        self._closed = False
        self._lock = threading.Lock()

    def add(self, request: Request, begin: Callable[[Request], None], inbox: VerifyInbox) -> None:
        """Let a request in; it is to `begin`. Raises OverloadedError when full, UnavailableError when closed."""
        with self._lock:
            if self._closed:
                raise UnavailableError("the verify service is stopping")
            if len(self._requests) >= self._limits.max_running + self._limits.max_waiting:
                raise OverloadedError(
                    f"{self._limits.max_waiting} requests are waiting already, the most allowed; try again later"
                )
            self._requests.add(request)
            self._num_added += 1
            request.arrival = self._num_added
            request.arrived_at = time.monotonic()
            inbox.post(lambda: begin(request))

    def discard(self, request: Request) -> None:
        """It was told its end, or wants to hear nothing of it."""
        with self._lock:
            self._requests.discard(request)

    def refuse(self) -> None:
        """From here on `add` refuses, so that nobody comes behind those who are told."""
        with self._lock:
            self._closed = True

    def take(self) -> list[Request]:
        """All that are left, in the order in which they came; they are left no more."""
        with self._lock:
            left, self._requests = self._requests, set()
        return sorted(left, key=lambda request: request.arrival)
