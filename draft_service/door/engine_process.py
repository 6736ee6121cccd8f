"""The engine process, as the door starts and ends it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from dataclasses import replace

from draft_service.door.remote import RemoteDraftEngine, RemoteFeatures
from draft_service.frames import Ready, Start
from outrider.config.draft import DraftOptions
from outrider.host.child import Child, spawn

MODULE = "draft_service.engine.worker"


class DraftEngineProcess(Child[Ready]):
    """One engine process and the door's ends of its sockets."""

    def __init__(self, engine: RemoteDraftEngine, features: RemoteFeatures, process: subprocess.Popen[bytes]) -> None:
        super().__init__(engine, process)
        self.engine = engine
        self.features = features

    @classmethod
    async def start(cls, options: DraftOptions) -> DraftEngineProcess:
        """Start the process and have it load its drafters; it is not ready yet. Call it on the main thread."""
        (ours, theirs), (our_features, their_features) = socket.socketpair(), socket.socketpair()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(options.threads))
        with theirs, their_features:
            process = spawn(MODULE, [theirs, their_features], threads)
        loop = asyncio.get_running_loop()
        _, engine = await loop.create_unix_connection(RemoteDraftEngine, sock=ours)
        _, features = await loop.create_unix_connection(RemoteFeatures, sock=our_features)
        # The engine opens no door: it needs no tokens.
        engine.send(Start(replace(options, auth_token="")))
        return cls(engine, features, process)

    async def close(self) -> None:
        """Make sure that the process is gone; an engine that was not stopped before is killed."""
        await super().close()
        self.features.close()
