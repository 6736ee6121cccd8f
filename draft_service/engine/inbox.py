"""The draft engine's input: the door's frames from two sockets, verify engines' frames from lines, and features."""

from __future__ import annotations

import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from msgspec.structs import replace

from draft_service.frames import (
    AskProjection,
    FeaturesFromDoor,
    FeaturesTaken,
    FeatureStreamDown,
    FeatureStreamReady,
    FeatureStreamUp,
    FromDoor,
    ProjectionAnswer,
    RingBroken,
    SessionUp,
)
from outrider.drafting.base import AnyDrafter
from outrider.drafting.model.features import MemoryMapper, RingReader, map_ring, with_rows
from outrider.errors import raise_device_failure
from outrider.host.frames import FeaturePieces, FromVerify, SessionDown, Stop
from outrider.host.line import DraftBatch, Line, LineHello, Listener, OnLine, VerifyBatch
from outrider.host.worker import Pipe, wait_for_any
from outrider.logs import get_logger
from outrider.protocol.speculation import MAX_FEATURE_BYTES, DraftMessage, FeatureRing, Features, ProjectionPart

_logger = get_logger(__name__)

_HELLO_SECONDS = 5.0
"""How long a new line may take to name its session."""
_VERIFY = "a verify service on this host"
_MAX_UNNAMED_LINES = 64
"""Most lines that may be open without a session."""

_VerifyLine = Line[OnLine]


class LineFeatures(NamedTuple):
    """Features in a ring that a line announced; whoever takes them must release them on that line."""

    session: int
    features: list[Features]


class VerifyLines:
    """The draft's ends of all lines, registered with the inbox's poll object. Used by one thread."""

    def __init__(self, listener: Listener | None, poll: select.poll) -> None:
        self.lost: list[int] = []
        """Sessions whose line is gone, which the door does not know yet."""
        self.listener = listener
        self._poll = poll
        self._expected: dict[str, int] = {}
        """Sessions without a line, by the token that names them."""
        self._unnamed: dict[_VerifyLine, float] = {}
        """Lines whose session is not known yet, and when they were accepted, on the monotonic clock."""
        self._lines: dict[int, _VerifyLine] = {}
        """Lines by session."""
        self._released: dict[int, int] = {}
        """By session, the number of the last released features whose release was not sent to verify yet."""
        if listener is not None:
            poll.register(listener.fileno(), select.POLLIN)

    def open_lines(self) -> list[_VerifyLine]:
        """Return all lines, with or without a session."""
        return [*self._unnamed, *self._lines.values()]

    def expect(self, session: int, token: str) -> None:
        """Expect a line with this token for a new session; with an empty token, expect none."""
        if token:
            self._expected[token] = session

    def forget(self, session: int) -> None:
        """Close the line of a session that has ended."""
        self._expected = {token: number for token, number in self._expected.items() if number != session}
        self._released.pop(session, None)
        line = self._lines.pop(session, None)
        if line is not None:
            self._close(line)

    def accept(self) -> list[tuple[_VerifyLine, list[OnLine]]]:
        """Accept new lines; return those without a session, with what has arrived on them. Afterwards call `expect` for
        each session known by then, and only then `take`."""
        for line in [] if self.listener is None else self.listener.accept():
            self._unnamed[line] = monotonic()
            self._poll.register(line.fileno(), select.POLLIN)
        return [(line, line.receive_from(_VERIFY)) for line in self._unnamed]

    def take(self, unnamed: Sequence[tuple[_VerifyLine, list[OnLine]]]) -> list[FromVerify | LineFeatures]:
        """Return everything that has arrived, without waiting. `unnamed`: what `accept` has returned."""
        received: list[FromVerify | LineFeatures] = []
        for line, frames in unnamed:
            self._identify(line, frames, received)
        for session, line in list(self._lines.items()):
            self._read(session, line.receive_from(_VERIFY), received)
            if line.closed:
                self._lose(session)
        return received

    def send(self, session: int, messages: list[DraftMessage]) -> bool:
        """Send messages on the session's line. Return False if it has none."""
        line = self._lines.get(session)
        if line is None:
            return False
        line.send(DraftBatch(messages, self._released.pop(session, 0)))
        if line.closed:
            self._lose(session)
        return True

    def release(self, session: int, through: int) -> None:
        """Release features up to this number; verify learns of it with the next messages, or from `flush`."""
        self._released[session] = through

    def flush(self) -> None:
        """Send pending releases, and the bytes that the kernel did not take before."""
        for session in list(self._released):
            if not self.send(session, []):
                del self._released[session]
        for session, line in list(self._lines.items()):
            if line.backlog:
                line.flush()
                if line.closed:  # at once: a new line may get its descriptor, and would lose its place in the poll
                    self._lose(session)

    def close(self) -> None:
        """Accept no more lines, and close all open ones."""
        for line in self.open_lines():
            line.close()
        if self.listener is not None:
            self.listener.close()

    def _identify(self, line: _VerifyLine, frames: list[OnLine], received: list[FromVerify | LineFeatures]) -> None:
        """Give a line to the session that its first frame names; close the line if it names none in time."""
        session = None
        if frames and isinstance(frames[0], LineHello):
            session = self._expected.pop(frames[0].token, None)
        late = monotonic() - self._unnamed[line] > _HELLO_SECONDS
        if session is not None and not line.closed:
            del self._unnamed[line]
            self._lines[session] = line
            self._read(session, frames[1:], received)
        elif frames or line.closed or late or len(self._unnamed) > _MAX_UNNAMED_LINES:
            del self._unnamed[line]
            self._close(line)

    def _read(self, session: int, frames: list[OnLine], received: list[FromVerify | LineFeatures]) -> None:
        for frame in frames:
            if isinstance(frame, LineHello):
                _logger.error("a verify service on this host named its session twice")
                self._lose(session)
                return
            if isinstance(frame, VerifyBatch):
                received.append(FromVerify(session, frame.messages))
            elif frame.features:
                received.append(LineFeatures(session, frame.features))

    def _lose(self, session: int) -> None:
        self._released.pop(session, None)
        line = self._lines.pop(session, None)
        if line is not None:
            self._close(line)
            self.lost.append(session)

    def _close(self, line: _VerifyLine) -> None:
        self._poll.unregister(line.fileno())
        line.close()


class DraftInbox:
    """Frames from both sockets to the door, and from lines. Used only by the engine's thread.

    If the door is gone or sends garbage, the last frame is a `Stop`.
    """

    def __init__(
        self, pipe: Pipe[FromDoor], features: Pipe[FeaturesFromDoor], listener: Listener | None = None
    ) -> None:
        """`listener` accepts lines from verify engines on this host."""
        self.stopped = False
        """Whether the door sent Stop."""
        self.ended: set[int] = set()
        """Sessions whose end has arrived but is not handled yet: frames still queued for them are ignored."""
        self._pipe = pipe
        self._features = features
        self._arrived: deque[FromDoor] = deque()
        self._arrived_features: deque[FeaturesFromDoor | LineFeatures] = deque()
        self._over = False
        self._poll = select.poll()
        self._poll.register(pipe.fileno(), select.POLLIN)
        self._poll.register(features.fileno(), select.POLLIN)
        self.lines = VerifyLines(listener, self._poll)

    def waiting(self) -> bool:
        """Whether a frame has arrived; takes about a microsecond and does not read it."""
        return bool(self._arrived or self._arrived_features or (not self._over and self._poll.poll(0)))

    def next(self) -> FromDoor | FeaturesFromDoor | LineFeatures | None:
        """Return the next frame, None if there is none now. Features come only when there is nothing else."""
        if not self._arrived and not self._over and self._poll.poll(0):
            self._receive()
        if self._arrived:
            return self._arrived.popleft()
        return self._arrived_features.popleft() if self._arrived_features else None

    def wait(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds (None: forever) until a frame arrives or unsent bytes can be sent."""
        if self._arrived or self._arrived_features or self._over:
            return
        listener = self.lines.listener
        wait_for_any(
            [self._pipe, self._features, *self.lines.open_lines()], timeout, [] if listener is None else [listener]
        )

    def _receive(self) -> None:
        # The order matters: the door has sent the SessionUp of a session before a line of this session can arrive.
        unnamed = self.lines.accept()
        frames = self._pipe.receive_from("the door")
        self._arrived += frames
        for frame in frames:
            if isinstance(frame, SessionUp):
                self.lines.expect(frame.session, frame.line_token)
            elif isinstance(frame, SessionDown):
                self.lines.forget(frame.session)
                self.ended.add(frame.session)
        for one in self.lines.take(unnamed):
            if isinstance(one, LineFeatures):
                self._arrived_features.append(one)
            else:
                self._arrived.append(one)
        # Read more features only when those before are done, so that they are not read faster than they are handled.
        if not self._arrived_features:
            self._arrived_features += self._features.receive_from("the door")
        if any(isinstance(frame, Stop) for frame in frames):
            self.stopped = self._over = True
        elif self._pipe.closed or self._features.closed:
            self._over = True
            self._arrived.append(Stop())


Apply = Callable[[int, Sequence[Features]], None]
"""Takes a session's number and features of this session, in order."""


@dataclass(eq=False, slots=True)
class _Stream:
    """A features stream."""

    up: FeatureStreamUp
    ring: RingReader | None = None
    """None until the ring is mapped, and if it cannot be."""

    def map(self, ring: FeatureRing, mapper: MemoryMapper) -> None:
        """Map the stream's ring; runs on a thread of its own."""
        try:
            self.ring = map_ring(ring, mapper)
        except Exception as error:
            _logger.error("features travel in messages: a ring could not be mapped", exc_info=error)


@dataclass(eq=False, repr=False)
class FeatureReceiver:
    """Answers the door's frames about features. Used only by the engine's thread."""

    pipe: Pipe[FeaturesFromDoor]
    drafter: AnyDrafter
    mapper: MemoryMapper | None
    apply: Apply
    """Called with features and their rows."""
    fail: Apply
    """Called with features whose rows could not be read."""
    _streams: dict[int, _Stream] = field(default_factory=dict)
    _mapping: dict[_Stream, threading.Thread] = field(default_factory=dict)
    """Streams whose rings are being mapped, each on a thread: enabling access between two devices takes a while."""

    @property
    def mapping(self) -> bool:
        """Whether a ring is being mapped; `report_mapped` then has to be called."""
        return bool(self._mapping)

    def handle(self, frame: FeaturesFromDoor) -> None:
        """Handle one frame; frames come in order of arrival."""
        match frame:
            case FeaturePieces():
                self._read(self._streams[frame.session], frame.features)
                self.pipe.send(FeaturesTaken(frame.session))
            case FeatureStreamUp():
                self._begin(frame)
            case FeatureStreamDown():
                stream = self._streams.pop(frame.session)
                if stream.ring is not None and stream not in self._mapping:
                    stream.ring.close()
            case AskProjection():
                self._send_projection(frame)

    def report_mapped(self) -> None:
        """Tell the door which rings have been mapped, or have failed to be, since the last call."""
        for stream in [stream for stream, thread in self._mapping.items() if not thread.is_alive()]:
            del self._mapping[stream]
            if stream.up.session in self._streams:
                self.pipe.send(FeatureStreamReady(stream.up.session, stream.ring is not None))
            elif stream.ring is not None:
                stream.ring.close()

    def _begin(self, up: FeatureStreamUp) -> None:
        stream, ring = _Stream(up), up.begin.ring
        self._streams[up.session] = stream
        if ring is None or self.mapper is None:  # without a mapper the door names no ring
            return
        thread = threading.Thread(target=stream.map, args=(ring, self.mapper), name="map-ring", daemon=True)
        self._mapping[stream] = thread
        thread.start()

    def take_on_line(self, session: int, features: Sequence[Features]) -> None:
        """Apply features that a line announced. Ignore those of a stream that has ended."""
        if (stream := self._streams.get(session)) is not None:
            begin = stream.up.begin
            self._read(stream, [replace(one, dtype=begin.dtype, projected=begin.projected) for one in features])

    def _read(self, stream: _Stream, features: Sequence[Features]) -> None:
        ring, session, row_bytes = stream.ring, stream.up.session, stream.up.begin.row_bytes
        try:
            self.apply(session, with_rows(features, row_bytes, ring.read if ring is not None else None))
        except Exception as error:
            raise_device_failure(error)
            _logger.error("features could not be read", exc_info=error)
            self.fail(session, features)
        if ring is not None and ring.broken:
            self.pipe.send(RingBroken(session))

    def _send_projection(self, frame: AskProjection) -> None:
        matrix = self.drafter.needs.projection
        if matrix is None:  # the door has checked that there is one
            return
        data = memoryview(matrix.data).cast("B")
        piece = bytes(data[frame.offset : frame.offset + MAX_FEATURE_BYTES])
        part = ProjectionPart(matrix.num_columns, matrix.dtype, frame.offset, piece)
        self.pipe.send(ProjectionAnswer(frame.session, part, len(data)))
