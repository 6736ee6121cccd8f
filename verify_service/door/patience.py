"""What keeps a peer that fails again and again from costing more than one that fails once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class Backoff:
    """How long to wait before something is tried again: twice as long after each failure, up to a limit.

    What lasted as long as the longest pause is forgiven what was before.
    """

    def __init__(self, least: float, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        """The shortest and the longest pause, in seconds."""
        self._least = least
        self._most = most
        self._clock = clock
        self._pause = least
        self._began = float("-inf")

    def begin(self) -> None:
        """A try begins."""
        self._began = self._clock()

    def failed(self) -> float:
        """The try that began last has failed: seconds to wait before the next."""
        if self._clock() - self._began >= self._most:
            self._pause = self._least
        pause = self._pause
        self._pause = min(2 * pause, self._most)
        return pause


class Seldom:
    """Logs a kind of warning no more often than every so many seconds, and says how many were left out."""

    def __init__(self, log: logging.Logger, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._seconds = seconds
        self._clock = clock
        self._logged_at = float("-inf")
        self._num_left_out = 0

    def warn(self, message: str, *arguments: object) -> None:
        """Log a warning, or count it."""
        now = self._clock()
        if now - self._logged_at < self._seconds:
            self._num_left_out += 1
            return
        if self._num_left_out:
            message, arguments = message + " (and %d like it before)", (*arguments, self._num_left_out)
        self._log.warning(message, *arguments)
        self._logged_at, self._num_left_out = now, 0
