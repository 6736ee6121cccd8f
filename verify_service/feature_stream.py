"""The features stream of one session, dialled. It has a connection of its own, so that no commit waits behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import grpc

from outrider.errors import InvalidRequestError
from outrider.logs import get_logger
from outrider.rpc.channel import open_channel
from outrider.rpc.feature_codec import decode_response, encode_begin, encode_features
from outrider.tree.messages import Features, FeaturesAccept, FeaturesBegin, FeaturesReleased
from outrider.tree.projection import Projection, ProjectionPart, ProjectionReader
from outrider.v1 import draft_pb2, draft_pb2_grpc

log = get_logger(__name__)

FeaturesCall = grpc.aio.StreamStreamCall[draft_pb2.DraftServiceFeaturesRequest, draft_pb2.DraftServiceFeaturesResponse]

Opened = Callable[[int, bool, Projection | None], None]


class FeatureStream:
    """Sends features and hears of releases until cancelled.

    What waits here is bounded by its sender, which counts what the draft has not released.
    """

    def __init__(
        self,
        address: str,
        begin: FeaturesBegin,
        reader: ProjectionReader | None,
        opened: Opened,
        released: Callable[[int], None],
    ) -> None:
        """`reader` takes the projection in, if `begin` wants it.

        `opened` is told of the window that the draft allows, whether it uses the ring, and the projection; `released`
        of the last message that the draft is done with.
        """
        self._address = address
        self._begin = begin
        self._reader = reader
        self._opened = opened
        self._released = released
        self._queue: asyncio.Queue[Features] = asyncio.Queue()

    def send(self, messages: list[Features]) -> None:
        """Queue features, in order."""
        for message in messages:
            self._queue.put_nowait(message)

    async def run(self) -> None:
        """Open the stream and serve it until either side ends it. Returns with a word in the log if the draft does."""
        channel = open_channel(self._address)
        try:
            call: FeaturesCall = draft_pb2_grpc.DraftServiceStub(channel).Features()
            await call.write(encode_begin(self._begin))
            accept = _read(await call.read())
            if not isinstance(accept, FeaturesAccept) or not self._fits(accept):
                raise InvalidRequestError("event", "is not what accepts this stream")
            projection = await self._read_projection(call, self._reader) if self._reader is not None else None
            self._opened(accept.window, accept.uses_ring, projection)
            writer = asyncio.create_task(self._write(call))
            writer.add_done_callback(lambda _: call.cancel())
            try:
                while (response := _read(await call.read())) is not None:
                    if not isinstance(response, FeaturesReleased):
                        raise InvalidRequestError("event", "belongs to the beginning of the stream")
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

    async def _read_projection(self, call: FeaturesCall, reader: ProjectionReader) -> Projection:
        while True:
            part = _read(await call.read())
            if not isinstance(part, ProjectionPart):
                raise InvalidRequestError("event", "is no part of the projection that is missing")
            if (projection := reader.take(part)) is not None:
                return projection

    async def _write(self, call: FeaturesCall) -> None:
        while True:
            await call.write(encode_features(await self._queue.get()))


def _read(message: object) -> FeaturesAccept | FeaturesReleased | ProjectionPart | None:
    """What came in; None at the stream's end. Raises InvalidRequestError for what is no message of it."""
    if message is grpc.aio.EOF:
        return None
    if message is None:  # grpc hands out None for bytes that are no message
        raise InvalidRequestError("event", "is no message")
    return decode_response(cast(draft_pb2.DraftServiceFeaturesResponse, message))
