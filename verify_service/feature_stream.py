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
from outrider.v1 import draft_pb2, draft_pb2_grpc

log = get_logger(__name__)

FeaturesCall = grpc.aio.StreamStreamCall[draft_pb2.DraftServiceFeaturesRequest, draft_pb2.DraftServiceFeaturesResponse]


class FeatureStream:
    """Sends features and hears of releases until cancelled.

    What waits here is bounded by its sender, which counts what the draft has not released.
    """

    def __init__(
        self, address: str, begin: FeaturesBegin, opened: Callable[[int], None], released: Callable[[int], None]
    ) -> None:
        """`opened` is told of the window that the draft allows, `released` of the last message that it is done with."""
        self._address = address
        self._begin = begin
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
            if not isinstance(accept, FeaturesAccept) or accept.uses_ring or accept.projects:
                raise InvalidRequestError("event", "is not what accepts this stream")
            self._opened(accept.window)
            writer = asyncio.create_task(self._write(call))
            writer.add_done_callback(lambda _: call.cancel())
            try:
                while (response := _read(await call.read())) is not None:
                    if isinstance(response, FeaturesAccept):
                        raise InvalidRequestError("event", "accepts the stream again")
                    self._released(response.through)
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
        except (grpc.aio.AioRpcError, InvalidRequestError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error.message
            log.warning("the features stream to draft %s failed: %s", self._address, reason)
        finally:
            await channel.close()

    async def _write(self, call: FeaturesCall) -> None:
        while True:
            await call.write(encode_features(await self._queue.get()))


def _read(message: object) -> FeaturesAccept | FeaturesReleased | None:
    """What came in; None at the stream's end. Raises InvalidRequestError for what is no message of it."""
    if message is grpc.aio.EOF:
        return None
    if message is None:  # grpc hands out None for bytes that are no message
        raise InvalidRequestError("event", "is no message")
    return decode_response(cast(draft_pb2.DraftServiceFeaturesResponse, message))
