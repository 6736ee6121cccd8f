"""Updates of one answer on their way to its reader, who may be slow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from outrider.errors import OverloadedError
from verify_service.frames.submission import Update

MAX_UNREAD_WEIGHT = 2 << 20
"""Weight of what may lie unread of one answer; some tens of megabytes."""

_MAX_MESSAGE_WEIGHT = 1 << 18
"""Weight of what is sent in one message, which is far below the limit of a message then."""
_TOKEN_WEIGHT = 8


class Outbox:
    """Gathers updates while the one before them is being written. A reader that falls behind loses its answer.

    Used from one event loop.
    """

    def __init__(self, stall_seconds: float, max_weight: int = MAX_UNREAD_WEIGHT) -> None:
        """`stall_seconds`: how long a message may wait for its reader."""
        self._stall_seconds = stall_seconds
        self._max_weight = max_weight
        self._updates: deque[Update] = deque()
        self._weight = 0
        self._filled = asyncio.Event()
        self._write_limit: asyncio.Timeout | None = None
        self.overflowed = False

    def put(self, update: Update) -> None:
        """Leave an update."""
        if self.overflowed:
            return
        self._weight += _weight(update)
        self._updates.append(update)
        self._filled.set()
        if self._weight > self._max_weight:
            self.overflowed = True
            self._updates.clear()
            if self._write_limit is not None:
                self._write_limit.reschedule(asyncio.get_running_loop().time())

    async def take(self) -> Sequence[Update]:
        """Updates for one message, after waiting for the first. Raises OverloadedError for a slow reader."""
        await self._filled.wait()
        if self.overflowed:
            raise self._slow_reader()
        taken, weight = [], 0
        while self._updates and weight < _MAX_MESSAGE_WEIGHT:
            taken.append(self._updates.popleft())
            weight += _weight(taken[-1])
        self._weight -= weight
        if not self._updates:
            self._filled.clear()
        return taken

    async def write(self, write: Callable[[], Awaitable[None]]) -> None:
        """Write a message. Raises OverloadedError for a slow reader."""
        try:
            async with asyncio.timeout(self._stall_seconds) as self._write_limit:
                await write()
        except TimeoutError:
            raise self._slow_reader() from None
        finally:
            self._write_limit = None

    def _slow_reader(self) -> OverloadedError:
        what = "too much" if self.overflowed else f"for {self._stall_seconds:g} s"
        return OverloadedError(f"the stream was left unread {what}; read it faster", code="slow_reader")


def _weight(update: Update) -> int:
    """About how much memory an update takes: tokens and log-probabilities are objects, those of a prompt are arrays."""
    weight = 1 + len(update.token_ids) + sum(1 + len(entry.top) for entry in update.logprobs)
    if update.tree is not None:
        weight += 4 * len(update.tree.token_ids)
    weight *= _TOKEN_WEIGHT
    if update.prompt_logprobs is not None:
        weight += 2 * update.prompt_logprobs.logprobs.size + 2 * update.prompt_logprobs.top_ids.size
    return weight
