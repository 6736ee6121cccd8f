"""A draft's engine behind real sockets, as in its own process, but on a thread whose drafter tests can look into."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from draft_service.door.remote import RemoteDraftEngine, RemoteFeatures
from draft_service.engine.worker import connect
from draft_service.frames import features_from_door, from_door
from outrider.config.draft import DraftOptions
from outrider.drafting.base import AnyDrafter
from outrider.drafting.model.features import MemoryMapper
from outrider.host.worker import Pipe, run_engine


@dataclass
class EngineThread:
    """The door's ends, and how the engine ended."""

    remote: RemoteDraftEngine
    features: RemoteFeatures
    exit_codes: list[int]


@asynccontextmanager
async def engine_thread(
    drafter: AnyDrafter, options: DraftOptions, mapper: MemoryMapper | None = None
) -> AsyncIterator[EngineThread]:
    """The door's view of an engine, and its run. Leaving stops it."""
    (ours, theirs), (our_features, their_features) = socket.socketpair(), socket.socketpair()
    codes: list[int] = []

    def run() -> None:
        with theirs, their_features:
            pipe, features = Pipe(theirs, from_door), Pipe(their_features, features_from_door)
            codes.append(run_engine(pipe, lambda: connect(options, pipe, features, lambda options: (drafter, mapper))))

    thread = threading.Thread(target=run, name="draft-engine")
    thread.start()
    loop = asyncio.get_running_loop()
    _, remote = await loop.create_unix_connection(RemoteDraftEngine, sock=ours)
    _, features = await loop.create_unix_connection(RemoteFeatures, sock=our_features)
    try:
        await asyncio.wait_for(remote.ready, 20)
        yield EngineThread(remote, features, codes)
    finally:
        remote.stop()
        await asyncio.wait_for(remote.lost(), 20)
        remote.close()
        features.close()
        await asyncio.to_thread(thread.join)
