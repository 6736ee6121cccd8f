"""One verify replica: its channel, what it serves, and whether it can be used now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from enum import Enum

import grpc

from outrider.errors import DeadlineError, InternalError, OutriderError, UnavailableError
from outrider.logs import get_logger
from outrider.protocol.generation import GenerationRequest, GenerationUpdate, VerifyInfo, VerifyLoad
from outrider.protocol.generation_codec import INFO, LOAD, REQUEST, UPDATE
from outrider.rpc.channel import open_channel
from outrider.rpc.status import error_from_rpc
from outrider.rpc.tls import TlsSource
from outrider.v1 import verify_pb2
from outrider.v1.verify_pb2_grpc import VerifyServiceStub

Accept = Callable[[VerifyInfo], Awaitable[None]]
"""Takes what a replica serves; raises OutriderError if that is of no use here."""

_logger = get_logger(__name__)

_PROBE_DEADLINE = 5.0
_LOAD_DEADLINE = 0.5
"""Seconds that a scrape waits for the loads of the verify replicas."""
_RETRY_SECONDS = 0.25
_MAX_RETRY_SECONDS = 2.0
_REPEAT_LOG_SECONDS = 30.0


class ReplicaState(Enum):
    """Whether requests may go there."""

    CONNECTING = "connecting"
    """It has not answered yet, or it has been lost."""
    READY = "ready"
    UNSUITABLE = "unsuitable"
    """It answers, but serves something that this gateway cannot use."""


class Replica:
    """Follows one verify service: found when it starts, noticed when it dies, found again when it is back."""

    def __init__(
        self,
        address: str,
        *,
        auth_token: str = "",
        tls: TlsSource | None = None,
        probe_seconds: float = 2.0,
        max_message_bytes: int,
    ) -> None:
        """`probe_seconds` lie between two looks at a replica that serves. Raises ConfigError on a bad address."""
        self.address = address
        self.state = ReplicaState.CONNECTING
        self.num_answers = 0
        self.load = VerifyLoad()
        self._probe_seconds = probe_seconds
        self._channel = open_channel(
            address, max_message_bytes=max_message_bytes, auth_token=auth_token, tls=tls, option="--verify"
        )
        self._stub = VerifyServiceStub(self._channel)
        self._look_now = asyncio.Event()
        self._calls: set[grpc.aio.Call] = set()
        self._ended = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def follow(self, accept: Accept) -> None:
        """Keeps the state true until cancelled."""
        pause, silent_until, last = _RETRY_SECONDS, 0.0, ""
        clock = asyncio.get_running_loop().time
        while True:
            problem = await self._look(accept)
            if problem:
                pause = min(pause * 2, _MAX_RETRY_SECONDS)
                if problem != last or clock() >= silent_until:
                    _logger.warning("verify %s is not usable: %s; trying again", self.address, problem)
                    silent_until = clock() + _REPEAT_LOG_SECONDS
            else:
                pause = _RETRY_SECONDS
            last = problem
            self._look_now.clear()
            try:
                async with asyncio.timeout(pause if problem else self._probe_seconds):
                    await self._look_now.wait()
            except TimeoutError:
                pass

    async def _look(self, accept: Accept) -> str:
        """Asks once and sets the state. Returns what is wrong, empty if nothing is."""
        try:
            told = await self._stub.GetInfo(verify_pb2.VerifyServiceGetInfoRequest(), timeout=_PROBE_DEADLINE)
        except grpc.aio.AioRpcError as error:
            self.state = ReplicaState.CONNECTING
            return error_from_rpc(error, f"verify at {self.address}").message
        try:
            info = INFO.decode(told)
            await accept(info)
        except OutriderError as error:
            self.state = ReplicaState.UNSUITABLE
            return error.message
        except Exception as error:  # a surprise must not end the watch
            _logger.error("verify %s: taking over its model failed", self.address, exc_info=error)
            self.state = ReplicaState.UNSUITABLE
            return "internal error"
        if self.state is not ReplicaState.READY:
            _logger.info("verify %s serves %s in %s", self.address, info.model, info.dtype)
        self.state = ReplicaState.READY
        return ""

    async def refresh_load(self) -> None:
        """Asks how busy it is; keeps the last answer if none comes soon."""
        if self.state is not ReplicaState.READY:
            self.load = VerifyLoad()
            return
        try:
            self.load = LOAD.decode(
                await self._stub.GetLoad(verify_pb2.VerifyServiceGetLoadRequest(), timeout=_LOAD_DEADLINE)
            )
        except grpc.aio.AioRpcError as error:
            _logger.debug("verify %s told no load: %s", self.address, error.code())

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationUpdate, None]:
        """One answer; closing the iterator cancels the call. Raises OutriderError, also when the end is missing."""
        if self._ended.is_set():
            raise _shutting_down()
        call = self._stub.Generate(REQUEST.encode(request))
        self._calls.add(call)
        self.num_answers += 1
        self._idle.clear()
        try:
            async for message in call:
                chunk = UPDATE.decode(message)
                yield chunk
                if chunk.finish_reason is not None:
                    return
        except grpc.aio.AioRpcError as error:
            # The deadline went with the call, so verify has ended it, too.
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineError("the answer was not complete in the time that it had; ask for less") from None
            told = error_from_rpc(error, "the verify service", names_addresses=False)
            if isinstance(told, UnavailableError | InternalError):
                _logger.info("verify %s failed a call: %s", self.address, error.details())
            if isinstance(told, UnavailableError):
                self.doubt()
            raise told from None
        except asyncio.CancelledError:
            # A call that this side has cancelled raises it, too; the task itself goes on then, and its client is told.
            task = asyncio.current_task()
            if not self._ended.is_set() or (task is not None and task.cancelling()):
                raise
            raise _shutting_down() from None
        finally:
            self.num_answers -= 1
            if not self.num_answers:
                self._idle.set()
            self._calls.discard(call)
            call.cancel()
        self.doubt()
        raise UnavailableError("the verify service ended the answer without finishing it", code="answer_incomplete")

    def doubt(self) -> None:
        """A call failed: look at once whether the replica is still there."""
        self._look_now.set()

    def end_answers(self) -> None:
        """Ends the answers in the making, and begins no more: they raise UnavailableError with code draining."""
        self._ended.set()
        for call in tuple(self._calls):
            call.cancel()

    async def finish(self) -> None:
        """Waits for the end of the answers in the making, then closes."""
        await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        """Ends all calls."""
        await self._channel.close()


def _shutting_down() -> UnavailableError:
    return UnavailableError("the gateway is shutting down and its time to drain is over; try again", code="draining")
