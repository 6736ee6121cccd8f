"""The door's end of a socket to its engine process."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Generic, TypeVar, cast

import msgspec

from outrider.errors import ConfigError, InternalError
from outrider.host.frames import FrameReader, pack

FrameT = TypeVar("FrameT")
ReadyT = TypeVar("ReadyT")


class FrameEnd(asyncio.Protocol, Generic[FrameT]):
    """Frames to and from the engine. Everything happens on the event loop.

    What is no frame breaks the connection, as an engine that dies does.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[FrameT]) -> None:
        """`decoder`: of the frames that the engine sends."""
        self._decode = decoder.decode
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()
        self._room = asyncio.Event()
        """The socket takes what is sent, or never will again."""
        self._room.set()

    @abstractmethod
    def take(self, frame: FrameT) -> None:
        """A frame has come."""

    def on_lost(self) -> None:
        """The engine has hung up; called once."""

    def send(self, frame: msgspec.Struct) -> None:
        """Send a frame, after all earlier ones; to an engine that is gone it is lost."""
        if self._transport is not None and not self._lost.is_set():
            self._transport.write(pack(frame))

    async def has_room(self) -> None:
        """Wait until most of what was sent has left, so that others have their turn."""
        await self._room.wait()

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
        """The socket is ours."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes came in."""
        for body in self._reader.feed(data):
            self.take(self._decode(body))

    def pause_writing(self) -> None:
        """The engine is behind."""
        self._room.clear()

    def resume_writing(self) -> None:
        """The engine has caught up."""
        self._room.set()

    def connection_lost(self, error: Exception | None) -> None:
        """The engine is gone."""
        self._lost.set()
        self._room.set()
        self.on_lost()


class EngineEnd(FrameEnd[FrameT], Generic[FrameT, ReadyT]):
    """The end on which the engine says that it is ready, or why it cannot be."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[FrameT]) -> None:
        super().__init__(decoder)
        self.stopping = False
        """Whether the engine was told to stop."""
        self._serving = False
        self._ready: asyncio.Future[ReadyT] = asyncio.get_running_loop().create_future()
        # Whoever waits for it is told; nobody has to.
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())

    @property
    def alive(self) -> bool:
        """Whether the engine serves; False for good once it was told to stop or is gone."""
        return self._serving

    async def ready(self) -> ReadyT:
        """What the engine serves, once it does. Raises ConfigError when it cannot, InternalError when it died."""
        return await asyncio.shield(self._ready)

    def serves(self, ready: ReadyT) -> None:
        """The engine is ready."""
        self._serving = True
        self._ready.set_result(ready)

    def refused(self, message: str) -> None:
        """The options, the model or the machine do not allow a start."""
        self._ready.set_exception(ConfigError(message))

    def stop(self) -> None:
        """Let the engine end."""
        self._serving, self.stopping = False, True
        self.send_stop()

    @abstractmethod
    def send_stop(self) -> None:
        """Tell it so."""

    def connection_lost(self, error: Exception | None) -> None:
        """The engine is gone."""
        self._serving = False
        if not self._ready.done():
            self._ready.set_exception(InternalError("the engine process ended before it was ready"))
        super().connection_lost(error)
