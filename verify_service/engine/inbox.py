"""Where the engine finds what others ask of it: a queue for threads of its own process, a socket for another one."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from outrider.protocol.messages import Decline, DraftMessage, Grow

Action = Callable[[], None]

MAX_UNREAD = 65536
"""Weight of one draft's messages that may lie unread: about 0.1 s of work."""


def unread_weight(messages: Sequence[DraftMessage]) -> int:
    """What messages of a draft count for while the engine has not taken them: nodes and letters, and 16 for each.

    A Grow counts for its longest array: where they differ it is malformed, and yet it lies there.
    """
    return sum(16 + _length(message) for message in messages)


def _length(message: DraftMessage) -> int:
    match message:
        case Grow():
            return max(len(message.token_ids), len(message.parents), len(message.scores), len(message.sources))
        case Decline():
            return len(message.detail)
        case _:
            return 0


class Unread:
    """Weight of what each draft has sent and the engine has not taken. Any thread may use it."""

    def __init__(self) -> None:
        self._weights: Counter[object] = Counter()
        self._lock = threading.Lock()

    def add(self, draft: object, weight: int) -> bool:
        """Whether so much more may lie unread; if so, it does."""
        with self._lock:
            if self._weights[draft] + weight > MAX_UNREAD:
                return False
            self._weights[draft] += weight
        return True

    def read(self, draft: object, weight: int) -> None:
        """The engine has taken so much."""
        with self._lock:
            self._weights[draft] -= weight
            if self._weights[draft] <= 0:
                del self._weights[draft]


class VerifyInbox(Protocol):
    """Actions for the engine, in the order in which they came. The engine takes them between two rounds."""

    def post(self, action: Action) -> None:
        """Leave an action; wakes an engine that waits."""

    def take(self, timeout: float | None) -> list[Action]:
        """All actions that have come since the last call; the engine runs them in order.

        None does not wait; a number waits up to so many seconds for something to come, and returns as soon as it has.
        """


class ThreadInbox:
    """Actions of other threads of this process."""

    def __init__(self) -> None:
        self._actions: deque[Action] = deque()
        self._filled = threading.Condition()

    def __len__(self) -> int:
        return len(self._actions)

    def post(self, action: Action) -> None:
        """Leave an action; any thread may."""
        with self._filled:
            self._actions.append(action)
            self._filled.notify()

    def take(self, timeout: float | None) -> list[Action]:
        """All actions, after waiting for one up to `timeout` seconds; None does not wait."""
        # Looked at without the lock first: an engine that polls between two looks at the GPU mostly finds nothing.
        if timeout is None and not self._actions:
            return []
        with self._filled:
            if timeout is not None and not self._actions:
                self._filled.wait(timeout)
            actions = list(self._actions)
            self._actions.clear()
        return actions
