"""Python's garbage collector, run when the engine has time and never by itself."""

from __future__ import annotations

import gc

_YOUNG = 2000
"""Objects made since the last sweep that are worth one."""
_OVERDUE = 10 * _YOUNG
_OLDER_EVERY = 32
"""Sweeps of the young generation to one of the middle one."""
_OLD_EVERY = 4096
"""Sweeps to a full one: some hundred thousand objects of a service that never idles, a few milliseconds."""


def take_over() -> None:
    """From now on `sweep` alone collects. What lives now lives for ever, and is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()


class Garbage:
    """Collects beside other work, if `take_over` was called; otherwise it leaves all to Python."""

    def __init__(self) -> None:
        self._num_sweeps = 0

    @property
    def overdue(self) -> bool:
        """Whether so many objects were made since the last sweep that the next one should not wait for spare time."""
        return not gc.isenabled() and gc.get_count()[0] >= _OVERDUE

    def sweep(self) -> None:
        """Collect the young, if there are many: about 0.1 ms. To be called while a round runs."""
        if gc.isenabled() or gc.get_count()[0] < _YOUNG:
            return
        self._num_sweeps += 1
        if self._num_sweeps % _OLD_EVERY == 0:
            gc.collect()
        else:
            gc.collect(0 if self._num_sweeps % _OLDER_EVERY else 1)

    def idle(self) -> None:
        """Collect all, if anything was made since: nobody waits."""
        if not gc.isenabled() and gc.get_count()[0] >= _YOUNG:
            gc.collect()

    def settle(self) -> None:
        """The same where nothing lives that may end in a cycle, such as a request: what is left is not looked at again.

        A service that keeps much, such as tries of texts, would look at all of it each time: seconds for millions.
        """
        if not gc.isenabled() and (self._num_sweeps or gc.get_count()[0] >= _YOUNG):
            gc.collect()
            gc.freeze()
            self._num_sweeps = 0
