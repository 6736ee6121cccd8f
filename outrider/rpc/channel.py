"""Channels to other services, with the keepalive that their servers expect, and token and request id on every call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import grpc

from outrider import logs
from outrider.config.service import check_token
from outrider.rpc.call import AUTHORIZATION_KEY, CLIENT_KEY, REQUEST_ID_KEY, client, seconds_left
from outrider.rpc.tls import TlsSource, channel_credentials
from outrider.rpc.transport import (
    DEFAULT_MAX_MESSAGE_BYTES,
    channel_options,
    check_peer_address,
    grpc_target,
    unix_path,
)


def open_channel(
    address: str,
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    auth_token: str | Callable[[], str] = "",
    tls: TlsSource | None = None,
    option: str = "address",
) -> grpc.aio.Channel:
    """Return a channel to "host:port", "unix:/path" or "dns:..."; it connects at the first call and reconnects.

    Must be called inside the event loop. Raises ConfigError, naming `option`, if the address is malformed. Each call
    carries the bearer token of that moment, if there is one, and the current request id, client and deadline.
    When files of `tls` are replaced, new calls use the new files, and calls under way continue.
    """
    if not address.startswith("dns:"):
        check_peer_address(address, option)
    current_token = auth_token if callable(auth_token) else lambda: auth_token
    check_token(current_token(), "auth token")
    logs.hide_secret(current_token())
    options, target = channel_options(max_message_bytes), grpc_target(address)
    # gRPC would check a socket's path against the certificate, which cannot name a path.
    name = "" if tls is None else tls.files.name or ("localhost" if unix_path(address) is not None else "")
    if name:
        options.append(("grpc.ssl_target_name_override", name))

    def dial() -> grpc.aio.Channel:
        if tls is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, channel_credentials(tls.current()[1]), options=options)

    return _TaggedChannel(dial, tls, current_token)


class _TaggedChannel(grpc.aio.Channel):
    """A channel with metadata and a deadline on each call.

    New calls use a new connection once the TLS files have changed. `close` cancels the calls that are left.
    grpc.aio's interceptors would put a task and a queue between a stream and its messages; this costs a tuple a call.
    """

    def __init__(
        self, dial: Callable[[], grpc.aio.Channel], tls: TlsSource | None, auth_token: Callable[[], str]
    ) -> None:
        self._dial = dial
        self._tls = tls
        self._tls_version = 0 if tls is None else tls.current()[0]
        self._auth_token = auth_token
        self._channel = dial()
        self._calls: WeakSet[grpc.aio.Call] = WeakSet()
        self._closing: set[asyncio.Task[None]] = set()
        """A task for each former channel that still has calls, which closes it after the last one."""

    async def __aenter__(self) -> _TaggedChannel:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        # grpc.aio does not cancel streams that are not being read at the moment; their servers would go on for nothing.
        if not grace:
            self._cancel_calls()
        await self._channel.close(grace)
        self._cancel_calls()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _cancel_calls(self) -> None:
        for call in tuple(self._calls):
            call.cancel()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._tagged(lambda channel: channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._tagged(lambda channel: channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._tagged(lambda channel: channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._tagged(lambda channel: channel.stream_stream(*args, **kwargs))

    def _tagged(self, make: Callable[[grpc.aio.Channel], Any]) -> Any:
        made_on = self._channel
        method = make(made_on)

        def call(*args: Any, metadata: Any = None, timeout: float | None = None, **kwargs: Any) -> Any:
            nonlocal made_on, method
            self._renew()
            if self._channel is not made_on:
                made_on = self._channel
                method = make(made_on)
            left = seconds_left()
            if left is not None:
                timeout = left if timeout is None else min(timeout, left)
            made = method(*args, metadata=self._tags(metadata), timeout=timeout, **kwargs)
            self._calls.add(made)
            return made

        return call

    def _tags(self, metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
        """Return the caller's metadata plus the default entries that it lacks."""
        pairs = tuple(metadata or ())
        given = {key for key, _ in pairs}
        defaults = (
            (AUTHORIZATION_KEY, f"Bearer {token}" if (token := self._auth_token()) else ""),
            (REQUEST_ID_KEY, logs.request_id.get()),
            (CLIENT_KEY, client.get()),
        )
        return pairs + tuple((key, value) for key, value in defaults if value and key not in given)

    def _renew(self) -> None:
        """Open a new channel if the TLS files have changed; the current one is closed when its last call ends."""
        if self._tls is None or (version := self._tls.current()[0]) == self._tls_version:
            return
        task = asyncio.create_task(_close_behind(tuple(self._calls), self._channel))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self._tls_version, self._channel = version, self._dial()


async def _close_behind(calls: Sequence[grpc.aio.Call], channel: grpc.aio.Channel) -> None:
    """Close a channel when these calls have ended, whatever their outcome."""
    await asyncio.gather(*(call.code() for call in calls), return_exceptions=True)
    await channel.close()
