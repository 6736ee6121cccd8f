"""The engine process, as the door starts and ends it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace

from outrider.config.verify import VerifyOptions
from outrider.host.child import Child, spawn
from verify_service.door.remote import RemoteVerifyEngine
from verify_service.frames.engine import Ready, RoundReport, Start

MODULE = "verify_service.engine.worker"


class VerifyEngineProcess(Child[Ready]):
    """One engine process and the door's end of its socket."""

    def __init__(self, engine: RemoteVerifyEngine, process: subprocess.Popen[bytes]) -> None:
        super().__init__(engine, process)
        self.engine = engine

    @classmethod
    async def start(cls, options: VerifyOptions, on_round: Callable[[RoundReport], None]) -> VerifyEngineProcess:
        """Start the process and have it load its model; it is not ready yet. Call it on the main thread."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = spawn(MODULE, [theirs])
        loop = asyncio.get_running_loop()
        _, engine = await loop.create_unix_connection(lambda: RemoteVerifyEngine(on_round), sock=ours)
        # The engine opens no door and calls nobody: it needs no tokens.
        engine.send(Start(replace(options, auth_token="", draft_auth_token="")))
        return cls(engine, process)
