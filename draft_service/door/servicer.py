"""The door of the draft service."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from msgspec.structs import replace

from draft_service.door.metrics import DraftMetrics
from draft_service.door.remote import FeatureStream, RemoteDraftEngine, RemoteFeatures, VerifySession
from draft_service.frames import DrafterProfile, SessionUp
from outrider import __version__
from outrider.config.draft import DraftOptions
from outrider.drafting.registry import named_drafters
from outrider.errors import InvalidRequestError, OutriderError, OverloadedError
from outrider.logs import get_logger
from outrider.protocol.speculation import (
    Decline,
    DeclineReason,
    FeaturesAccept,
    FeaturesBegin,
    FeaturesReleased,
    Hello,
    VerifyMessage,
)
from outrider.protocol.speculation_codec import (
    decode_begin,
    decode_pieces,
    decode_verify,
    encode_draft,
    encode_response,
    in_parts,
)
from outrider.tree.handshake import HandshakeError, agree
from outrider.v1 import draft_pb2, draft_pb2_grpc

_MAX_BROKEN_RINGS = 64

_logger = get_logger(__name__)

MessageT = TypeVar("MessageT")

_Context = grpc.aio.ServicerContext[draft_pb2.DraftServiceSpeculateRequest, draft_pb2.DraftServiceSpeculateResponse]
_FeaturesContext = grpc.aio.ServicerContext[
    draft_pb2.DraftServiceFeaturesRequest, draft_pb2.DraftServiceFeaturesResponse
]


@dataclass(eq=False, repr=False)
class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves speculation streams, features streams, and information about the drafter."""

    engine: RemoteDraftEngine
    features: RemoteFeatures
    profile: DrafterProfile
    options: DraftOptions
    metrics: DraftMetrics
    _broken_rings: deque[bytes] = field(default_factory=lambda: deque(maxlen=_MAX_BROKEN_RINGS))
    """Handles of rings that could not be read."""
    _sessions: set[VerifySession] = field(default_factory=set)
    _awaiting: dict[str, VerifySession] = field(default_factory=dict)
    """Sessions whose features stream has not begun, by their tokens."""
    _target: SessionUp | None = None

    @property
    def num_sessions(self) -> int:
        """Number of streams that have sent their Hello."""
        return len(self._sessions)

    async def Speculate(self, request_iterator: object, context: _Context) -> None:
        """Serve one verify replica until either side ends the stream."""
        hello, rest = _split_hello(await context.read())
        ours, up = answer_hello(hello, self.profile, self.options)
        session = self._begin(hello, up)
        try:
            if ours.features_token:
                self._awaiting[ours.features_token] = session
            await context.write(encode_draft([ours]))
            await _until_first(self._read(session, rest, context), _write(session, context), session.over())
        finally:
            session.end()
            self._awaiting.pop(ours.features_token, None)
            self._sessions.discard(session)
            self.engine.detach(session)
            _logger.info("session of %s ended, %d left", hello.model or "a verify service", len(self._sessions))

    async def Features(self, request_iterator: object, context: _FeaturesContext) -> None:
        """Take the features of one session until the session or the stream ends."""
        first: object = await context.read()
        if not isinstance(first, draft_pb2.DraftServiceFeaturesRequest):
            raise InvalidRequestError("event", "is missing", "begin the stream with a begin")
        begin = decode_begin(first)
        self._check_features(begin)
        session = self._awaiting.pop(begin.token, None)
        if session is None:
            raise InvalidRequestError("begin.token", "names no session that waits for features")
        ring = begin.ring
        if not self.profile.maps_memory or (ring is not None and ring.handle in self._broken_rings):
            begin = replace(begin, ring=None)
        stream = await self.features.open(session.number, begin)
        if not stream.uses_ring:
            begin = replace(begin, ring=None)
        try:
            accept = FeaturesAccept(stream.uses_ring, projects=begin.wants_projection, takes_batches=True)
            await context.write(encode_response(accept))
            await _until_first(
                self._read_features(stream, begin, context),
                _write_features(stream, context, with_projection=begin.wants_projection),
                _ended(session),
            )
        finally:
            if stream.broken and ring is not None:
                # Verify will dial again; the new session then does without this ring.
                self._broken_rings.append(ring.handle)
            stream.close()

    async def GetInfo(
        self, request: draft_pb2.DraftServiceGetInfoRequest, context: object
    ) -> draft_pb2.DraftServiceGetInfoResponse:
        """Describe the drafter and its load."""
        state = await self.engine.ask()
        return draft_pb2.DraftServiceGetInfoResponse(
            sources=self.profile.hello.sources,
            num_requests=state.num_requests,
            num_sessions=len(self._sessions),
            num_nodes=state.num_nodes,
            version=__version__,
        )

    def _begin(self, hello: Hello, up: SessionUp) -> VerifySession:
        if len(self._sessions) >= self.options.max_sessions:
            raise OverloadedError(
                f"{self.options.max_sessions} verify services are connected, which is the limit; raise --max-sessions"
            )
        if self._sessions and self._target is not None:
            check_same_target(up, self._target)
        self._target = up
        session = VerifySession(self.options.max_queued)
        self.engine.attach(session, up)
        self._sessions.add(session)
        _logger.info("session of %s began, %d in all", hello.model or "a verify service", len(self._sessions))
        return session

    def _check_features(self, begin: FeaturesBegin) -> None:
        ours = self.profile.hello
        width = len(ours.feature_layers) * ours.hidden_size
        if begin.projected:
            if not ours.projection_hash:
                raise HandshakeError("begin.projected: verify sends products, the drafter offers no projection")
            width = ours.projection_columns
        for name, theirs, wanted in (("layers", begin.layers, ours.feature_layers), ("width", begin.width, width)):
            if theirs != wanted:
                raise HandshakeError(f"begin.{name}: verify sends {theirs!r}, the drafter takes {wanted!r}")

    async def _read_features(self, stream: FeatureStream, begin: FeaturesBegin, context: _FeaturesContext) -> None:
        ring_bytes = begin.ring.num_bytes if begin.ring is not None else 0
        async for message in self._messages(context, draft_pb2.DraftServiceFeaturesRequest):
            num_dropped = await stream.submit(decode_pieces(message, begin, ring_bytes))
            self.metrics.dropped["malformed"].inc(num_dropped)

    async def _read(self, session: VerifySession, first: list[draft_pb2.VerifyEvent], context: _Context) -> None:
        await self._hand_over(session, draft_pb2.DraftServiceSpeculateRequest(events=first))
        async for batch in self._messages(context, draft_pb2.DraftServiceSpeculateRequest):
            await self._hand_over(session, batch)

    async def _messages(
        self, context: grpc.aio.ServicerContext[Any, Any], kind: type[MessageT]
    ) -> AsyncIterator[MessageT]:
        """Yield messages until the stream ends. Count undecodable bytes: they name no request to decline."""
        while True:
            try:
                message: object = await context.read()
            except InvalidRequestError:
                self.metrics.dropped["malformed"].inc()
                continue
            if not isinstance(message, kind):  # the end of the stream
                return
            yield message

    async def _hand_over(self, session: VerifySession, batch: draft_pb2.DraftServiceSpeculateRequest) -> None:
        for part in in_parts(batch):
            try:
                messages = decode_verify(part)
            except InvalidRequestError:
                messages = self._decode_each(session, part)
            if messages:
                # Read no stream faster than the engine works.
                await self.engine.writable()
                self.engine.submit(session, messages)
            await asyncio.sleep(0)  # let other sessions run

    def _decode_each(
        self, session: VerifySession, batch: draft_pb2.DraftServiceSpeculateRequest
    ) -> list[VerifyMessage]:
        """Decode the events one by one, and decline the requests of malformed ones."""
        messages: list[VerifyMessage] = []
        for event in batch.events:
            try:
                messages += decode_verify(draft_pb2.DraftServiceSpeculateRequest(events=[event]))
            except InvalidRequestError as error:
                self.metrics.dropped["malformed"].inc()
                self.metrics.declines[DeclineReason.INVALID].inc()
                session.send([Decline(_request_of(event), DeclineReason.INVALID, False, error.message)])
        return messages


def answer_hello(theirs: Hello, profile: DrafterProfile, options: DraftOptions) -> tuple[Hello, SessionUp]:
    """Return our Hello to a verify service, and its session, which has no number yet. Raises what `agree` raises.

    If the draft model does not fit the target, only those drafters guess that work with any target.
    """
    offered, parts = profile.hello, None
    line = None if offered.line is None else replace(offered.line, token=secrets.token_hex(16))
    # The features stream also names its session by a token.
    ours = replace(offered, features_token=secrets.token_hex(16) if offered.feature_layers else "", line=line)
    try:
        terms = agree(theirs, ours)
    except HandshakeError as error:
        if not profile.any_target_drafters:
            raise
        parts = profile.any_target_drafters
        names = "+".join(name for number, name in enumerate(named_drafters(options)) if number in parts)
        # The sources of all drafters: a node names its source by the index in this list.
        ours = Hello(
            offered.protocol_version,
            offered.noise_version,
            names,
            max_positions=options.max_positions,
            sources=offered.sources,
            line=line,
        )
        terms = agree(theirs, ours)
        _logger.warning(
            "only %s drafts for %s, which %s does not fit: %s",
            *(names, theirs.model or "this target", offered.model, error.message),
        )
    return ours, SessionUp(0, terms.vocab_size, theirs.token_ids_hash, parts, line.token if line else "")


def check_same_target(target: SessionUp, served: SessionUp) -> None:
    """Raise HandshakeError if the target of a new session is not the one that is `served` now."""
    for name in ("vocab_size", "token_ids_hash"):
        theirs, ours = getattr(target, name), getattr(served, name)
        if theirs != ours:
            raise HandshakeError(
                f"hello.{name}: verify has {theirs!r}, the draft service has {ours!r}; use a draft service for each "
                "target, and verify services of one release"
            )


def _split_hello(batch: object) -> tuple[Hello, list[draft_pb2.VerifyEvent]]:
    """Return the Hello that a stream begins with, and the events after it."""
    if isinstance(batch, draft_pb2.DraftServiceSpeculateRequest) and batch.events:
        hello = decode_verify(draft_pb2.DraftServiceSpeculateRequest(events=batch.events[:1]))[0]
        if isinstance(hello, Hello):
            return hello, list(batch.events[1:])
    raise InvalidRequestError("events[0]", "is no hello", "begin the stream with one")


def _request_of(event: draft_pb2.VerifyEvent) -> int:
    """Return the number of the request that an event names, 0 if none."""
    kind = event.WhichOneof("event")
    return int(getattr(getattr(event, kind), "request", 0)) if kind else 0


async def _write(session: VerifySession, context: _Context) -> None:
    while True:
        if answers := await session.next_answers():
            await context.write(encode_draft(answers))


async def _ended(session: VerifySession) -> None:
    """Wait until the session ends; its own stream reports the reason."""
    with suppress(OutriderError):
        await session.over()


async def _write_features(stream: FeatureStream, context: _FeaturesContext, *, with_projection: bool) -> None:
    """Send the projection if `with_projection`, then each release of features."""
    offset, whole = 0, not with_projection
    while not whole:
        part, whole = await stream.projection_part(offset)
        await context.write(encode_response(part))
        offset += len(part.data)
    while True:
        await context.write(encode_response(FeaturesReleased(await stream.next_release())))


async def _until_first(*work: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until the first one ends, and cancel the others. Raises what the first one raised."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
