"""The features stream of one session, dialled. It has a connection of its own, so that no commit waits behind it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

import grpc

from outrider.errors import InvalidRequestError
from outrider.logs import get_logger
from outrider.protocol.feature_codec import decode_response, encode_batch, encode_begin, encode_features
from outrider.protocol.messages import (
    FEATURE_ITEM_BYTES,
    MAX_FEATURE_BYTES,
    MAX_FEATURE_PIECES,
    Features,
    FeaturesAccept,
    FeaturesBegin,
    FeaturesReleased,
)
from outrider.rpc.channel import open_channel
from outrider.tree.projection import ProjectionPart, ProjectionReader
from outrider.v1 import draft_pb2, draft_pb2_grpc

log = get_logger(__name__)

FeaturesCall = grpc.aio.StreamStreamCall[draft_pb2.DraftServiceFeaturesRequest, draft_pb2.DraftServiceFeaturesResponse]

Dial = Callable[[str], grpc.aio.Channel]
"""Opens a channel to an address."""
Opened = Callable[[int, bool], None]
PassOn = Callable[[ProjectionPart], Awaitable[None]]


class FeatureStream:
    """Sends features and hears of releases until cancelled. What waits when it writes shares a message.

    What waits here is bounded by its sender, which counts what the draft has not released; so nothing may be released
    that was not written yet.
    """

    def __init__(
        self,
        address: str,
        begin: FeaturesBegin,
        reader: ProjectionReader | None,
        pass_on: PassOn,
        opened: Opened,
        released: Callable[[int], None],
        dial: Dial = open_channel,
    ) -> None:
        """`reader` checks the parts of the projection, if `begin` wants it; `pass_on` gets them, one at a time.

        `opened` is told of the window that the draft allows and whether it uses the ring, when the projection is whole;
        `released` of the last message that the draft is done with.
        """
        self._address = address
        self._dial = dial
        self._begin = begin
        self._reader = reader
        self._pass_on = pass_on
        self._opened = opened
        self._released = released
        self._written = 0
        """Number of the last features that the draft may have seen."""
        self._row_bytes = begin.width * FEATURE_ITEM_BYTES[begin.dtype]
        self._most_pieces = 1
        """Of a message."""
        self._queue: deque[Features] = deque()
        self._filled = asyncio.Event()

    def send(self, messages: list[Features]) -> None:
        """Queue features, in order."""
        self._queue.extend(messages)
        self._filled.set()

    async def run(self) -> None:
        """Open the stream and serve it until either side ends it. Returns with a word in the log if the draft does."""
        channel = self._dial(self._address)
        try:
            call: FeaturesCall = draft_pb2_grpc.DraftServiceStub(channel).Features()
            await call.write(encode_begin(self._begin))
            accept = _read(await call.read())
            if not isinstance(accept, FeaturesAccept) or not self._fits(accept):
                raise InvalidRequestError("event", "is not what accepts this stream")
            if self._reader is not None:
                await self._read_projection(call, self._reader)
            self._most_pieces = MAX_FEATURE_PIECES if accept.takes_batches else 1
            self._opened(accept.window, accept.uses_ring)
            writer = asyncio.create_task(self._write(call))
            writer.add_done_callback(lambda _: call.cancel())
            try:
                while (response := _read(await call.read())) is not None:
                    if not isinstance(response, FeaturesReleased):
                        raise InvalidRequestError("event", "belongs to the beginning of the stream")
                    if response.through > self._written:
                        problem = f"{response.through} was not sent yet, {self._written} is the last that was"
                        raise InvalidRequestError("released.through", problem)
                    self._released(response.through)
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
        except (grpc.aio.AioRpcError, InvalidRequestError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error.message
            log.warning("the features stream to draft %s failed: %s", self._address, reason)
        finally:
            await channel.close()

    def _fits(self, accept: FeaturesAccept) -> bool:
        """Whether the draft has agreed to no more and no less than it was asked for."""
        return accept.projects == (self._reader is not None) and (self._begin.ring is not None or not accept.uses_ring)

    async def _read_projection(self, call: FeaturesCall, reader: ProjectionReader) -> None:
        whole = False
        while not whole:
            part = _read(await call.read())
            if not isinstance(part, ProjectionPart):
                raise InvalidRequestError("event", "is no part of the projection that is missing")
            whole = reader.take(part)
            await self._pass_on(part)

    async def _write(self, call: FeaturesCall) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._queue:
                batch = self._next_batch()
                self._written = batch[-1].sequence
                await call.write(encode_features(batch[0]) if len(batch) == 1 else encode_batch(batch))

    def _next_batch(self) -> list[Features]:
        """What goes out next: a round's features for all requests, as a rule."""
        batch = [self._queue.popleft()]
        room = MAX_FEATURE_BYTES // self._row_bytes - batch[0].count
        while self._queue and len(batch) < self._most_pieces and self._queue[0].count <= room:
            room -= self._queue[0].count
            batch.append(self._queue.popleft())
        return batch


def _read(message: object) -> FeaturesAccept | FeaturesReleased | ProjectionPart | None:
    """What came in; None at the stream's end. Raises InvalidRequestError for what is no message of it."""
    if message is grpc.aio.EOF:
        return None
    if message is None:  # grpc hands out None for bytes that are no message
        raise InvalidRequestError("event", "is no message")
    return decode_response(cast(draft_pb2.DraftServiceFeaturesResponse, message))
