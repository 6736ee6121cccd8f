"""Where the engine finds what the door sends: trees' messages first, features when there are none."""

from __future__ import annotations

import select
from collections import deque

from draft_service.engine.lines import HeardOnLine, VerifyLines
from draft_service.frames import FeaturesFromDoor, FromDoor, SessionDown, SessionUp, Stop
from outrider.host.line import Listener
from outrider.host.pipe import Pipe


class DraftInbox:
    """Frames on both sockets to the door. The engine's thread alone uses it.

    A door that is gone, or that says what makes no sense, has `Stop` as its last word.
    """

    def __init__(
        self, pipe: Pipe[FromDoor], features: Pipe[FeaturesFromDoor], listener: Listener | None = None
    ) -> None:
        """`listener`: where verify engines of this host call."""
        self.stopped = False
        """Whether the door asked for the end."""
        self.ended: set[int] = set()
        """Sessions whose end has come and was not handled yet: what they sent before is not worth handling."""
        self._pipe = pipe
        self._features = features
        self._arrived: deque[FromDoor | HeardOnLine] = deque()
        self._arrived_features: deque[FeaturesFromDoor] = deque()
        self._over = False
        self._poll = select.poll()
        self._poll.register(pipe.fileno(), select.POLLIN)
        self._poll.register(features.fileno(), select.POLLIN)
        self.lines = VerifyLines(listener, self._poll)

    def waiting(self) -> bool:
        """Whether something has come, without taking it: about a microsecond."""
        return bool(self._arrived or self._arrived_features or (not self._over and self._poll.poll(0)))

    def next(self) -> FromDoor | FeaturesFromDoor | HeardOnLine | None:
        """The next frame; None if there is none now. Features come when nothing else does."""
        if not self._arrived and not self._over and self._poll.poll(0):
            self._receive()
        if self._arrived:
            return self._arrived.popleft()
        return self._arrived_features.popleft() if self._arrived_features else None

    def wait(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds, None for ever, until something comes or an unsent rest can go."""
        if self._arrived or self._arrived_features or self._over:
            return
        pipes = (self._pipe, self._features)
        select.select([*pipes, *self.lines.files()], [pipe for pipe in pipes if pipe.backlog], [], timeout)
        for pipe in pipes:
            pipe.flush()
        self.lines.flush()

    def _receive(self) -> None:
        # In this order: the door has told of a session before anybody can call for it.
        self.lines.answer()
        frames = self._pipe.receive_from("the door")
        self._arrived += frames
        for frame in frames:
            if isinstance(frame, SessionUp):
                self.lines.expect(frame.session, frame.line_token)
            elif isinstance(frame, SessionDown):
                self.lines.forget(frame.session)
                self.ended.add(frame.session)
        self._arrived += self.lines.take()
        # Those that came before are done first, so they are read no faster than they are done.
        if not self._arrived_features:
            self._arrived_features += self._features.receive_from("the door")
        if any(isinstance(frame, Stop) for frame in frames):
            self.stopped = self._over = True
        elif self._pipe.closed or self._features.closed:
            self._over = True
            self._arrived.append(Stop())
