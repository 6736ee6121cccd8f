"""The engine's end of features streams: rings that are mapped, features that are read, and the drafter's matrix."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draft_service.frames import (
    AskMatrix,
    FeaturesFromDoor,
    MatrixPart,
    Pieces,
    StreamDown,
    StreamReady,
    StreamUp,
    Taken,
)
from outrider.drafting.base import AnyDrafter
from outrider.drafting.model.features import MemoryMapper, RingReader, map_ring, with_rows
from outrider.errors import raise_device_failure
from outrider.host.pipe import Pipe
from outrider.logs import get_logger
from outrider.protocol.speculation import MAX_FEATURE_BYTES, Features, ProjectionPart

_logger = get_logger(__name__)

Apply = Callable[[int, Sequence[Features]], None]
"""Features for a session, in order."""
Fail = Callable[[int, Sequence[Features]], None]
"""Features of a session that could not be read."""


@dataclass(slots=True)
class _Stream:
    """A features stream; its ring is None where it has none, or none any more."""

    up: StreamUp
    ring: RingReader | None = None


class _Mapping:
    """A ring that is being mapped on a thread: enabling access between two devices takes a while."""

    def __init__(self, up: StreamUp, mapper: MemoryMapper) -> None:
        self.stream = up.stream
        self.ring: RingReader | None = None
        self._up = up
        self._mapper = mapper
        self._thread = threading.Thread(target=self._run, name="map-ring", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has been mapped, or cannot be."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            ring = self._up.begin.ring
            self.ring = None if ring is None else map_ring(ring, self._mapper)
        except Exception as error:
            _logger.error("features travel in messages: a ring could not be mapped", exc_info=error)


class FeatureInlet:
    """Answers the door's frames about features. The engine's thread alone uses it."""

    def __init__(
        self, pipe: Pipe[FeaturesFromDoor], drafter: AnyDrafter, mapper: MemoryMapper | None, apply: Apply, fail: Fail
    ) -> None:
        self._pipe = pipe
        self._drafter = drafter
        self._mapper = mapper
        self._apply = apply
        self._fail = fail
        self._streams: dict[int, _Stream] = {}
        self._mappings: list[_Mapping] = []

    @property
    def mapping(self) -> bool:
        """Whether a ring is being mapped, which `settle` looks after."""
        return bool(self._mappings)

    def handle(self, frame: FeaturesFromDoor) -> None:
        """One frame, in the order of arrival."""
        match frame:
            case Pieces():
                self._take(frame)
            case StreamUp():
                self._begin(frame)
            case StreamDown():
                ended = self._streams.pop(frame.stream)
                if ended.ring is not None:
                    ended.ring.close()
            case AskMatrix():
                self._send_matrix(frame)

    def settle(self) -> None:
        """Tell of rings that have been mapped meanwhile."""
        for mapping in [mapping for mapping in self._mappings if mapping.done]:
            self._mappings.remove(mapping)
            stream = self._streams.get(mapping.stream)
            if stream is not None:
                stream.ring = mapping.ring
                self._pipe.send(StreamReady(mapping.stream, mapping.ring is not None))
            elif mapping.ring is not None:
                mapping.ring.close()

    def _begin(self, up: StreamUp) -> None:
        self._streams[up.stream] = _Stream(up)
        if up.begin.ring is None:
            return
        if self._mapper is None:
            self._pipe.send(StreamReady(up.stream, False))
        else:
            self._mappings.append(_Mapping(up, self._mapper))

    def _take(self, frame: Pieces) -> None:
        stream = self._streams[frame.stream]
        ring, session, row_bytes = stream.ring, stream.up.session, stream.up.begin.row_bytes
        try:
            self._apply(session, with_rows(frame.features, row_bytes, ring.read if ring is not None else None))
        except Exception as error:
            raise_device_failure(error)
            _logger.error("features could not be read", exc_info=error)
            self._fail(session, frame.features)
        self._pipe.send(Taken(frame.stream, ring is not None and ring.broken))

    def _send_matrix(self, frame: AskMatrix) -> None:
        matrix = self._drafter.needs.projection
        if matrix is None:  # the door has seen to it
            return
        data = memoryview(matrix.data).cast("B")
        piece = bytes(data[frame.offset : frame.offset + MAX_FEATURE_BYTES])
        part = ProjectionPart(matrix.num_columns, matrix.dtype, frame.offset, piece)
        self._pipe.send(MatrixPart(frame.stream, part, len(data)))
