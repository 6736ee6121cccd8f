"""Lines to draft engines of this host: what is said of trees goes past both doors."""

from __future__ import annotations

import select
from collections.abc import Callable
from functools import partial
from time import monotonic

from outrider.host.line import DraftBatch, Line, VerifyBatch, dial
from outrider.host.pipe import Pipe
from outrider.logs import get_logger
from outrider.protocol.messages import VerifyMessage
from outrider.protocol.part_codec import pack_verify, unpack_drafts
from outrider.protocol.parts import DraftPart
from verify_service.engine.inbox import Action
from verify_service.engine.reporter import ReporterPort
from verify_service.frames.drafts import DraftReset, DraftUp
from verify_service.frames.messages import FromDoor
from verify_service.speculation.drafts import Drafts

log = get_logger(__name__)


class LinePort(ReporterPort):
    """A draft's session: trees on a line, all else through the door."""

    def __init__(self, session: int, address: str, pipe: Pipe[FromDoor], line: Line[DraftBatch]) -> None:
        super().__init__(session, address, pipe)
        self.line = line

    def send(self, messages: list[VerifyMessage]) -> None:
        """See ReporterPort."""
        self.line.send(VerifyBatch(pack_verify(messages)))


class DraftLines:
    """The engine's ends of all lines. The engine's thread alone uses them.

    A line is read again when what came last was dealt with, so a draft that never stops holds up nobody.
    """

    def __init__(self, pipe: Pipe[FromDoor], drafts: Drafts, post: Callable[[Action], None]) -> None:
        """`pipe`: to the door. `post`: leaves an action for the engine."""
        self._pipe = pipe
        self._drafts = drafts
        self._post = post
        self._ports: dict[int, LinePort] = {}
        self._busy: set[int] = set()
        """Sessions of which something has come that was not dealt with."""

    def port(self, frame: DraftUp) -> ReporterPort:
        """How to speak to a draft whose session began: on a line, if it can be called."""
        offer = frame.line
        line = None if offer is None else dial(offer.host, offer.path, offer.token)
        if line is None:
            return ReporterPort(frame.session, frame.address, self._pipe)
        log.info("draft %s is on this host: its engine is spoken to directly", frame.address)
        port = self._ports[frame.session] = LinePort(frame.session, frame.address, self._pipe, line)
        return port

    def forget(self, session: int) -> None:
        """A session has ended."""
        port = self._ports.pop(session, None)
        self._busy.discard(session)
        if port is not None:
            port.line.close()

    def take(self) -> bool:
        """Leave the engine what has come; whether there was anything."""
        heard = False
        for session, port in list(self._ports.items()):
            port.line.flush()
            if session not in self._busy:
                heard |= self._hear(session, port)
            if port.line.closed:
                # The door ends the session and dials anew.
                self.forget(session)
                self._pipe.send(DraftReset(session))
        return heard

    def wait(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds, None for ever, until something comes, of the door too."""
        if self._pipe.closed:
            return
        reads: list[Pipe[FromDoor] | Line[DraftBatch]] = [self._pipe]
        reads += [port.line for port in self._ports.values()]
        select.select(reads, [end for end in reads if end.backlog], [], timeout)

    def _hear(self, session: int, port: LinePort) -> bool:
        batches = port.line.receive_from(f"draft {port.address}")
        if not batches:
            return port.line.closed
        arrived_at = monotonic()
        self._busy.add(session)
        # One by one, so that the engine may turn to something else in between.
        for batch in batches:
            for part in batch.messages:
                self._post(partial(self._receive, session, port, part, arrived_at))
        self._post(lambda: self._busy.discard(session))
        return True

    def _receive(self, session: int, port: LinePort, part: DraftPart, arrived_at: float) -> None:
        if session not in self._ports:
            return
        try:
            (message,) = unpack_drafts([part])
        except ValueError as error:
            log.warning("draft %s sent a malformed message; its session is reset: %s", port.address, error)
            port.line.close()
            return
        self._drafts.receive(port, [message], arrived_at)
