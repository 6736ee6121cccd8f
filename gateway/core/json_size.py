"""The size of JSON, counted before it is parsed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MAX_CONTAINERS = 1 << 16
"""Most lists and objects: 4096 messages of some parts each, or a large schema."""
MAX_MEMBERS = 1 << 17
"""Most members of all objects together."""


def json_excess(data: bytes, max_values: int) -> tuple[int, int, str] | None:
    """Return what JSON, valid or not, has too much of for a parser: how many, the limit, and of what; else None.

    Eight megabytes of `[],[],` take a parser seconds, since it makes an object of each, and a thread does not help: the
    parser holds the interpreter's lock. numpy, which counts the values, releases it.
    """
    limits = (MAX_CONTAINERS, MAX_MEMBERS, max_values)
    # This also counts marks inside strings; if the limits hold even so, no closer look is needed.
    marks = (data.count(b"[") + data.count(b"{"), data.count(b":"), data.count(b","))
    if all(number <= limit for number, limit in zip(marks, limits, strict=True)):
        return None
    words = ("lists and objects", "members of objects", "values")
    found = zip(count_json(data), limits, words, strict=True)
    return next((one for one in found if one[0] > one[1]), None)


def count_json(data: bytes) -> tuple[int, int, int]:
    """Return the numbers of lists and objects, of members of objects, and of commas, outside of strings."""
    text = np.frombuffer(data, dtype=np.uint8)
    quotes = text == ord('"')
    quotes[_escaped(text)] = False
    # After an odd number of quotes, a position is inside a string. Only the lowest bit matters, so the sum may wrap.
    outside = (np.cumsum(quotes, dtype=np.uint8) & 1) == 0

    def count(mark: str) -> int:
        return int(np.count_nonzero((text == ord(mark)) & outside))

    return count("[") + count("{"), count(":"), count(",")


def _escaped(text: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
    """Return the positions that follow an odd number of backslashes."""
    at = np.flatnonzero(text == ord("\\"))
    if not len(at):
        return at
    begins = np.flatnonzero(np.diff(at, prepend=at[0] - 2) != 1)
    lengths = np.diff(begins, append=len(at))
    ends = at[begins] + lengths
    found: npt.NDArray[np.intp] = ends[(lengths % 2 == 1) & (ends < len(text))]
    return found
