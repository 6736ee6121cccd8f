"""What a request carries from service to service beside its message: who it is for and until when it is wanted.

Set once at a door; every channel passes it on with the calls that the request's tasks make.
"""

from __future__ import annotations

import hashlib
import re
import time
from contextvars import ContextVar

CLIENT_KEY = "x-outrider-client"
"""Metadata: on whose behalf a call is made, for fair turns. Letters and digits, one part a level, "/" between them."""

USER_KEY = "x-user"
"""Metadata of a client's call: which of its users it is made for."""

MAX_CLIENT_CHARACTERS = 64

client: ContextVar[str] = ContextVar("outrider_client", default="")
"""On whose behalf the current task works; empty for nobody in particular."""

deadline: ContextVar[float | None] = ContextVar("outrider_deadline", default=None)
"""When the current task's answer is of no use any more, by time.monotonic(); None for never."""

_NOT_IN_CLIENT = re.compile(r"[^A-Za-z0-9/]")


def seconds_left() -> float | None:
    """Seconds until the current deadline, at least 0; None without one."""
    end = deadline.get()
    return None if end is None else max(0.0, end - time.monotonic())


def limit_time(asked: float | None, most: float) -> None:
    """Give the current task a deadline: the seconds that the client asked for, and `most` at most."""
    deadline.set(time.monotonic() + (most if asked is None else max(0.0, min(asked, most))))


def name_client(token: str, user: str) -> None:
    """Say for whom the current task works: the bearer token that came, and the user that the client names.

    Neither leaves this process: what travels is a digest of each.
    """
    client.set(f"{_digest(token)}/{_digest(user)}" if token or user else "")


def name_user(user: str) -> None:
    """Say which of its users the current task's client has named, once that is known."""
    name = client.get().partition("/")[0] or _digest("")
    client.set(f"{name}/{_digest(user)}" if user or client.get() else "")


def clean_client(given: str | bytes | None) -> str:
    """What a peer says it calls for, with harmless characters alone, of bounded length."""
    text = given.decode("ascii", "replace") if isinstance(given, bytes) else given or ""
    return _NOT_IN_CLIENT.sub("", text)[:MAX_CLIENT_CHARACTERS]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest() if text else "0"
