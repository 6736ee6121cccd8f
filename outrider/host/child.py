"""An engine process, as its door starts and ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from outrider.cpu_kernels import KERNEL_CACHES
from outrider.errors import InternalError
from outrider.logs import get_logger

log = get_logger(__name__)

STOP_SECONDS = 3.0
"""How long an engine that was told to stop may take; then it is killed."""

_SWITCH_SECONDS = 0.0001

ReadyT_co = TypeVar("ReadyT_co", covariant=True)
ReadyT = TypeVar("ReadyT")


class Remote(Protocol[ReadyT_co]):
    """The engine as the door sees it: see EngineEnd."""

    @property
    def gone(self) -> bool:
        """Whether it has hung up."""

    async def ready(self) -> ReadyT_co:
        """What it serves. Raises ConfigError when it cannot, InternalError when it died."""

    async def lost(self) -> None:
        """Return when it is gone."""

    def stop(self) -> None:
        """Let it end."""

    def close(self) -> None:
        """Hang up."""


class Child(Generic[ReadyT]):
    """One engine process, tied to this one: whichever way the door ends, the kernel ends the engine, too."""

    def __init__(self, remote: Remote[ReadyT], process: subprocess.Popen[bytes]) -> None:
        self._remote = remote
        self._process = process

    async def ready(self, stop: asyncio.Event) -> ReadyT | None:
        """What the engine serves, once it does; None when `stop` is set before.

        Raises ConfigError when the engine cannot serve with these options, InternalError when it died.
        """
        stopped = asyncio.ensure_future(stop.wait())
        ready = asyncio.ensure_future(self._remote.ready())
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
        """End the engine after what it does now, so that every open stream is told."""
        self._remote.stop()
        try:
            await asyncio.wait_for(self._remote.lost(), STOP_SECONDS)
        except TimeoutError:
            log.warning("the engine did not stop within %g s; killing it", STOP_SECONDS)

    async def close(self) -> None:
        """Make sure that the process is gone; an engine that was not stopped before is killed."""
        if not self._remote.gone:
            self._process.kill()
        ending = await self._ending()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._remote.close()
        log.debug("the engine process ended (%s)", ending)

    async def _ending(self) -> str:
        """How the process ended, in words; kills one that has hung up and yet goes on."""
        try:
            code = await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = await asyncio.to_thread(self._process.wait)
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def share_interpreter() -> None:
    """Have threads of this process take turns often: one that renders a metrics page must not keep commits waiting for
    Python's own 5 ms, nor one that compiles a grammar a burst."""
    sys.setswitchinterval(_SWITCH_SECONDS)


async def until_stopped(stop: asyncio.Event, engine: Remote[object]) -> None:
    """Return when told to stop, or when the engine died: a supervisor then starts the service anew."""
    ends = [asyncio.create_task(stop.wait()), asyncio.create_task(engine.lost())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()


def spawn(
    module: str, sockets: Sequence[socket.socket], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Run a module as an engine, with the descriptors of these sockets as its arguments. Call it on the main thread:
    on Linux the end of the starting thread is what ends the child.

    `environment`: variables that it gets whatever this process has.
    """
    launcher = [sys.executable, "-m", "outrider.cli.launcher", str(os.getpid())]
    # Threads that spin while they wait starve the services beside them on the same cores, and themselves: measured
    # with one busy process beside it on 2 cores, a 57 ms forward took 746 ms.
    env = {"OMP_WAIT_POLICY": "passive", **KERNEL_CACHES, **os.environ, **(environment or {})}
    descriptors = [one.fileno() for one in sockets]
    # Ctrl-C reaches the whole process group. Blocked signals stay so in a child: the door alone decides what follows.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen(
            [*launcher, module, *map(str, descriptors)], stdin=subprocess.PIPE, pass_fds=descriptors, env=env
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
