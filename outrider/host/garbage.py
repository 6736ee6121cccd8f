"""Python's garbage collector, run when an engine has time and never by itself."""

from __future__ import annotations

import gc

_MIN_YOUNG_OBJECTS = 2000
"""Objects made since the last collection that are worth one."""
_OVERDUE_OBJECTS = 10 * _MIN_YOUNG_OBJECTS
_YOUNG_PER_MIDDLE = 32
"""Collections of the young generation to one of the middle one."""
_YOUNG_PER_FULL = 4096
"""Collections of the young generation to a full one: some hundred thousand objects of a service that never idles, a few
milliseconds."""


def disable_automatic_collection() -> None:
    """From now on `GarbageCollector` alone collects. What lives now is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()


class GarbageCollector:
    """Collects beside other work after `disable_automatic_collection`; before that it leaves all to Python."""

    def __init__(self) -> None:
        self._num_collections = 0

    @property
    def overdue(self) -> bool:
        """Whether so many objects were made since the last collection that the next should not wait for spare time."""
        return not gc.isenabled() and gc.get_count()[0] >= _OVERDUE_OBJECTS

    def collect_young(self) -> None:
        """Collect the young objects, if there are many: about 0.1 ms. To be called while a round runs."""
        if gc.isenabled() or gc.get_count()[0] < _MIN_YOUNG_OBJECTS:
            return
        self._num_collections += 1
        if self._num_collections % _YOUNG_PER_FULL == 0:
            gc.collect()
        else:
            gc.collect(0 if self._num_collections % _YOUNG_PER_MIDDLE else 1)

    def collect_all(self) -> None:
        """Collect all generations, if many objects were made since: nobody waits."""
        if not gc.isenabled() and gc.get_count()[0] >= _MIN_YOUNG_OBJECTS:
            gc.collect()

    def collect_and_freeze(self) -> None:
        """The same where nothing lives that may end in a cycle, such as a request: what is left is not looked at again.

        A service that keeps much, such as tries of texts, would look at all of it each time: seconds for millions.
        """
        if not gc.isenabled() and (self._num_collections or gc.get_count()[0] >= _MIN_YOUNG_OBJECTS):
            gc.collect()
            gc.freeze()
            self._num_collections = 0
