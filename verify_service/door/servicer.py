"""The verify service's gRPC door."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from outrider.errors import OverloadedError, UnavailableError
from outrider.protocol.generation import GenerationUpdate, VerifyInfo, VerifyLoad, join_updates
from outrider.protocol.generation_codec import INFO, LOAD, UPDATE
from outrider.v1 import verify_pb2, verify_pb2_grpc
from verify_service.door.admission import Admission
from verify_service.door.grammar_checker import GrammarChecker
from verify_service.door.remote import RemoteVerifyEngine

Context = grpc.aio.ServicerContext[Any, Any]

MAX_UNREAD_WEIGHT = 2 << 20
"""Largest weight of the unread updates of one answer; some tens of megabytes."""
_MAX_MESSAGE_WEIGHT = 1 << 18
"""Weight from which a message is full, which keeps it far below the size limit of messages."""
_TOKEN_WEIGHT = 8
_MESSAGE_SECONDS = 200e-6
"""Rough cost of a message in a gateway's process, sockets included (benchmarks/notes/cpu.md). With many answers at
once, more messages would only wait for the gateway, and tokens that come together cost it less."""

_LAST_READ_SECONDS = 1.0
"""Time that a caller gets to read the end of its answer while the service drains."""


@dataclass(eq=False, repr=False)
class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """Answers gateways; the engine does the work."""

    engine: RemoteVerifyEngine
    admission: Admission
    info: VerifyInfo
    load: Callable[[], VerifyLoad]
    stall_seconds: float = 120.0
    """How long a gateway may leave an answer unread."""
    grammars: GrammarChecker | None = None
    """Tries grammars before the engine gets them."""
    draining: bool = False
    """While set, new requests are refused."""

    async def Generate(self, request: verify_pb2.VerifyServiceGenerateRequest, context: Context) -> None:
        """Stream committed tokens. The request leaves the engine with the call, however that ends."""
        if self.draining:
            raise UnavailableError("the verify service is draining; send the request to another replica")
        outbox = Outbox(self.stall_seconds)
        admitted = self.admission.admit(request)
        if self.grammars is not None and admitted.sampling.grammar is not None:
            await self.grammars.check(admitted.sampling.grammar, admitted.client)
        number = self.engine.submit(admitted, outbox.put)
        try:
            # Not with the first message: if that carried the metadata and was given up, no status could follow.
            await context.send_initial_metadata(())
            last = False
            while not last:
                gathered = await outbox.take(self.engine.num_running * _MESSAGE_SECONDS)
                last = gathered[-1].last
                error = gathered[-1].error
                if error is None or len(gathered) > 1 or gathered[0].token_ids:
                    await outbox.write(partial(context.write, UPDATE.encode(join_updates(gathered))))
                if error is not None:
                    raise error
            await self._until_read()
        except OverloadedError as error:
            self.engine.backlog.slow_readers += error.code == "slow_reader"
            raise
        finally:
            self.engine.cancel(number)

    async def _until_read(self) -> None:
        # A stopping server closes a connection with its last call, and a busy caller loses what it has not read yet.
        # A gateway hangs up when it has the end of its answer, which ends this wait.
        if self.draining:
            await asyncio.sleep(_LAST_READ_SECONDS)

    async def GetInfo(
        self, request: verify_pb2.VerifyServiceGetInfoRequest, context: Context
    ) -> verify_pb2.VerifyServiceGetInfoResponse:
        """Return the model and its limits."""
        return INFO.encode(self.info)

    async def GetLoad(
        self, request: verify_pb2.VerifyServiceGetLoadRequest, context: Context
    ) -> verify_pb2.VerifyServiceGetLoadResponse:
        """Return the present load."""
        return LOAD.encode(self.load())


class Outbox:
    """Gathers updates while the message before is being written. A reader that falls behind loses its answer.

    Used from one event loop.
    """

    def __init__(self, stall_seconds: float, max_weight: int = MAX_UNREAD_WEIGHT) -> None:
        """`stall_seconds`: how long a message may wait for its reader."""
        self._stall_seconds = stall_seconds
        self._max_weight = max_weight
        self._updates: deque[GenerationUpdate] = deque()
        self._weight = 0
        self._filled = asyncio.Event()
        self._next_time = 0.0
        """Earliest time for the next message, on the event loop's clock."""
        self._write_limit: asyncio.Timeout | None = None
        self.overflowed = False

    def put(self, update: GenerationUpdate) -> None:
        """Add an update."""
        if self.overflowed:
            return
        self._weight += _weight(update)
        self._updates.append(update)
        self._filled.set()
        if self._weight > self._max_weight:
            self.overflowed = True
            self._updates.clear()
            if self._write_limit is not None:
                self._write_limit.reschedule(asyncio.get_running_loop().time())

    async def take(self, interval: float = 0.0) -> Sequence[GenerationUpdate]:
        """Wait for an update, and for the interval after the message before; return the updates for one message.

        `interval`: seconds from this message to the next, at least. Raises OverloadedError for a slow reader.
        """
        await self._filled.wait()
        now = asyncio.get_running_loop().time
        if (pause := self._next_time - now()) > 0:
            await asyncio.sleep(pause)
        self._next_time = now() + interval
        if self.overflowed:
            raise self._slow_reader()
        taken, weight = [], 0
        while self._updates and weight < _MAX_MESSAGE_WEIGHT:
            taken.append(self._updates.popleft())
            weight += _weight(taken[-1])
        self._weight -= weight
        if not self._updates:
            self._filled.clear()
        return taken

    async def write(self, write: Callable[[], Awaitable[None]]) -> None:
        """Write a message. Raises OverloadedError for a slow reader."""
        try:
            async with asyncio.timeout(self._stall_seconds) as self._write_limit:
                await write()
        except TimeoutError:
            raise self._slow_reader() from None
        finally:
            self._write_limit = None

    def _slow_reader(self) -> OverloadedError:
        stalled = f"the stream was not read for {self._stall_seconds:g} s"
        problem = "too much of the stream was not read" if self.overflowed else stalled
        return OverloadedError(f"{problem}; read it faster", code="slow_reader")


def _weight(update: GenerationUpdate) -> int:
    """Estimate an update's memory: tokens and log-probabilities are objects, those of a prompt are arrays."""
    weight = 1 + len(update.token_ids) + sum(1 + len(entry.top) for entry in update.logprobs)
    weight += 4 * sum(len(tree.token_ids) for tree in update.round_trees)
    return weight * _TOKEN_WEIGHT + sum(
        2 * part.logprobs.size + 2 * part.top_ids.size for part in update.prompt_logprobs
    )
