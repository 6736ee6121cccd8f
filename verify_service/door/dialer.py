"""Dials draft services, redials lost ones, shakes hands, and passes each session to the engine."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import cast

import grpc

from outrider.errors import ConfigError, InvalidRequestError
from outrider.logs import ThrottledWarnings, get_logger
from outrider.protocol.speculation import Hello
from outrider.protocol.speculation_codec import decode_draft, encode_verify
from outrider.rpc.channel import open_channel
from outrider.rpc.peers import PeerAddresses
from outrider.tree.handshake import HandshakeError, Terms, agree
from outrider.v1 import draft_pb2, draft_pb2_grpc
from verify_service.door.remote import RemoteVerifyEngine
from verify_service.door.session import Dial, DraftSession, SpeculateCall, end_writer

log = get_logger(__name__)

HELLO_SECONDS = 3.0
"""How long a draft may take to answer a hello."""
RETRY_SECONDS = 0.5
"""Pause before the next dial after a session that ended without a failure, and first pause after a failure."""
MAX_RETRY_SECONDS = 2.0
"""Longest pause. Pauses double with each failure, and start over after an attempt that lasted this long. A draft that
has recovered is in use within 5 seconds: only the next dial shows that it was repaired or replaced."""
UNREACHABLE_LOG_SECONDS = 5.0
"""Seconds a draft may be unreachable before that is logged: one that starts beside verify is unreachable at first."""
UNREACHABLE_REPEAT_SECONDS = 600.0
"""Time between two such log lines with the same reason; another reason is logged after UNREACHABLE_LOG_SECONDS."""
_REFUSALS = {
    grpc.StatusCode.UNAUTHENTICATED: " (--draft-auth-token-file)",
    grpc.StatusCode.FAILED_PRECONDITION: "",
}
"""Statuses with which a draft refuses us, and a hint to add to its message. The second is the status of
`HandshakeError`: the draft reads our hello first, so it is mostly the one to find that the two do not fit."""
MALFORMED_LOG_SECONDS = 10.0
"""Least time between two warnings of malformed messages."""


class DraftDialer:
    """Keeps a session with one draft service open, and reopens it until cancelled."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        engine: RemoteVerifyEngine,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        dial: Dial = open_channel,
    ) -> None:
        self.address = address
        self._dial = dial
        self.state = "connecting"
        """"connecting", "connected" or "refused"."""
        self._hello = hello
        self._engine = engine
        self._sleep = sleep
        self._failure_pause = RETRY_SECONDS
        """Seconds to pause after the next dial that fails."""
        self._malformed = ThrottledWarnings(log, MALFORMED_LOG_SECONDS)
        self._features_failed = False
        self._failure = ""
        """Why the last dial failed or its session ended; logged once while it stays the same."""
        self._unreachable_logged_at: float | None = None
        """When the draft was last logged, or first found, to be unreachable; None while it is reachable, or refuses us
        itself."""
        self._logged_reasons: set[str] = set()
        """Reasons logged since the draft became unreachable, with their digits removed."""
        self.wanted = True
        """Whether to dial again when a session has ended."""

    async def run(self) -> None:
        """Dial until cancelled or no longer `wanted`."""
        while self.wanted:
            state, failure = "connecting", ""
            self._features_failed = False
            began = time.monotonic()
            try:
                await self._run_session()
            except asyncio.CancelledError:
                # A call that the other side or `reset` cancelled looks the same; only the task can tell.
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
            except (ConfigError, HandshakeError) as error:
                state, failure = "refused", error.message
                if failure != self._failure:
                    log.error("draft %s is refused: %s", self.address, failure)
            except (grpc.aio.AioRpcError, TimeoutError, OSError) as error:
                code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
                if reason and code in _REFUSALS:
                    state, failure = "refused", reason + _REFUSALS[code]
                    if failure != self._failure:
                        log.error("draft %s refuses this verify service: %s", self.address, failure)
                else:
                    self._log_unreachable(reason or "it does not say why")
            except Exception as error:
                # If this task ended, the draft would never be dialled again.
                failure = repr(error)
                if failure != self._failure:
                    log.exception("the session with draft %s failed", self.address)
            if failure:
                self._unreachable_logged_at = None
            self.state, self._failure = state, failure
            if time.monotonic() - began >= MAX_RETRY_SECONDS:
                self._failure_pause = RETRY_SECONDS
            if failure or self._features_failed:
                await self._sleep(self._failure_pause)
                self._failure_pause = min(2 * self._failure_pause, MAX_RETRY_SECONDS)
            else:
                await self._sleep(RETRY_SECONDS)

    def _log_unreachable(self, reason: str) -> None:
        """Log why the draft is unreachable: at once if it was connected, else after a while; repeat reasons rarely."""
        now, kind = time.monotonic(), re.sub(r"\d+", "", reason)
        if self.state == "connected":
            log.warning("draft %s is disconnected: %s", self.address, reason)
            self._logged_reasons = {kind}
        elif self._unreachable_logged_at is None:
            self._logged_reasons = set()
        elif now < self._unreachable_logged_at + (
            UNREACHABLE_REPEAT_SECONDS if kind in self._logged_reasons else UNREACHABLE_LOG_SECONDS
        ):
            return
        else:
            log.warning("draft %s is not usable: %s; trying again", self.address, reason)
            self._logged_reasons.add(kind)
        self._unreachable_logged_at = now

    async def _run_session(self) -> None:
        async with self._dial(self.address) as channel:
            call: SpeculateCall = draft_pb2_grpc.DraftServiceStub(channel).Speculate()
            terms = await asyncio.wait_for(self._shake_hands(call), HELLO_SECONDS)
            session = DraftSession(self.address, call, terms, self._engine, self._malformed, self._dial)
            self.state = "connected"
            self._unreachable_logged_at = None
            log.info("draft %s is connected", self.address)
            self._engine.draft_connected(session, terms)
            writer = asyncio.create_task(session.write())
            # A session that can only read would never send another commit.
            writer.add_done_callback(lambda _: call.cancel())
            try:
                await session.read()
            finally:
                await session.close()
                self._features_failed = session.features_failed
                self._engine.draft_disconnected(session)
                log.info("the session with draft %s has ended", self.address)
                await end_writer(writer)

    async def _shake_hands(self, call: SpeculateCall) -> Terms:
        await call.write(encode_verify([self._hello]))
        batch = await call.read()
        if batch is grpc.aio.EOF:
            raise ConfigError("it ended the stream without a hello")
        if batch is None:
            raise ConfigError("its hello is no message")
        try:
            messages = decode_draft(cast(draft_pb2.DraftServiceSpeculateResponse, batch))
        except InvalidRequestError as error:
            raise ConfigError(f"its hello is malformed: {error.message}") from error
        if len(messages) != 1 or not isinstance(messages[0], Hello):
            raise ConfigError("its first message is not a hello")
        return agree(self._hello, messages[0])


class DraftDialers:
    """A dialer for each address of a draft service, as addresses come and go."""

    def __init__(self, addresses: PeerAddresses, make: Callable[[str], DraftDialer]) -> None:
        self._addresses = addresses
        self._make = make
        self._tasks: dict[DraftDialer, asyncio.Task[None]] = {}

    def __bool__(self) -> bool:
        """Whether drafts are configured, reachable or not."""
        return bool(self._addresses)

    def __iter__(self) -> Iterator[DraftDialer]:
        """Iterate over the dialers at work now."""
        return iter(tuple(self._tasks))

    async def run(self) -> None:
        """Follow the addresses, and dial, until cancelled."""
        try:
            async for addresses in self._addresses.follow():
                self._take(addresses)
            await asyncio.gather(*self._tasks.values())
        finally:
            tasks = tuple(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, addresses: Collection[str]) -> None:
        """Dial these addresses and no others. Sessions with others go on until their drafts drain and end them."""
        # A dialer that is ending cannot take its address up again.
        dialers = {
            dialer.address: dialer for dialer, task in self._tasks.items() if not (task.done() or task.cancelling())
        }
        for address in addresses:
            if address not in dialers:
                dialers[address] = dialer = self._make(address)
                self._tasks[dialer] = task = asyncio.create_task(dialer.run(), name=f"dial {address}")
                task.add_done_callback(lambda _, dialer=dialer: self._tasks.pop(dialer, None))  # type: ignore[misc]
        for address, dialer in dialers.items():
            dialer.wanted = address in addresses
            if not dialer.wanted and dialer.state != "connected":
                self._tasks[dialer].cancel()
