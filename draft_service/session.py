"""One stream session as the engine and the event loop share it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from outrider.errors import OverloadedError
from outrider.tree.messages import DraftMessage

_MAX_UNREAD = 256
"""Batches of messages that may wait for the engine before the stream is read no further."""


class Session:
    """Bounded queues between the engine's thread and one stream's tasks. The event loop makes it.

    What verify sends waits in the engine's inbox; `admit` holds the reader back while too much does. What the engine
    answers waits here; a peer that does not read loses its session and harms no other.
    """

    def __init__(self, vocab_size: int, max_queued: int, parts: frozenset[int] | None = None) -> None:
        self.vocab_size = vocab_size
        """Token ids at or past this are illegal."""
        self.parts = parts
        """Numbers of the drafters that guess for it; None for all."""
        self._max_queued = max_queued
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._outbound: deque[DraftMessage] = deque()
        self._overflow = asyncio.Event()
        self._overflowed = False
        self._closed = False
        self._wake_sent = False
        self._has_outbound = asyncio.Event()
        self._unread = 0
        self._reader_waits = False
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._ended = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Whether the stream has ended; what it sent last is not worth handling."""
        return self._closed

    def send(self, messages: Sequence[DraftMessage]) -> None:
        """Queue answers; from any thread."""
        with self._lock:
            if self._closed:
                return
            self._outbound.extend(messages)
            overflows = len(self._outbound) > self._max_queued and not self._overflowed
            if self._overflowed or overflows:
                self._outbound.clear()
                self._overflowed = True
            wake, self._wake_sent = not self._wake_sent, True
        if overflows:
            self._call_loop(self._overflow.set)
        if wake:
            self._call_loop(self._has_outbound.set)

    async def next_answers(self) -> list[DraftMessage]:
        """Wait for answers and take all of them; none once the queue has overflowed."""
        await self._has_outbound.wait()
        self._has_outbound.clear()
        with self._lock:
            self._wake_sent = False
            answers = list(self._outbound)
            self._outbound.clear()
        return answers

    async def overflow(self) -> NoReturn:
        """Wait until too many answers wait to be read. Raises OverloadedError.

        Apart from `next_answers`, because a writer whose peer reads nothing comes back from no write.
        """
        await self._overflow.wait()
        raise OverloadedError(
            f"more than {self._max_queued} answers wait to be read; read the stream faster", code="slow_reader"
        )

    async def admit(self) -> None:
        """Wait until the engine has caught up; before each batch that is handed to it."""
        await self._may_read.wait()
        with self._lock:
            self._unread += 1
            if self._unread >= _MAX_UNREAD:
                self._reader_waits = True
                self._may_read.clear()

    def batch_done(self) -> None:
        """The engine has handled an admitted batch; from its thread."""
        with self._lock:
            self._unread -= 1
            wake = self._reader_waits and self._unread <= _MAX_UNREAD // 2
            self._reader_waits = self._reader_waits and not wake
        if wake:
            self._call_loop(self._may_read.set)

    def close(self) -> None:
        """Answers are dropped from here on; from any thread."""
        with self._lock:
            self._closed = True
            self._outbound.clear()
        self._call_loop(self._ended.set)

    async def ended(self) -> None:
        """Wait until the session is closed."""
        await self._ended.wait()

    def _call_loop(self, callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has closed: the service is ending
            self._loop.call_soon_threadsafe(callback)
