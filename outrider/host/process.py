"""The door's side of an engine process: the process, and the door's ends of its sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

import msgspec

from outrider.errors import ConfigError, InternalError, count_of, exit_text
from outrider.host.frames import FrameReader, Ready, Refused, Start, Stop, pack
from outrider.logs import get_logger

log = get_logger(__name__)

KEPT_KERNELS = 256
"""Kernels in each cache.

oneDNN compiles one for each shape of a product, some 0.5 MB each, and a shape is a number of rows times a weight: with
five weights in a decoder this keeps the last 50 widths of a forward. Compiling an evicted kernel again costs 0.6 ms.
"""

KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KEPT_KERNELS), "LRU_CACHE_CAPACITY": str(KEPT_KERNELS)}
"""Environment variables that a process needs before its first product.

The first limits oneDNN's cache, the second that of torch's layer above it (ideep), which holds the same kernels. By
default each keeps 1024 kernels, and a service grows for hours, by up to 0.6 GB.
"""

STOP_SECONDS = 3.0
"""Longest time that an engine may take to stop; then it is killed."""
_SWITCH_SECONDS = 0.0001
_MOST_LOOK_SECONDS = 1.0
"""Longest time between two checks whether an engine stands still."""

FrameT = TypeVar("FrameT")
ServedT = TypeVar("ServedT")


class FrameConnection(asyncio.Protocol, Generic[FrameT]):
    """The door's end of a socket to an engine. Everything happens on the event loop.

    Bytes that are no frame break the connection, just as an engine that dies does.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[FrameT]) -> None:
        """`decoder`: for the frames that the engine sends."""
        self._decode = decoder.decode
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()
        self._writable = asyncio.Event()
        """Set while the socket takes data, and for good once the engine is gone."""
        self._writable.set()

    @abstractmethod
    def receive(self, frame: FrameT) -> None:
        """Handle a frame from the engine."""

    def on_lost(self) -> None:
        """Handle the engine's hanging up; called once."""

    def send(self, frame: msgspec.Struct) -> None:
        """Send a frame, after all earlier ones; it is lost if the engine is gone."""
        if self._transport is not None and not self._lost.is_set():
            self._transport.write(pack(frame))

    async def writable(self) -> None:
        """Wait until most of the sent data has left, so that other tasks have their turn."""
        await self._writable.wait()

    async def lost(self) -> None:
        """Return when the engine is gone, whether it was asked to stop or not."""
        await self._lost.wait()

    @property
    def gone(self) -> bool:
        """Whether the engine has hung up."""
        return self._lost.is_set()

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        for body in self._reader.feed(data):
            self.take(self._decode(body))

    def take(self, frame: Any) -> None:
        """Dispatch a frame that has arrived."""
        self.receive(frame)

    def pause_writing(self) -> None:
        """See asyncio.Protocol: the engine is behind."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """See asyncio.Protocol: the engine has caught up."""
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol: the engine is gone."""
        self._lost.set()
        self._writable.set()
        self.on_lost()


class EngineConnection(FrameConnection[FrameT], Generic[FrameT, ServedT]):
    """The socket that starts an engine, brings what it serves or why it cannot, and stops it."""

    SILENCE: ClassVar[str]
    """The log's words for an engine that stands still, such as "no round has ended"."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        """`decoder`: for `Ready[ServedT] | Refused | FrameT`."""
        super().__init__(decoder)
        self.alive = False
        """Whether the engine serves; False for good once it is asked to stop or is gone."""
        self.stopping = False
        """Whether the engine was asked to stop."""
        self.failed = False
        """Whether the engine hung up while it served."""
        self.num_signs = 0
        """Signs so far that the engine works."""
        self.ready: asyncio.Future[ServedT] = asyncio.get_running_loop().create_future()
        """What the engine serves, once it does. ConfigError if it cannot serve, InternalError if it died."""
        # Mark the error as seen, so that asyncio does not log it when nobody waits for it.
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())

    def on_ready(self, served: ServedT) -> None:
        """Handle the engine's start of serving."""

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """Number of requests that the engine has."""

    @abstractmethod
    def expects_sign(self) -> bool:
        """Whether a working engine would give a sign soon; ask for one if it gives none by itself."""

    async def stands_still(self, seconds: float) -> None:
        """Return once a sign has been expected for `seconds` and none has come.

        Adds up its own sleeps, not the clock: if this process was stopped, it has not read the signs of that time yet.
        """
        step = min(seconds / 4, _MOST_LOOK_SECONDS)
        silence = 0.0
        while silence < seconds:
            num_signs, is_expected = self.num_signs, self.expects_sign()
            await asyncio.sleep(step)
            silence = silence + step if is_expected and num_signs == self.num_signs else 0.0

    def stop(self) -> None:
        """Tell the engine to end after its current work."""
        self.alive, self.stopping = False, True
        self.send(Stop())

    def take(self, frame: Any) -> None:
        """Handle the engine's `Ready` or `Refused`; pass other frames to `receive`."""
        if isinstance(frame, Ready):
            self.alive = True
            self.on_ready(frame.served)
            self.ready.set_result(frame.served)
        elif isinstance(frame, Refused):
            self.ready.set_exception(ConfigError(frame.message))
        else:
            self.receive(frame)

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol: the engine is gone."""
        self.failed, self.alive = self.alive, False
        if not self.ready.done():
            self.ready.set_exception(InternalError("the engine process ended before it was ready"))
        super().connection_lost(error)


@dataclass(frozen=True, eq=False, repr=False)
class EngineProcess(Generic[ServedT]):
    """An engine process, tied to this one: however the door ends, the engine ends, too."""

    _process: subprocess.Popen[bytes]
    _engine: EngineConnection[Any, ServedT]
    _others: Sequence[FrameConnection[Any]]
    """Further sockets to the same process, closed with it."""

    @classmethod
    async def start(
        cls,
        module: str,
        options: object,
        engine: EngineConnection[Any, ServedT],
        others: Sequence[FrameConnection[Any]] = (),
        environment: Mapping[str, str] | None = None,
    ) -> EngineProcess[ServedT]:
        """Run `module` as an engine, connect its sockets, and send it `options`; `ready` waits until it serves.

        Call this on the main thread. `environment`: variables that override those of this process.
        """
        connections = [engine, *others]
        pairs = [socket.socketpair() for _ in connections]
        try:
            process = spawn(module, [theirs.fileno() for _, theirs in pairs], environment)
        finally:
            for _, theirs in pairs:
                theirs.close()
        loop = asyncio.get_running_loop()
        for connection, (ours, _) in zip(connections, pairs, strict=True):
            await loop.create_unix_connection(lambda connection=connection: connection, sock=ours)  # type: ignore[misc]
        engine.send(Start(options))
        return cls(process, engine, others)

    async def ready(self, stop: asyncio.Event) -> ServedT | None:
        """Wait until the engine serves, and return what it serves; None if `stop` is set before.

        Raises ConfigError if the engine cannot serve with these options, InternalError if it died.
        """
        ready, stopped = self._engine.ready, asyncio.create_task(stop.wait())
        ends: list[asyncio.Future[Any]] = [ready, stopped]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not ready.done():
            return None
        try:
            return ready.result()
        except InternalError:
            raise InternalError(f"the engine ended at its start ({await self._ending()})") from None

    async def until_stopped(self, stop: asyncio.Event, watchdog_timeout: float) -> None:
        """Return when `stop` is set, or when the engine died; a supervisor then restarts the service.

        An engine that stands still for `watchdog_timeout` seconds is killed; 0 disables this.
        """
        watchdog = asyncio.create_task(self._kill_when_still(watchdog_timeout))
        ends = [asyncio.create_task(stop.wait()), asyncio.create_task(self._engine.lost())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in (*ends, watchdog):
            task.cancel()

    async def _kill_when_still(self, seconds: float) -> None:
        if not seconds:
            return
        await self._engine.stands_still(seconds)
        log.error(
            "%s for %g s (--watchdog-timeout) with %s; the engine is killed and the service exits to be restarted",
            self._engine.SILENCE, seconds, count_of(self._engine.num_requests, "request"),
        )  # fmt: skip
        self._kill()

    def _kill(self) -> None:
        """Kill an engine that may not answer any more."""
        self._engine.alive = False
        self._process.kill()

    async def stop(self) -> None:
        """Tell the engine to end after its current work, so that it ends every open stream properly; wait for that."""
        self._engine.stop()
        try:
            await asyncio.wait_for(self._engine.lost(), STOP_SECONDS)
        except TimeoutError:
            log.warning("the engine did not stop within %g s; killing it", STOP_SECONDS)

    async def close(self) -> None:
        """Make sure that the process is gone; kill an engine that still runs."""
        if not self._engine.gone:
            self._kill()
        ending = await self._ending()
        if self._process.stdin is not None:
            self._process.stdin.close()
        for connection in (self._engine, *self._others):
            connection.close()
        if self._engine.failed:
            log.error("the engine process ended by itself (%s); the service exits to be restarted", ending)
        else:
            log.debug("the engine process ended (%s)", ending)

    async def _ending(self) -> str:
        """Return in words how the process ended; kill it if it has hung up but still runs."""
        try:
            code = await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            return "it closed its connection, kept running and was killed"
        # The kernel's out-of-memory killer gives no reason.
        return "killed by signal 9, out of memory perhaps" if code == -signal.SIGKILL else exit_text(code)


def switch_threads_often() -> None:
    """Switch between this process's threads more often than Python's default of 5 ms, so that commits need not wait for
    a thread that renders a metrics page, nor a burst for one that compiles a grammar."""
    sys.setswitchinterval(_SWITCH_SECONDS)


def spawn(
    module: str, descriptors: Sequence[int], environment: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Run a module's `main` as an engine. Its arguments are the descriptors, followed by `arguments`.

    Call this on the main thread: on Linux the end of the starting thread ends the child.
    `environment`: variables that override those of this process.
    """
    launcher = [sys.executable, "-m", "outrider.host.launch", str(os.getpid())]
    # Threads that spin while they wait starve other services on the same cores, and themselves: with one busy process
    # beside it on 2 cores, a forward took 746 ms instead of 57 ms.
    env = {"OMP_WAIT_POLICY": "passive", **KERNEL_CACHES, **os.environ, **(environment or {})}
    # Ctrl-C reaches the whole process group. Signals blocked here stay blocked in the child: only the door reacts.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen(
            [*launcher, module, *map(str, descriptors), *arguments],
            stdin=subprocess.PIPE,
            pass_fds=descriptors,
            env=env,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
