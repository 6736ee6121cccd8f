"""The context of a request: client, tenant and deadline.

A door sets it once. Every channel passes client and deadline on with the calls that the request's tasks make.
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
"""Metadata: the client on whose behalf a call is made, for fair turns. Levels of letters and digits, joined by "/"."""
USER_KEY = "x-user"
"""Metadata of a client's call: the client's user for whom it is made."""

MAX_CHARACTERS = 64
"""Longest client or request id in metadata."""

client: ContextVar[str] = ContextVar("outrider_client", default="")
"""The client that the current task works for; empty if unknown."""

tenant: ContextVar[str] = ContextVar("outrider_tenant", default="")
"""Digest of the owner of the current task's text; empty at a door that cannot tell its clients apart."""

deadline: ContextVar[float | None] = ContextVar("outrider_deadline", default=None)
"""Time, by time.monotonic(), after which the current task's answer is useless; None for no deadline."""

_NOT_IN_CLIENT = re.compile(r"[^A-Za-z0-9/]")
_NOT_IN_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:-]")


def seconds_left() -> float | None:
    """Return the seconds until the current deadline, at least 0; None without a deadline."""
    end = deadline.get()
    return None if end is None else max(0.0, end - time.monotonic())


def limit_time(seconds: float | None, limit: float) -> None:
    """Give the current task a deadline: the `seconds` that the client asked for, at most `limit`."""
    deadline.set(time.monotonic() + (limit if seconds is None else max(0.0, min(seconds, limit))))


def name_client(token: str, user: str, tenant_name: str = "") -> None:
    """Set client and tenant of the current task, from its bearer token and the user that the client names.

    The tenant is `tenant_name`, if one is configured for the token, else the token itself. Only digests of the three
    leave this process.
    """
    tenant.set(_tenant_digest("name", tenant_name) if tenant_name else _tenant_digest("key", token) if token else "")
    client.set(f"{_digest(token)}/{_digest(user)}" if token or user else "")


def name_user(user: str) -> None:
    """Set the user of the current task's client, once it is known."""
    name = client.get().partition("/")[0] or _digest("")
    client.set(f"{name}/{_digest(user)}" if user or client.get() else "")


def salted_tenant(cache_salt: str) -> str:
    """Return the current task's tenant, narrowed by its client's `cache_salt`; no client can reach another's tenant."""
    return _tenant_digest("salt", f"{tenant.get()}/{cache_salt}") if cache_salt else tenant.get()


def clean_client(given: str | bytes | None) -> str:
    """Return the client that a peer names, reduced to harmless characters and bounded length."""
    return _clean(given, _NOT_IN_CLIENT)


def clean_request_id(given: str | bytes | None) -> str:
    """Return a client's request id, reduced to harmless characters and bounded length; a new one if nothing is left."""
    return _clean(given, _NOT_IN_REQUEST_ID) or uuid.uuid4().hex


def _clean(given: str | bytes | None, illegal: re.Pattern[str]) -> str:
    text = given.decode("ascii", "replace") if isinstance(given, bytes) else given or ""
    return illegal.sub("", text)[:MAX_CHARACTERS]


def _tenant_digest(kind: str, text: str) -> str:
    data = f"{kind}:{text}".encode("utf-8", "replace")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest() if text else "0"
