"""The door's side of an engine process: the process itself, and the door's ends of its sockets."""

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

from outrider.errors import ConfigError, InternalError
from outrider.host.frames import FrameReader, Ready, Refused, Start, Stop, pack
from outrider.logs import get_logger
from outrider.rpc.lifecycle import exit_text

log = get_logger(__name__)

KEPT_KERNELS = 256
"""Kernels in each cache.

oneDNN compiles one for each shape of a product, some 0.5 MB each, and a shape is a number of rows times a weight: five
weights in a decoder make this the last 50 widths of a forward. One that is not there any more costs 0.6 ms.
"""

KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KEPT_KERNELS), "LRU_CACHE_CAPACITY": str(KEPT_KERNELS)}
"""Variables for the environment of a process, to be there before its first product.

The first is oneDNN's cache, the second that of torch's layer above it (ideep), which holds on to the same kernels. Left
alone each keeps 1024, and a service grows for hours, by up to 0.6 GB.
"""

STOP_SECONDS = 3.0
"""How long an engine that was told to stop may take; then it is killed."""
_SWITCH_SECONDS = 0.0001
_MOST_LOOK_SECONDS = 1.0
"""Between two looks at whether an engine stands still."""

FrameT = TypeVar("FrameT")
ServedT = TypeVar("ServedT")


class FrameConnection(asyncio.Protocol, Generic[FrameT]):
    """The door's end of a socket to an engine. Everything happens on the event loop.

    What is no frame breaks the connection, as an engine that dies does.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[FrameT]) -> None:
        """`decoder`: of the frames that the engine sends."""
        self._decode = decoder.decode
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()
        self._writable = asyncio.Event()
        """Set while the socket takes what is sent, and for good once the engine is gone."""
        self._writable.set()

    @abstractmethod
    def receive(self, frame: FrameT) -> None:
        """Handle a frame of the engine."""

    def on_lost(self) -> None:
        """The engine has hung up; called once."""

    def send(self, frame: msgspec.Struct) -> None:
        """Send a frame, after all earlier ones; to an engine that is gone it is lost."""
        if self._transport is not None and not self._lost.is_set():
            self._transport.write(pack(frame))

    async def writable(self) -> None:
        """Wait until most of what was sent has left, so that others have their turn."""
        await self._writable.wait()

    async def lost(self) -> None:
        """Return when the engine is gone, whether it was told to stop or not."""
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
        """A frame has come."""
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
    """The socket on which an engine is started, says what it serves or why it cannot, and is told to stop."""

    SILENCE: ClassVar[str]
    """What has not happened where the engine stands still, for the log: "no round has ended"."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        """`decoder`: of `Ready[ServedT] | Refused | FrameT`."""
        super().__init__(decoder)
        self.alive = False
        """Whether the engine serves; False for good once it was told to stop or is gone."""
        self.stopping = False
        """Whether the engine was told to stop."""
        self.failed = False
        """Whether the engine went while it served."""
        self.num_signs = 0
        """How often the engine has shown that it works."""
        self.ready: asyncio.Future[ServedT] = asyncio.get_running_loop().create_future()
        """What the engine serves, once it does. ConfigError when it cannot, InternalError when it died."""
        # An error that nobody waits for is no fault of asyncio's to log.
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())

    def on_ready(self, served: ServedT) -> None:
        """The engine serves."""

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """Requests that it has."""

    @abstractmethod
    def expects_sign(self) -> bool:
        """Whether an engine that works would give a sign soon; asks for one where it gives none by itself."""

    async def stands_still(self, seconds: float) -> None:
        """Return once a sign was expected for so long, and none came.

        Its own time counts, look by look: what came while this process was stopped has not been read yet.
        """
        step = min(seconds / 4, _MOST_LOOK_SECONDS)
        silence = 0.0
        while silence < seconds:
            num_signs, is_expected = self.num_signs, self.expects_sign()
            await asyncio.sleep(step)
            silence = silence + step if is_expected and num_signs == self.num_signs else 0.0

    def stop(self) -> None:
        """Let the engine end after what it does now."""
        self.alive, self.stopping = False, True
        self.send(Stop())

    def take(self, frame: Any) -> None:
        """See the base."""
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
    """One engine process, tied to this one: whichever way the door ends, the kernel ends the engine, too."""

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
        """Run `module` as an engine, connect its sockets, and have it load what `options` name; it is not ready yet.

        Call it on the main thread. `environment`: variables that the process gets whatever this one has.
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
        """What the engine serves, once it does; None when `stop` is set before.

        Raises ConfigError when the engine cannot serve with these options, InternalError when it died.
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
        """Return when told to stop, or when the engine died: a supervisor then starts the service anew.

        One that stands still for `watchdog_timeout` seconds is killed; 0 for any number.
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
            "%s for %g s (--watchdog-timeout) with %d requests; the engine is killed, the service must be restarted",
            self._engine.SILENCE, seconds, self._engine.num_requests,
        )  # fmt: skip
        self._kill()

    def _kill(self) -> None:
        """End an engine that may not answer any more."""
        self._engine.alive = False
        self._process.kill()

    async def stop(self) -> None:
        """End the engine after what it does now, so that every open stream is told."""
        self._engine.stop()
        try:
            await asyncio.wait_for(self._engine.lost(), STOP_SECONDS)
        except TimeoutError:
            log.warning("the engine did not stop within %g s; killing it", STOP_SECONDS)

    async def close(self) -> None:
        """Make sure that the process is gone; an engine that was not stopped before is killed."""
        if not self._engine.gone:
            self._kill()
        ending = await self._ending()
        if self._process.stdin is not None:
            self._process.stdin.close()
        for connection in (self._engine, *self._others):
            connection.close()
        if self._engine.failed:
            log.error("the engine process ended by itself (%s); the service must be restarted", ending)
        else:
            log.debug("the engine process ended (%s)", ending)

    async def _ending(self) -> str:
        """How the process ended, in words; kills one that has hung up and yet goes on."""
        try:
            code = await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            return "it hung up, went on and was killed"
        # Nobody else who kills it says why.
        return "killed by signal 9, out of memory perhaps" if code == -signal.SIGKILL else exit_text(code)


def switch_threads_often() -> None:
    """Have threads of this process take turns often: one that renders a metrics page must not keep commits waiting for
    Python's own 5 ms, nor one that compiles a grammar a burst."""
    sys.setswitchinterval(_SWITCH_SECONDS)


def spawn(
    module: str, descriptors: Sequence[int], environment: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Run a module's `main` as an engine, with these descriptors as its arguments, and others behind them.

    Call it on the main thread: on Linux the end of the starting thread is what ends the child.
    `environment`: variables that it gets whatever this process has.
    """
    launcher = [sys.executable, "-m", "outrider.host.launch", str(os.getpid())]
    # Threads that spin while they wait starve the services beside them on the same cores, and themselves: measured
    # with one busy process beside it on 2 cores, a 57 ms forward took 746 ms.
    env = {"OMP_WAIT_POLICY": "passive", **KERNEL_CACHES, **os.environ, **(environment or {})}
    # Ctrl-C reaches the whole process group. Blocked signals stay so in a child: the door alone decides what follows.
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
