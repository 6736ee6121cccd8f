"""A session with a draft service: the speculation stream, and the features stream beside it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import grpc
from msgspec.structs import replace

from outrider.errors import InvalidRequestError
from outrider.grammar.spec import MAX_SOURCE_BYTES
from outrider.logs import ThrottledWarnings, get_logger
from outrider.protocol.speculation import (
    MAX_FEATURE_BYTES,
    MAX_FEATURE_PIECES,
    Commit,
    Features,
    FeaturesAccept,
    FeaturesBegin,
    FeaturesReleased,
    FeaturesResponse,
    Hello,
    Open,
    ProjectionPart,
    VerifyMessage,
)
from outrider.protocol.speculation_codec import (
    decode_draft,
    decode_response,
    encode_begin,
    encode_features,
    encode_verify,
    in_parts,
)
from outrider.rpc.channel import open_channel
from outrider.tree.handshake import ProjectionReader, Terms
from outrider.v1 import draft_pb2, draft_pb2_grpc
from verify_service.door.remote import RemoteVerifyEngine
from verify_service.frames import FeatureStreamAccepted, FeatureStreamReleased, ProjectionFrame

log = get_logger(__name__)

MAX_QUEUED_MESSAGES = 4096
"""Messages that may wait to be written to a draft; with more its session is reset."""
MAX_BATCH_BYTES = 1 << 20
"""Limit for one message: after a reconnect all requests are opened at once, each with all its tokens."""

FeaturesCall = grpc.aio.StreamStreamCall[draft_pb2.DraftServiceFeaturesRequest, draft_pb2.DraftServiceFeaturesResponse]
SpeculateCall = grpc.aio.StreamStreamCall[
    draft_pb2.DraftServiceSpeculateRequest, draft_pb2.DraftServiceSpeculateResponse
]
Dial = Callable[[str], grpc.aio.Channel]
"""Opens a channel to an address."""


@dataclass(eq=False, repr=False)
class FeatureUpload:
    """Sends features and receives releases until cancelled. Features that are queued when it writes share a message.

    The sender bounds the queue by counting what the draft has not released, so a draft must not release anything that
    was not written yet.
    """

    session: DraftSession
    begin: FeaturesBegin
    reader: ProjectionReader | None
    """Checks the parts of the projection, if `begin` wants it."""
    _written: int = 0
    """Sequence number of the last features that the draft may have seen."""
    _max_pieces: int = 1
    """Most pieces in one message."""
    _queue: deque[Features] = field(default_factory=deque)
    _filled: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, messages: list[Features]) -> None:
        """Queue features, in order."""
        self._queue.extend(messages)
        self._filled.set()

    async def run(self) -> None:
        """Open the stream and serve it until either side ends it. Logs failures instead of raising them."""
        engine, channel = self.session.engine, self.session.dial(self.session.address)
        try:
            call: FeaturesCall = draft_pb2_grpc.DraftServiceStub(channel).Features()
            await call.write(encode_begin(self.begin))
            accept = _read(await call.read())
            if not isinstance(accept, FeaturesAccept) or not self._fits(accept):
                raise InvalidRequestError("event", "is not what accepts this stream")
            if self.reader is not None:
                await self._read_projection(call, self.reader)
            self._max_pieces = MAX_FEATURE_PIECES if accept.takes_batches else 1
            number = self.session.number
            engine.send(FeatureStreamAccepted(number, accept.window, accept.uses_ring))
            writer = asyncio.create_task(self._write(call))
            writer.add_done_callback(lambda _: call.cancel())
            try:
                while (response := _read(await call.read())) is not None:
                    if not isinstance(response, FeaturesReleased):
                        raise InvalidRequestError("event", "belongs to the beginning of the stream")
                    if response.through > self._written:
                        problem = f"{response.through} was not sent yet, {self._written} is the last that was"
                        raise InvalidRequestError("released.through", problem)
                    engine.send(FeatureStreamReleased(number, response.through))
            finally:
                await end_writer(writer)
        except (grpc.aio.AioRpcError, InvalidRequestError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error.message
            log.warning("the features stream to draft %s failed: %s", self.session.address, reason)
        except Exception:
            log.exception("the features stream to draft %s failed", self.session.address)
        finally:
            await channel.close()

    def _fits(self, accept: FeaturesAccept) -> bool:
        """Whether the draft has accepted exactly what it was asked for."""
        return accept.projects == (self.reader is not None) and (self.begin.ring is not None or not accept.uses_ring)

    async def _read_projection(self, call: FeaturesCall, reader: ProjectionReader) -> None:
        whole = False
        while not whole:
            part = _read(await call.read())
            if not isinstance(part, ProjectionPart):
                raise InvalidRequestError("event", "is no part of the projection that is missing")
            whole = reader.take(part)
            self.session.engine.send(ProjectionFrame(self.session.number, part))
            await self.session.engine.writable()

    async def _write(self, call: FeaturesCall) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._queue:
                batch = self._next_batch()
                self._written = batch[-1].sequence
                await call.write(encode_features(batch))

    def _next_batch(self) -> list[Features]:
        """Take the next message's features from the queue: as a rule those of one round, for all requests."""
        batch = [self._queue.popleft()]
        room = MAX_FEATURE_BYTES // self.begin.row_bytes - batch[0].count
        while self._queue and len(batch) < self._max_pieces and self._queue[0].count <= room:
            room -= self._queue[0].count
            batch.append(self._queue.popleft())
        return batch


async def end_writer(writer: asyncio.Task[None]) -> None:
    """Cancel a task that writes to a call. Raises its failure, unless the call has ended or this task is cancelled."""
    writer.cancel()
    (failure,) = await asyncio.gather(writer, return_exceptions=True)
    if not isinstance(failure, Exception) or isinstance(failure, grpc.aio.AioRpcError | asyncio.InvalidStateError):
        return
    if (task := asyncio.current_task()) is not None and not task.cancelling():
        raise failure


def _read(message: object) -> FeaturesResponse | None:
    """Decode a message of the stream; None at its end. Raises InvalidRequestError for anything else."""
    if message is grpc.aio.EOF:
        return None
    if message is None:  # grpc returns None for bytes that are no message
        raise InvalidRequestError("event", "is no message")
    return decode_response(cast(draft_pb2.DraftServiceFeaturesResponse, message))


@dataclass(eq=False, repr=False)
class DraftSession:
    """An open speculation stream.

    Messages gather here between two writes; consecutive commits of one request are merged. More than
    `MAX_QUEUED_MESSAGES` mean that the draft does not read, and the session ends.
    """

    address: str
    call: SpeculateCall
    terms: Terms
    engine: RemoteVerifyEngine
    malformed: ThrottledWarnings
    """Logs messages that cannot be read."""
    dial: Dial = open_channel
    """Opens the features stream's channel."""
    number: int = 0
    unread_weight: int = 0
    features_failed: bool = False
    """Whether the features stream ended, and with it the session."""
    _features: FeatureUpload | None = None
    _features_task: asyncio.Task[None] | None = None
    _queue: list[VerifyMessage] = field(default_factory=list)
    _last_commit: dict[int, int] = field(default_factory=dict)
    _filled: asyncio.Event = field(default_factory=asyncio.Event)
    _is_over: bool = False
    _is_closing: bool = False

    def send(self, messages: list[VerifyMessage]) -> None:
        """Queue messages, in order."""
        for message in messages:
            self._put(message)
        if len(self._queue) > MAX_QUEUED_MESSAGES:
            log.warning("draft %s does not read its stream; its session is reset", self.address)
            self.reset()
        self._filled.set()

    def begin_features(self, begin: FeaturesBegin) -> None:
        """Open the features stream, under the session's token. When it ends, the session is over, too."""
        begin = replace(begin, token=self.terms.features_token)
        reader = None
        if begin.wants_projection:
            terms = self.terms
            columns, name = terms.projection_columns, terms.projection_hash
            reader = ProjectionReader(begin.layers, terms.hidden_size, columns, name)
        self._features = FeatureUpload(self, begin, reader)
        self._features_task = asyncio.create_task(self._features.run())
        self._features_task.add_done_callback(self._features_ended)

    def send_features(self, messages: list[Features]) -> None:
        """Queue features, in order."""
        if self._features is not None:
            self._features.send(messages)

    def reset(self) -> None:
        """End the session."""
        self._is_over = True
        self.call.cancel()

    async def close(self) -> None:
        """End the features stream, if there is one."""
        self._is_closing = True
        if self._features_task is not None:
            self._features_task.cancel()
            await asyncio.gather(self._features_task, return_exceptions=True)

    async def write(self) -> None:
        """Write queued messages until cancelled."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            messages, self._queue = self._queue, []
            self._last_commit.clear()
            for batch in _batches(messages):
                await self.call.write(encode_verify(batch))

    async def read(self) -> None:
        """Pass incoming messages to the engine until the stream ends."""
        # read(), because grpc.aio refuses to iterate a call that the handshake has read from.
        while (batch := await self.call.read()) is not grpc.aio.EOF:
            # grpc returns None for bytes that are no message.
            if batch is None:
                self.malformed.warn("draft %s sent bytes that are no message, dropped", self.address)
                continue
            for part in in_parts(cast(draft_pb2.DraftServiceSpeculateResponse, batch)):
                try:
                    self.engine.draft_received(self, decode_draft(part))
                except InvalidRequestError as error:
                    self.malformed.warn("draft %s sent a malformed message, dropped: %s", self.address, error.message)
                await asyncio.sleep(0)
                if self._is_over:  # the rest of the batch is of no use, however long it is
                    return

    def _features_ended(self, task: asyncio.Task[None]) -> None:
        # A stream that the draft cancelled looks like one that `close` did.
        self.features_failed = not self._is_closing
        self.call.cancel()

    def _put(self, message: VerifyMessage) -> None:
        if isinstance(message, Commit):
            place = self._last_commit.get(message.request)
            earlier = self._queue[place] if place is not None else None
            if place is not None and isinstance(earlier, Commit):
                tokens = earlier.token_ids + message.token_ids
                self._queue[place] = replace(message, length_before=earlier.length_before, token_ids=tokens)
                return
            self._last_commit[message.request] = len(self._queue)
        elif not isinstance(message, Hello):
            self._last_commit.pop(message.request, None)
        self._queue.append(message)


def _batches(messages: Sequence[VerifyMessage]) -> Iterator[Sequence[VerifyMessage]]:
    """Yield messages in order, in batches of at most about `MAX_BATCH_BYTES`; a longer message goes alone."""
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
    """Estimate the size of a message, rather too high than too low."""
    size = 128
    if isinstance(message, Open | Commit):
        size += 4 * len(message.token_ids)
    if isinstance(message, Open):
        size += 16 * len(message.sampling.logit_bias) + MAX_SOURCE_BYTES * (message.sampling.grammar is not None)
    return size
