"""How the places of a gate are shared between API keys."""

from __future__ import annotations

from collections import Counter

NOBODY = ("", "0")
"""What a door with less than two keys calls its clients."""


class Shares:
    """Places that each key holds. A quarter of all is kept for keys that hold less than an even share.

    So one key's flood never shuts the door to another. Clients that no key tells apart share all places as they come.
    """

    def __init__(self, max_places: int) -> None:
        self._max_places = max_places
        self._held: Counter[str] = Counter()

    def allows(self, key: str, num_taken: int, num_places: int) -> bool:
        """Whether `key` may take so many more places when `num_taken` are taken by all."""
        if key in NOBODY or num_taken + num_places <= self._max_places - self._max_places // 4:
            return True
        # One more than there are, lest a key that is alone leave nothing for the next one.
        num_keys = max(2, len({*self._held, key}))
        return self._held[key] + num_places <= max(1, self._max_places // num_keys)

    def most(self, key: str) -> int:
        """Places that `key` can have at best, when nobody else has any."""
        return self._max_places if key in NOBODY else self._max_places - self._max_places // 4

    def add(self, key: str, num_places: int) -> None:
        """A key takes places, or gives them back if the number is negative."""
        self._held[key] += num_places
        if not self._held[key]:
            del self._held[key]
