"""An engine behind a real socket, as in its own process, but on a thread that tests can look into."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from threaded_engine import ThreadedEngine

from outrider.config.verify import VerifyOptions
from outrider.host.worker import Pipe, run_engine
from outrider.protocol.generation import VerifyInfo
from verify_service.door.remote import RemoteVerifyEngine
from verify_service.engine.engine import VerifyEngine, VerifyInbox
from verify_service.engine.postprocessor import Observer
from verify_service.engine.worker import connect
from verify_service.frames import RoundReport, TargetProfile, from_door


class WatchedEngine(RemoteVerifyEngine):
    """A remote engine that signals whenever it has received something."""

    def __init__(self) -> None:
        self.rounds: list[RoundReport] = []
        super().__init__(self.rounds.append)
        self._received = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._received.set()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something holds that the engine's messages bring about."""
        async with asyncio.timeout(20):
            while not true():
                self._received.clear()
                await self._received.wait()


@dataclass
class EngineThread:
    """Both ends."""

    remote: WatchedEngine
    engine: ThreadedEngine
    exit_codes: list[int]

    def ask(self, question: Callable[[], None]) -> None:
        """Run something on the engine's thread between two rounds; one that is idle looks after 0.25 s."""
        self.engine.ask(question)


def ready_of(engine: ThreadedEngine) -> TargetProfile:
    """What the door knows of an engine."""
    limits = engine.limits
    info = VerifyInfo("m", "folder", "hash", limits.vocab_size, limits.context_length, "float32", (60,), "1")
    return TargetProfile(info, limits.max_running, limits.max_waiting)


@asynccontextmanager
async def engine_thread(engine: ThreadedEngine) -> AsyncIterator[EngineThread]:
    """The door's view of an engine that has not run yet, and its run. Leaving stops it."""
    ours, theirs = socket.socketpair()
    codes: list[int] = []

    def build(options: VerifyOptions, inbox: VerifyInbox, observer: Observer) -> tuple[VerifyEngine, TargetProfile]:
        engine._inbox, engine._observer, engine._postprocessor.observer = inbox, observer, observer
        return engine, ready_of(engine)

    def run() -> None:
        with theirs:
            pipe = Pipe(theirs, from_door)
            codes.append(run_engine(pipe, lambda: connect(VerifyOptions(), pipe, build)))

    thread = threading.Thread(target=run, name="engine")
    thread.start()
    _, remote = await asyncio.get_running_loop().create_unix_connection(WatchedEngine, sock=ours)
    try:
        await asyncio.wait_for(remote.ready, 20)
        yield EngineThread(remote, engine, codes)
    finally:
        remote.stop()
        await asyncio.wait_for(remote.lost(), 20)
        remote.close()
        await asyncio.to_thread(thread.join)
