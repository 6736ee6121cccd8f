"""How many values a JSON text holds, found without making any of them.

Eight megabytes of `[],[],` are seconds of work for a parser that makes an object of each, and no thread helps: the
parser holds the interpreter's lock. Counting is done by numpy, which lets go of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gateway.core.fields import MAX_PROMPT_TOKENS
from outrider.errors import InvalidRequestError

_MAX_CONTAINERS = 1 << 16
"""Lists and objects: 4096 messages of some parts each, or a large schema."""
_MAX_MEMBERS = 1 << 17
"""Of all objects together."""
_MAX_VALUES = MAX_PROMPT_TOKENS + _MAX_CONTAINERS
"""Entries of all lists and objects together."""

_Bytes = npt.NDArray[np.uint8]


def check_json_size(data: bytes) -> None:
    """Raises InvalidRequestError for a text of so many values that reading them would take long; valid or not."""
    # Marks inside strings count here, too: where that does not matter, looking closer is spared.
    if data.count(b"[") + data.count(b"{") <= _MAX_CONTAINERS and _fits(data.count(b":"), data.count(b",")):
        return
    num_containers, num_members, num_values = count_json(data)
    if num_containers <= _MAX_CONTAINERS and _fits(num_members, num_values):
        return
    for number, limit, what in (
        (num_containers, _MAX_CONTAINERS, "lists and objects"),
        (num_members, _MAX_MEMBERS, "members of objects"),
        (num_values, _MAX_VALUES, "values"),
    ):
        if number > limit:
            raise InvalidRequestError(
                "", f"the body holds {number} {what}, over the limit of {limit}", f"send at most {limit}"
            )


def _fits(num_members: int, num_values: int) -> bool:
    return num_members <= _MAX_MEMBERS and num_values <= _MAX_VALUES


def count_json(data: bytes) -> tuple[int, int, int]:
    """Lists and objects, members of objects, and commas, outside of strings."""
    text = np.frombuffer(data, dtype=np.uint8)
    quotes = text == ord('"')
    quotes[_escaped(text)] = False
    # An odd number of quotes up to here: inside a string. Only the lowest bit matters, so the sum may wrap.
    outside = (np.cumsum(quotes, dtype=np.uint8) & 1) == 0

    def count(mark: str) -> int:
        return int(np.count_nonzero((text == ord(mark)) & outside))

    return count("[") + count("{"), count(":"), count(",")


def _escaped(text: _Bytes) -> npt.NDArray[np.intp]:
    """Positions behind an odd number of backslashes."""
    at = np.flatnonzero(text == ord("\\"))
    if not len(at):
        return at
    begins = np.flatnonzero(np.diff(at, prepend=at[0] - 2) != 1)
    lengths = np.diff(begins, append=len(at))
    ends = at[begins] + lengths
    found: npt.NDArray[np.intp] = ends[(lengths % 2 == 1) & (ends < len(text))]
    return found
