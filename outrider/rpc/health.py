"""The standard health service, which says NOT_SERVING until it is told otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

_Status = health_pb2.HealthCheckResponse


class HealthServicer:
    """Health of the server as a whole ("") and of each named service, all of them alike.

    The library's own servicer starts as SERVING, stops telling a service's other watchers when one of them leaves, and
    keeps watchers open while the server drains, so that each drain would last its whole grace.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self._names = frozenset(("", *service_names))
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Say SERVING or NOT_SERVING from now on; without effect after `close`."""
        self._serving = serving and not self._closed
        self._wake()

    def close(self) -> None:
        """Say NOT_SERVING for good and end every Watch."""
        self._closed = True
        self._serving = False
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _status(self, name: str) -> Any:
        if name not in self._names:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._serving else _Status.NOT_SERVING

    async def Check(self, request: Any, context: Any) -> Any:
        """Answer with the present status; NOT_FOUND for a service that is not here."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:80]!r} here")
        return _Status(status=self._status(request.service))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Stream the present status and each later one."""
        last = None
        while True:
            # Taken before the status: a change while this one is being sent must not be slept through.
            changed, closed = self._changed, self._closed
            status = self._status(request.service)
            if status != last:
                last = status
                yield _Status(status=status)
            if closed:
                return
            await changed.wait()
