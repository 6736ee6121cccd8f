"""The engine process, as the door starts and ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

from outrider.config.verify import VerifyOptions
from outrider.cpu_kernels import KERNEL_CACHES
from outrider.errors import InternalError
from outrider.logs import get_logger
from verify_service.remote import RemoteEngine
from verify_service.wire_engine import Ready, RoundReport, Start

log = get_logger(__name__)

MODULE = "verify_service.worker"
STOP_SECONDS = 3.0
"""How long an engine that was told to stop may take; then it is killed."""


class EngineProcess:
    """One engine process, tied to this one: whichever way the door ends, the kernel ends the engine, too.

    Start it on the main thread: on Linux the end of the starting thread is what ends the child.
    """

    def __init__(self, engine: RemoteEngine, process: subprocess.Popen[bytes]) -> None:
        self.engine = engine
        self._process = process

    @classmethod
    async def start(cls, options: VerifyOptions, on_round: Callable[[RoundReport], None]) -> EngineProcess:
        """Start the process and have it load its model; it is not ready yet."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = _spawn(theirs.fileno())
        loop = asyncio.get_running_loop()
        _, engine = await loop.create_unix_connection(lambda: RemoteEngine(on_round), sock=ours)
        # The engine opens no door and calls nobody: it needs no tokens.
        engine.start(Start(replace(options, auth_token="", draft_auth_token="")))
        return cls(engine, process)

    async def ready(self, stop: asyncio.Event) -> Ready | None:
        """What the engine serves, once it does; None when `stop` is set before.

        Raises ConfigError when the engine cannot serve with these options, InternalError when it died.
        """
        stopped = asyncio.ensure_future(stop.wait())
        ready = asyncio.ensure_future(self.engine.ready())
        await asyncio.wait([stopped, ready], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not ready.done():
            ready.cancel()
            return None
        try:
            return ready.result()
        except InternalError:
            raise InternalError(f"the engine ended at its start ({await self._ending()})") from None

    async def stop(self) -> None:
        """End the engine after its present round, so that every open stream is told."""
        self.engine.stop()
        try:
            await asyncio.wait_for(self.engine.lost(), STOP_SECONDS)
        except TimeoutError:
            log.warning("the engine did not stop within %g s; killing it", STOP_SECONDS)

    async def close(self) -> None:
        """Make sure that the process is gone; an engine that was not stopped before is killed."""
        if not self.engine.gone:
            self._process.kill()
        ending = await self._ending()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.engine.close()
        log.debug("the engine process ended (%s)", ending)

    async def _ending(self) -> str:
        """How the process ended, in words; kills one that has hung up and yet goes on."""
        try:
            code = await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = await asyncio.to_thread(self._process.wait)
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "outrider.cli.launcher", str(os.getpid())]
    # Threads that spin while they wait starve the services beside them on the same cores, and themselves: measured
    # with one busy process beside it on 2 cores, a 57 ms forward took 746 ms.
    env = {"OMP_WAIT_POLICY": "passive", **KERNEL_CACHES, **os.environ}
    # Ctrl-C reaches the whole process group. Blocked signals stay so in a child: the door alone decides what follows.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen(
            [*launcher, MODULE, str(descriptor)], stdin=subprocess.PIPE, pass_fds=[descriptor], env=env
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
