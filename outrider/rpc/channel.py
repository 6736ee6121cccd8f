"""Channels to other services: keepalive as their servers expect it, token and request id on every call."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import grpc

from outrider import logs
from outrider.rpc.interceptors import AUTHORIZATION_KEY, REQUEST_ID_KEY
from outrider.rpc.transport import DEFAULT_MAX_MESSAGE_BYTES, channel_options, check_address, check_token


def open_channel(
    address: str,
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    auth_token: str = "",
    option: str = "address",
) -> grpc.aio.Channel:
    """Return a channel to "host:port", "unix:/path" or "dns:..."; it connects at the first call and again by itself.

    Called inside the event loop. ConfigError, naming `option`, if the address is malformed. Each call carries the
    bearer token, if one is given, and the current request id.
    """
    if not address.startswith("dns:"):
        check_address(address, option)
    check_token(auth_token, "auth token")
    logs.hide_secret(auth_token)
    inner = grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))
    return _TaggedChannel(inner, auth_token)


class _TaggedChannel(grpc.aio.Channel):
    """Adds metadata to each call, and cancels the calls that are left when it is closed.

    grpc.aio's interceptors would put a task and a queue between a stream and its messages; this costs a tuple a call.
    """

    def __init__(self, inner: grpc.aio.Channel, auth_token: str) -> None:
        self._inner = inner
        self._auth_token = auth_token
        self._calls: WeakSet[grpc.aio.Call] = WeakSet()

    async def __aenter__(self) -> _TaggedChannel:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        # grpc.aio forgets streams that nobody is reading from at the moment; their servers would go on for nothing.
        if not grace:
            self._cancel_calls()
        await self._inner.close(grace)
        self._cancel_calls()

    def _cancel_calls(self) -> None:
        for call in tuple(self._calls):
            call.cancel()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._tagged(self._inner.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._tagged(self._inner.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._tagged(self._inner.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._tagged(self._inner.stream_stream(*args, **kwargs))

    def _tagged(self, callable_: Any) -> Any:
        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            made = callable_(*args, metadata=self._tags(metadata), **kwargs)
            self._calls.add(made)
            return made

        return call

    def _tags(self, metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
        """The caller's metadata, with what it left out."""
        pairs = tuple(metadata or ())
        given = {key for key, _ in pairs}
        request_id = logs.request_id.get()
        if self._auth_token and AUTHORIZATION_KEY not in given:
            pairs += ((AUTHORIZATION_KEY, f"Bearer {self._auth_token}"),)
        if request_id and REQUEST_ID_KEY not in given:
            pairs += ((REQUEST_ID_KEY, request_id),)
        return pairs
