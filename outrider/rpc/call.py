"""The context of a request, which travels as metadata beside its messages: client, tenant and deadline.

Set once at a door; every channel passes it on with the calls that the request's tasks make.
"""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from contextvars import ContextVar

AUTHORIZATION_KEY = "authorization"
REQUEST_ID_KEY = "x-request-id"
CLIENT_KEY = "x-outrider-client"
"""Metadata: on whose behalf a call is made, for fair turns. Letters and digits, one part a level, "/" between them."""
USER_KEY = "x-user"
"""Metadata of a client's call: which of its users it is made for."""

MAX_CHARACTERS = 64
"""Of a client or a request id in metadata."""

client: ContextVar[str] = ContextVar("outrider_client", default="")
"""The client that the current task works for; empty where none is known."""

tenant: ContextVar[str] = ContextVar("outrider_tenant", default="")
"""Digest of whoever the current task's text belongs to; empty at a door that cannot tell its clients apart."""

deadline: ContextVar[float | None] = ContextVar("outrider_deadline", default=None)
"""When the current task's answer is of no use any more, by time.monotonic(); None for never."""

_NOT_IN_CLIENT = re.compile(r"[^A-Za-z0-9/]")
_NOT_IN_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:-]")


def seconds_left() -> float | None:
    """Seconds until the current deadline, at least 0; None without one."""
    end = deadline.get()
    return None if end is None else max(0.0, end - time.monotonic())


def limit_time(seconds: float | None, limit: float) -> None:
    """Give the current task a deadline: the `seconds` that the client asked for, at most `limit`."""
    deadline.set(time.monotonic() + (limit if seconds is None else max(0.0, min(seconds, limit))))


def name_client(token: str, user: str, tenant_name: str = "") -> None:
    """Set client and tenant of the current task, from its bearer token and the user that the client names.

    The tenant is the one that the token's owner has configured, else the token itself. None of the three leaves this
    process: what travels is a digest of each.
    """
    tenant.set(_tenant_digest("name", tenant_name) if tenant_name else _tenant_digest("key", token) if token else "")
    client.set(f"{_digest(token)}/{_digest(user)}" if token or user else "")


def name_user(user: str) -> None:
    """Set the user of the current task's client, once it is known."""
    name = client.get().partition("/")[0] or _digest("")
    client.set(f"{name}/{_digest(user)}" if user or client.get() else "")


def salted_tenant(cache_salt: str) -> str:
    """The current task's tenant, narrowed by its client's `cache_salt`; no client reaches another's."""
    return _tenant_digest("salt", f"{tenant.get()}/{cache_salt}") if cache_salt else tenant.get()


def clean_client(given: str | bytes | None) -> str:
    """The client that a peer names, with harmless characters alone, of bounded length."""
    return _clean(given, _NOT_IN_CLIENT)


def clean_request_id(given: str | bytes | None) -> str:
    """A client's request id with harmless characters alone, of bounded length; a fresh one if nothing is left."""
    return _clean(given, _NOT_IN_REQUEST_ID) or uuid.uuid4().hex


def _clean(given: str | bytes | None, illegal: re.Pattern[str]) -> str:
    text = given.decode("ascii", "replace") if isinstance(given, bytes) else given or ""
    return illegal.sub("", text)[:MAX_CHARACTERS]


def _tenant_digest(kind: str, text: str) -> str:
    data = f"{kind}:{text}".encode("utf-8", "replace")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest() if text else "0"
