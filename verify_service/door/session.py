"""The speculation stream, dialled: one session at a time with one draft service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, cast

import grpc
import numpy as np

from outrider.errors import ConfigError, InvalidRequestError
from outrider.grammar.spec import MAX_SOURCE_BYTES
from outrider.logs import get_logger
from outrider.protocol.codec import decode_draft, encode_verify, in_parts
from outrider.protocol.messages import Commit, DraftMessage, Features, FeaturesBegin, Hello, Open, VerifyMessage
from outrider.rpc.channel import open_channel
from outrider.tree.handshake import HandshakeError, Terms, agree
from outrider.tree.projection import ProjectionPart, ProjectionReader
from outrider.v1 import draft_pb2, draft_pb2_grpc
from verify_service.door.feature_stream import Dial, FeatureStream
from verify_service.door.patience import Backoff, Seldom

log = get_logger(__name__)

HELLO_SECONDS = 3.0
RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 2.0
"""The longest pause, whatever failed and however often. A draft that is well again is in use within 5 seconds: nothing
tells that it was replaced, or mended, but the next dial."""
MALFORMED_LOG_SECONDS = 10.0
MAX_QUEUED_MESSAGES = 4096
MAX_BATCH_BYTES = 1 << 20
"""After a reconnect all requests are opened at once, each with all its tokens: too much for one message."""

SpeculateCall = grpc.aio.StreamStreamCall[
    draft_pb2.DraftServiceSpeculateRequest, draft_pb2.DraftServiceSpeculateResponse
]


class DraftEvents(Protocol):
    """What a session tells the engine."""

    def draft_connected(self, port: DraftSession, terms: Terms) -> None:
        """The session is open."""

    def draft_disconnected(self, port: DraftSession) -> None:
        """The session is over."""

    def draft_received(self, port: DraftSession, messages: list[DraftMessage]) -> None:
        """Messages came in."""

    async def features_projection(self, port: DraftSession, part: ProjectionPart) -> None:
        """The next part of the projection that the engine has asked for came; returns when more may come."""

    def features_opened(self, port: DraftSession, window: int, uses_ring: bool) -> None:
        """The features stream that the engine has asked for is open, and all of the projection here if it was."""

    def features_released(self, port: DraftSession, through: int) -> None:
        """The draft is done with features."""


class DraftSession:
    """An open stream.

    Between two writes messages gather here: commits of one request that follow each other become one. More than
    `MAX_QUEUED_MESSAGES` means that the peer does not read, and the session ends.
    """

    def __init__(
        self,
        address: str,
        call: SpeculateCall,
        terms: Terms,
        events: DraftEvents,
        malformed: Seldom,
        dial: Dial = open_channel,
    ) -> None:
        """`malformed` logs what cannot be read; `dial` opens the features stream's channel."""
        self.address = address
        self._dial = dial
        self.features_failed = False
        """Whether the features stream ended, and with it the session."""
        self._malformed = malformed
        self._call = call
        self._terms = terms
        self._events = events
        self._features: FeatureStream | None = None
        self._features_task: asyncio.Task[None] | None = None
        self._queue: list[VerifyMessage] = []
        self._last_commit: dict[int, int] = {}
        self._filled = asyncio.Event()
        self._is_over = False
        self._is_closing = False

    def send(self, messages: list[VerifyMessage]) -> None:
        """Queue messages, in order."""
        for message in messages:
            self._put(message)
        if len(self._queue) > MAX_QUEUED_MESSAGES:
            log.warning("draft %s does not read; its session is reset", self.address)
            self.reset()
        self._filled.set()

    def begin_features(self, begin: FeaturesBegin) -> None:
        """Open the features stream, under the session's token. A session whose features stream ends is over, too."""
        begin = replace(begin, token=self._terms.features_token)
        opened = partial(self._events.features_opened, self)
        released = partial(self._events.features_released, self)
        pass_on = partial(self._events.features_projection, self)
        reader = None
        if begin.wants_projection:
            terms = self._terms
            columns, name = terms.projection_columns, terms.projection_hash
            reader = ProjectionReader(begin.layers, terms.hidden_size, columns, name)
        self._features = FeatureStream(self.address, begin, reader, pass_on, opened, released, self._dial)
        self._features_task = asyncio.create_task(self._features.run())
        self._features_task.add_done_callback(self._features_ended)

    def send_features(self, messages: list[Features]) -> None:
        """Queue features, in order."""
        if self._features is not None:
            self._features.send(messages)

    def reset(self) -> None:
        """End the session."""
        self._is_over = True
        self._call.cancel()

    async def close(self) -> None:
        """End the features stream, if there is one."""
        self._is_closing = True
        if self._features_task is not None:
            self._features_task.cancel()
            await asyncio.gather(self._features_task, return_exceptions=True)

    async def write(self) -> None:
        """Write what is queued until cancelled."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            messages, self._queue = self._queue, []
            self._last_commit.clear()
            for batch in _batches(messages):
                await self._call.write(encode_verify(batch))

    async def read(self) -> None:
        """Pass on what comes in until the stream ends."""
        # read(), because grpc.aio refuses to iterate a call that the handshake has read from.
        while (batch := await self._call.read()) is not grpc.aio.EOF:
            # grpc hands out None for bytes that are no message.
            if batch is None:
                self._malformed.warn("draft %s sent bytes that are no message, dropped", self.address)
                continue
            for part in in_parts(cast(draft_pb2.DraftServiceSpeculateResponse, batch)):
                try:
                    self._events.draft_received(self, decode_draft(part))
                except InvalidRequestError as error:
                    self._malformed.warn("draft %s sent a malformed message, dropped: %s", self.address, error.message)
                await asyncio.sleep(0)
                if self._is_over:  # what is left of the batch is of no use, however long it is
                    return

    def _features_ended(self, task: asyncio.Task[None]) -> None:
        # A stream that the draft cancelled looks as one that `close` did.
        self.features_failed = not self._is_closing
        self._call.cancel()

    def _put(self, message: VerifyMessage) -> None:
        if isinstance(message, Commit):
            place = self._last_commit.get(message.request)
            earlier = self._queue[place] if place is not None else None
            if place is not None and isinstance(earlier, Commit):
                tokens = np.concatenate([earlier.token_ids, message.token_ids])
                self._queue[place] = replace(message, length_before=earlier.length_before, token_ids=tokens)
                return
            self._last_commit[message.request] = len(self._queue)
        self._queue.append(message)


def _batches(messages: Sequence[VerifyMessage]) -> Iterator[Sequence[VerifyMessage]]:
    """Messages in their order, in batches of about `MAX_BATCH_BYTES` at most; one that is longer goes alone."""
    first = num_bytes = 0
    for index, message in enumerate(messages):
        size = _num_bytes(message)
        if index > first and num_bytes + size > MAX_BATCH_BYTES:
            yield messages[first:index]
            first, num_bytes = index, 0
        num_bytes += size
    if messages:
        yield messages[first:]


def _num_bytes(message: VerifyMessage) -> int:
    """About what a message takes, and rather more."""
    size = 128
    if isinstance(message, Open | Commit):
        size += message.token_ids.nbytes
    if isinstance(message, Open):
        size += 16 * len(message.sampling.logit_bias) + MAX_SOURCE_BYTES * (message.sampling.grammar is not None)
    return size


class DraftDialer:
    """Keeps a session with one draft service open, again and again until cancelled."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        events: DraftEvents,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        dial: Dial = open_channel,
    ) -> None:
        self.address = address
        self._dial = dial
        self.state = "connecting"
        """"connecting", "connected" or "refused"."""
        self._hello = hello
        self._events = events
        self._sleep = sleep
        self._backoff = Backoff(RETRY_SECONDS, MAX_RETRY_SECONDS, clock)
        self._malformed = Seldom(log, MALFORMED_LOG_SECONDS, clock)
        self._features_failed = False
        self._failure = ""
        """What kept the last dial from becoming a session, or ended that; it is logged once while it stays the same."""

    async def run(self) -> None:
        """Dial until cancelled."""
        while True:
            state, failure = "connecting", ""
            self._features_failed = False
            self._backoff.begin()
            try:
                await self._converse()
            except asyncio.CancelledError:
                # A call that the other side or `reset` cancelled looks the same; only the task knows.
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
            except (ConfigError, HandshakeError) as error:
                state, failure = "refused", error.message
                if failure != self._failure:
                    log.error("draft %s is refused: %s", self.address, failure)
            except (grpc.aio.AioRpcError, TimeoutError, OSError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
                if self.state != "connecting":
                    log.warning("draft %s is away: %s", self.address, reason)
            except Exception as error:
                # Without this task speculation would never come back.
                failure = repr(error)
                if failure != self._failure:
                    log.exception("the session with draft %s failed", self.address)
            self.state, self._failure = state, failure
            await self._sleep(self._backoff.failed() if failure or self._features_failed else RETRY_SECONDS)

    async def _converse(self) -> None:
        channel = self._dial(self.address)
        try:
            call: SpeculateCall = draft_pb2_grpc.DraftServiceStub(channel).Speculate()
            terms = await asyncio.wait_for(self._shake_hands(call), HELLO_SECONDS)
            session = DraftSession(self.address, call, terms, self._events, self._malformed, self._dial)
            self.state = "connected"
            log.info("draft %s is connected", self.address)
            self._events.draft_connected(session, terms)
            writer = asyncio.create_task(session.write())
            # A session that can only read would go silent, and all of its requests with it.
            writer.add_done_callback(lambda _: call.cancel())
            try:
                await session.read()
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
                await session.close()
                self._features_failed = session.features_failed
                self._events.draft_disconnected(session)
                log.info("the session with draft %s is over", self.address)
        finally:
            await channel.close()

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
