"""Bearer tokens of a door and of its callers, from files that may change while a service runs."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from outrider.config.service import PeerServiceOptions, check_token, peer_token
from outrider.logs import hide_secret
from outrider.rpc.reload import FileSource

Tokens = Mapping[bytes, str]
"""Bearer tokens of a door, each with its tenant's name; none if it is open."""


def _read(option: str, read: Callable[[], Mapping[str, str]]) -> Tokens:
    tokens = read()
    for token in tokens:
        check_token(token, option)
        hide_secret(token)
    return {token.encode(): tenant for token, tenant in tokens.items()}


class TokenSource:
    """The tokens that open a door now. Those of a file follow the file: no restart is needed to add or revoke one.

    A door that has tokens keeps some, because a file without any cannot be used.
    """

    def __init__(self, option: str, file: str | Path | None, read: Callable[[], Mapping[str, str]]) -> None:
        """`read` returns the tokens and their tenants. Raises ConfigError, naming `option`."""
        files = {option: str(file)} if file else {}
        self._source = FileSource(option, files, partial(_read, option, read))

    def __bool__(self) -> bool:
        """Whether the door asks for a token."""
        return bool(self.current())

    def current(self) -> Tokens:
        """Return the tokens to accept now."""
        return self._source.current()[1]


def fixed_tokens(*tokens: str) -> TokenSource:
    """Return tokens that stay, each a tenant of its own."""
    return TokenSource("--auth-token", None, lambda: dict.fromkeys(tokens, ""))


NO_TOKENS = fixed_tokens()
"""Those of a door that is open."""


def door_tokens(options: PeerServiceOptions) -> TokenSource:
    """Return the tokens that open a door for other services. Raises ConfigError."""
    return TokenSource("--auth-token-file", options.auth_token_file, options.read_auth_tokens)


def peer_tokens(options: object, peer: str) -> Callable[[], str]:
    """Return what gives the token to send to `peer`, "verify" or "draft", now; empty if none is set.

    Raises ConfigError.
    """
    file = getattr(options, f"{peer}_auth_token_file")
    sent = TokenSource(f"--{peer}-auth-token-file", file, lambda: {peer_token(options, peer): ""})
    return lambda: next(iter(sent.current())).decode()


def matching_token(authorization: bytes, tokens: Tokens) -> bytes | None:
    """Return the one of `tokens` that "Bearer TOKEN" carries; None for any other text.

    All tokens are always compared, each in a time that does not depend on where the two differ.
    """
    scheme, _, given = authorization.partition(b" ")
    given = given.strip()
    found = [token for token in tokens if hmac.compare_digest(given, token)]
    return found[0] if found and scheme.lower() == b"bearer" else None
