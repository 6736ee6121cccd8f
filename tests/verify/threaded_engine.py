"""A verify engine on a thread, and an inbox that other threads of this process may post to."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from outrider.protocol.speculation import DraftMessage
from verify_service.engine.engine import Action, VerifyEngine
from verify_service.speculation.replica import DraftConnection


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
        """See VerifyInbox."""
        with self._filled:
            if timeout is not None and not self._actions:
                self._filled.wait(timeout)
            actions = list(self._actions)
            self._actions.clear()
        return actions


class ThreadedEngine(VerifyEngine):
    """An engine that the test's thread starts, asks and stops."""

    def __init__(self, *parts: Any, inbox: ThreadInbox | None = None, **fields: Any) -> None:
        super().__init__(*parts, inbox=ThreadInbox() if inbox is None else inbox, **fields)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to run rounds."""
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End after the round in progress, and wait for that; the engine's own thread does not wait."""
        super().stop()
        self._inbox.post(lambda: None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def draft_received(self, port: DraftConnection, messages: Sequence[DraftMessage]) -> None:
        """A draft service sent messages."""
        arrived_at = time.monotonic()
        self._inbox.post(lambda: self.drafts.receive(port, messages, arrived_at))

    def ask(self, question: Action) -> None:
        """Run something on the engine's thread between two rounds."""
        self._inbox.post(question)

    @property
    def stopping(self) -> bool:
        """Whether it ends, or has ended."""
        return self._stopping
