"""One stream session as the door has it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

from outrider.errors import OverloadedError, UnavailableError
from outrider.protocol.messages import DraftMessage

_MAX_UNREAD = 256
"""Batches of messages that may wait for the engine before the stream is read no further."""


class Session:
    """Bounded queues between the engine and one stream's tasks. Everything happens on the event loop.

    `admit` holds the reader back while too much of what verify sends waits for the engine. What the engine answers
    waits here; a peer that does not read loses its session and harms no other.
    """

    def __init__(
        self, vocab_size: int, max_queued: int, parts: frozenset[int] | None = None, line_token: str = ""
    ) -> None:
        self.vocab_size = vocab_size
        """Token ids at or past this are illegal."""
        self.parts = parts
        """Numbers of the drafters that guess for it; None for all."""
        self.line_token = line_token
        """Names the session where its verify engine may call the engine here; empty if it may not."""
        self._line_lost = asyncio.Event()
        self._max_queued = max_queued
        self._outbound: deque[DraftMessage] = deque()
        self._overflow = asyncio.Event()
        self._has_outbound = asyncio.Event()
        self._unread = 0
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._ended = asyncio.Event()

    def send(self, messages: Sequence[DraftMessage]) -> None:
        """Queue answers."""
        if self._ended.is_set() or self._overflow.is_set():
            return
        self._outbound.extend(messages)
        if len(self._outbound) > self._max_queued:
            self._outbound.clear()
            self._overflow.set()
        self._has_outbound.set()

    async def next_answers(self) -> list[DraftMessage]:
        """Wait for answers and take all of them; none once the queue has overflowed."""
        await self._has_outbound.wait()
        self._has_outbound.clear()
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

    def lose_line(self) -> None:
        """The verify engine has hung up where it spoke to the engine here."""
        self._line_lost.set()

    async def lost(self) -> NoReturn:
        """Wait until the session's line is lost. Raises UnavailableError."""
        await self._line_lost.wait()
        raise UnavailableError("the line between the engines is lost; begin a new session")

    async def admit(self) -> None:
        """Wait until the engine has caught up; before each batch that is handed to it."""
        await self._may_read.wait()
        self._unread += 1
        if self._unread >= _MAX_UNREAD:
            self._may_read.clear()

    def batches_done(self, count: int) -> None:
        """The engine has handled so many admitted batches."""
        self._unread -= count
        if self._unread <= _MAX_UNREAD // 2:
            self._may_read.set()

    def close(self) -> None:
        """Answers are dropped from here on."""
        self._outbound.clear()
        self._ended.set()

    async def ended(self) -> None:
        """Wait until the session is closed."""
        await self._ended.wait()
