"""The engine's end of features streams: rings that are mapped, features that are read, and the drafter's matrix."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from draft_service.frames import (
    AskProjection,
    FeaturesFromDoor,
    FeaturesTaken,
    FeatureStreamDown,
    FeatureStreamReady,
    FeatureStreamUp,
    ProjectionAnswer,
    RingBroken,
)
from outrider.drafting.base import AnyDrafter
from outrider.drafting.model.features import MemoryMapper, RingReader, map_ring, with_rows
from outrider.errors import raise_device_failure
from outrider.host.frames import FeaturePieces
from outrider.host.worker import Pipe
from outrider.logs import get_logger
from outrider.protocol.speculation import MAX_FEATURE_BYTES, Features, ProjectionPart

_logger = get_logger(__name__)

Apply = Callable[[int, Sequence[Features]], None]
"""Takes a session's number and features of it, in order."""


class _Stream:
    """A features stream. Its ring is mapped on a thread, since enabling access between two devices takes a while."""

    def __init__(self, up: FeatureStreamUp, mapper: MemoryMapper | None) -> None:
        """`mapper`: maps the ring; None where there is none, or where it cannot be mapped."""
        self.up = up
        self.ring: RingReader | None = None
        """None until it is mapped, and where it cannot be."""
        self.ended = False
        self._thread = threading.Thread(target=self._map, args=(mapper,), name="map-ring", daemon=True)
        if mapper is not None:
            self._thread.start()

    @property
    def mapping(self) -> bool:
        """Whether its ring is being mapped."""
        return self._thread.is_alive()

    def _map(self, mapper: MemoryMapper) -> None:
        try:
            if self.up.begin.ring is not None:
                self.ring = map_ring(self.up.begin.ring, mapper)
        except Exception as error:
            _logger.error("features travel in messages: a ring could not be mapped", exc_info=error)


class FeatureReceiver:
    """Answers the door's frames about features. The engine's thread alone uses it."""

    def __init__(
        self, pipe: Pipe[FeaturesFromDoor], drafter: AnyDrafter, mapper: MemoryMapper | None, apply: Apply, fail: Apply
    ) -> None:
        """`apply` gets features with their rows, `fail` those whose rows could not be read."""
        self._pipe = pipe
        self._drafter = drafter
        self._mapper = mapper
        self._apply = apply
        self._fail = fail
        self._streams: dict[int, _Stream] = {}
        self._mapping: list[_Stream] = []

    @property
    def mapping(self) -> bool:
        """Whether a ring is being mapped, which `report_mapped` looks after."""
        return bool(self._mapping)

    def handle(self, frame: FeaturesFromDoor) -> None:
        """One frame, in the order of arrival."""
        match frame:
            case FeaturePieces():
                self._take(frame)
            case FeatureStreamUp():
                self._begin(frame)
            case FeatureStreamDown():
                stream = self._streams.pop(frame.session)
                stream.ended = True
                if stream.ring is not None and stream not in self._mapping:
                    stream.ring.close()
            case AskProjection():
                self._send_projection(frame)

    def report_mapped(self) -> None:
        """Tell the door of rings that have been mapped meanwhile."""
        for stream in [stream for stream in self._mapping if not stream.mapping]:
            self._mapping.remove(stream)
            if not stream.ended:
                self._pipe.send(FeatureStreamReady(stream.up.session, stream.ring is not None))
            elif stream.ring is not None:
                stream.ring.close()

    def _begin(self, up: FeatureStreamUp) -> None:
        mapper = self._mapper if up.begin.ring is not None else None
        stream = self._streams[up.session] = _Stream(up, mapper)
        if mapper is not None:
            self._mapping.append(stream)
        elif up.begin.ring is not None:
            self._pipe.send(FeatureStreamReady(up.session, False))

    def take_on_line(self, session: int, features: Sequence[Features]) -> None:
        """Features that a line told of, past the door; those of a stream that has ended are of no use."""
        if (stream := self._streams.get(session)) is not None:
            begin = stream.up.begin
            self._read(stream, [replace(one, dtype=begin.dtype, projected=begin.projected) for one in features])

    def _take(self, frame: FeaturePieces) -> None:
        self._read(self._streams[frame.session], frame.features)
        self._pipe.send(FeaturesTaken(frame.session))

    def _read(self, stream: _Stream, features: Sequence[Features]) -> None:
        ring, session, row_bytes = stream.ring, stream.up.session, stream.up.begin.row_bytes
        try:
            self._apply(session, with_rows(features, row_bytes, ring.read if ring is not None else None))
        except Exception as error:
            raise_device_failure(error)
            _logger.error("features could not be read", exc_info=error)
            self._fail(session, features)
        if ring is not None and ring.broken:
            self._pipe.send(RingBroken(session))

    def _send_projection(self, frame: AskProjection) -> None:
        matrix = self._drafter.needs.projection
        if matrix is None:  # the door has seen to it
            return
        data = memoryview(matrix.data).cast("B")
        piece = bytes(data[frame.offset : frame.offset + MAX_FEATURE_BYTES])
        part = ProjectionPart(matrix.num_columns, matrix.dtype, frame.offset, piece)
        self._pipe.send(ProjectionAnswer(frame.session, part, len(data)))
