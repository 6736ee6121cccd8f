"""The verify replicas: whether each can be used now, and which one an answer goes to."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from enum import Enum

import grpc
from msgspec.structs import replace

from outrider.errors import DeadlineError, InternalError, InvalidRequestError, OutriderError, UnavailableError
from outrider.grammar.spec import Grammar
from outrider.logs import get_logger
from outrider.protocol.generation import GenerationRequest, GenerationUpdate, VerifyInfo, VerifyLoad
from outrider.protocol.generation_codec import INFO, LOAD, REQUEST, UPDATE
from outrider.rpc.channel import open_channel
from outrider.rpc.peers import PeerAddresses
from outrider.rpc.status import error_from_rpc
from outrider.rpc.tls import TlsSource
from outrider.v1 import verify_pb2
from outrider.v1.verify_pb2_grpc import VerifyServiceStub

Accept = Callable[[VerifyInfo], Awaitable[None]]
"""Takes what a replica serves; raises OutriderError if this gateway cannot use it."""

_logger = get_logger(__name__)

_PROBE_DEADLINE = 5.0
_LOAD_DEADLINE = 0.5
"""Seconds that a scrape waits for the loads of the verify replicas."""
_RETRY_SECONDS = 0.25
_MAX_RETRY_SECONDS = 2.0
_REPEAT_LOG_SECONDS = 30.0
_MAX_LOAD_RATIO = 1.5
_MAX_EXTRA_ANSWERS = 4
"""The preferred replica may have _MAX_LOAD_RATIO times the answers of the least loaded one, and this many more."""


class ReplicaState(Enum):
    """Whether requests may go to a replica."""

    CONNECTING = "connecting"
    """The replica has not answered yet, or it has been lost."""
    READY = "ready"
    UNSUITABLE = "unsuitable"
    """The replica answers, but serves something that this gateway cannot use."""


class Replica:
    """Follows one verify service, and notices when it starts, dies and comes back."""

    def __init__(
        self,
        address: str,
        *,
        auth_token: str | Callable[[], str] = "",
        tls: TlsSource | None = None,
        probe_seconds: float = 2.0,
        max_message_bytes: int,
    ) -> None:
        """`probe_seconds` is the time between two checks of a usable replica. Raises ConfigError on a bad address."""
        self.address = address
        self.state = ReplicaState.CONNECTING
        self.calls: set[grpc.aio.Call] = set()
        """Answers in progress."""
        self.load = VerifyLoad()
        self._probe_seconds = probe_seconds
        self._channel = open_channel(
            address, max_message_bytes=max_message_bytes, auth_token=auth_token, tls=tls, option="--verify"
        )
        self._stub = VerifyServiceStub(self._channel)
        self._probe_now = asyncio.Event()
        """Set by a call that failed, to check at once whether the replica is still there."""
        self._ended = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def follow(self, accept: Accept) -> None:
        """Keep the state up to date until cancelled."""
        pause, silent_until, last = _RETRY_SECONDS, 0.0, ""
        clock = asyncio.get_running_loop().time
        while True:
            self._probe_now.clear()
            problem = await self._probe(accept)
            if problem:
                pause = min(pause * 2, _MAX_RETRY_SECONDS)
                if problem != last or clock() >= silent_until:
                    _logger.warning("verify %s is not usable: %s; trying again", self.address, problem)
                    silent_until = clock() + _REPEAT_LOG_SECONDS
            else:
                pause = _RETRY_SECONDS
            last = problem
            with suppress(TimeoutError):
                async with asyncio.timeout(pause if problem else self._probe_seconds):
                    await self._probe_now.wait()

    async def _probe(self, accept: Accept) -> str:
        """Ask the replica once and set the state. Return what is wrong, empty if nothing is."""
        try:
            response = await self._stub.GetInfo(verify_pb2.VerifyServiceGetInfoRequest(), timeout=_PROBE_DEADLINE)
        except grpc.aio.AioRpcError as error:
            self.state = ReplicaState.CONNECTING
            return error_from_rpc(error, f"verify at {self.address}").message
        try:
            info = INFO.decode(response)
            await accept(info)
        except OutriderError as error:
            self.state = ReplicaState.UNSUITABLE
            return error.message
        except Exception as error:  # an unexpected error must not end `follow`
            _logger.error("verify %s: loading its model information failed", self.address, exc_info=error)
            self.state = ReplicaState.UNSUITABLE
            return "internal error"
        if self.state is not ReplicaState.READY:
            _logger.info("verify %s serves %s in %s", self.address, info.model, info.dtype)
        self.state = ReplicaState.READY
        return ""

    async def refresh_load(self) -> None:
        """Ask how busy the replica is; keep the last answer if none comes soon."""
        if self.state is not ReplicaState.READY:
            self.load = VerifyLoad()
            return
        try:
            self.load = LOAD.decode(
                await self._stub.GetLoad(verify_pb2.VerifyServiceGetLoadRequest(), timeout=_LOAD_DEADLINE)
            )
        except grpc.aio.AioRpcError as error:
            _logger.debug("verify %s reported no load: %s", self.address, error.code())

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationUpdate, None]:
        """Yield one answer; closing the iterator cancels the call. Raises OutriderError, also if the end is missing."""
        if self._ended.is_set():
            raise _shutting_down()
        call = self._stub.Generate(REQUEST.encode(request))
        self.calls.add(call)
        self._idle.clear()
        try:
            async for message in call:
                chunk = UPDATE.decode(message)
                yield chunk
                if chunk.finish_reason is not None:
                    return
        except grpc.aio.AioRpcError as error:
            # Verify knows the deadline, so it has ended the call, too.
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineError("the answer was not complete before its deadline; ask for fewer tokens") from None
            failure = error_from_rpc(error, "the verify service", names_addresses=False)
            if isinstance(failure, UnavailableError | InternalError):
                _logger.info("verify %s failed a call: %s", self.address, error.details())
            if isinstance(failure, UnavailableError):
                self._probe_now.set()
            raise failure from None
        except asyncio.CancelledError:
            # A call that `end_answers` has cancelled raises it, too; the task goes on and its client gets the error.
            task = asyncio.current_task()
            if not self._ended.is_set() or (task is not None and task.cancelling()):
                raise
            raise _shutting_down() from None
        finally:
            self.calls.remove(call)
            if not self.calls:
                self._idle.set()
            call.cancel()
        self._probe_now.set()
        raise UnavailableError("the verify service ended the answer without finishing it", code="answer_incomplete")

    def end_answers(self) -> None:
        """End the answers in progress, and begin no more: they raise UnavailableError with code draining."""
        self._ended.set()
        for call in tuple(self.calls):
            call.cancel()

    async def finish(self) -> None:
        """Wait for the end of the answers in progress, then close."""
        await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        """End all calls."""
        await self._channel.close()


def _shutting_down() -> UnavailableError:
    return UnavailableError("the gateway is shutting down and its drain time is over; try again", code="draining")


class Router:
    """Sends prompts with the same prefix to one replica, whose cache holds it, unless another is much less busy."""

    def __init__(
        self,
        addresses: PeerAddresses,
        connect: Callable[[str], Replica],
        *,
        affinity_tokens: int,
        accept: Callable[[VerifyInfo, Callable[[], bool]], Awaitable[None]],
    ) -> None:
        """`connect` makes the replica at an address.

        `accept` takes what a replica serves and whether no other one is ready; it raises OutriderError to refuse.
        """
        self._addresses = addresses
        self._connect = connect
        self._affinity_tokens = affinity_tokens
        self._accept = accept
        self._replicas = {address: connect(address) for address in addresses.now}
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        """The task that follows each replica or, if its address is gone, waits for the end of its last answers."""
        self._addresses_task: asyncio.Task[None] | None = None

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Replicas that may get requests."""
        return tuple(self._replicas.values())

    @property
    def ready(self) -> bool:
        """Whether any replica can take a request."""
        return any(r.state is ReplicaState.READY for r in self.replicas)

    def start(self) -> None:
        """Start to follow the replicas: which there are, and the state of each."""
        for replica in self.replicas:
            self._watch(replica)
        self._addresses_task = asyncio.create_task(self._follow_addresses(), name="follow addresses of verify")

    def end_answers(self) -> None:
        """End the answers in progress with an error that says why."""
        for replica in self._tasks:
            replica.end_answers()

    async def close(self) -> None:
        """Stop following, and end all calls."""
        replicas = {*self.replicas, *self._tasks}
        tasks = list(self._tasks.values())
        if self._addresses_task is not None:
            tasks.append(self._addresses_task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in replicas:
            await replica.close()

    def choose(self, prompt: Sequence[int], avoid: Collection[Replica] = (), *, tenant: str = "") -> Replica:
        """Return the replica for a tenant's prompt; those in `avoid` are a last resort. Raises UnavailableError."""
        ready = [r for r in self.replicas if r.state is ReplicaState.READY]
        ready = [r for r in ready if r not in avoid] or ready
        if not ready:
            raise UnavailableError("no verify service is ready; try again shortly", code="verify_unavailable")
        if len(ready) == 1:
            return ready[0]
        prefix = tenant.encode() + array("q", prompt[: self._affinity_tokens]).tobytes()
        preferred = max(ready, key=lambda r: _rendezvous(r.address, prefix))
        least_loaded = min(ready, key=lambda r: len(r.calls))
        if len(preferred.calls) > len(least_loaded.calls) * _MAX_LOAD_RATIO + _MAX_EXTRA_ANSWERS:
            return least_loaded
        return preferred

    async def generate(
        self, request: GenerationRequest, loose_grammar: Grammar | None = None
    ) -> AsyncGenerator[GenerationUpdate, None]:
        """Yield one answer; closing the iterator cancels the call. Raises OutriderError.

        An answer that fails before its first token is tried once more, elsewhere if possible: nobody has seen anything
        yet. Later there is no second try, because a client that counts tokens must not see them twice. If verify cannot
        compile the grammar, `loose_grammar` is used instead, if there is one.
        """
        avoid: tuple[Replica, ...] = ()
        while True:
            replica = self.choose(request.prompt_token_ids, avoid, tenant=request.tenant)
            started = False
            try:
                async with aclosing(replica.generate(request)) as chunks:
                    async for chunk in chunks:
                        started = True
                        yield chunk
                return
            except UnavailableError as error:
                if started or avoid:
                    raise
                avoid = (replica,)
                _logger.warning(
                    "verify %s failed before the first token, trying once more: %s", replica.address, error.message
                )
            except InvalidRequestError as error:
                if loose_grammar is None or started or error.code != "invalid_grammar":
                    raise
                request = replace(request, sampling=replace(request.sampling, grammar=loose_grammar))
                loose_grammar, avoid = None, ()

    async def _follow_addresses(self) -> None:
        async for addresses in self._addresses.follow():
            for address in self._replicas.keys() - addresses:
                self._leave(self._replicas.pop(address))
            for address in addresses:
                if address not in self._replicas:
                    replica = self._replicas[address] = self._connect(address)
                    self._watch(replica)

    def _watch(self, replica: Replica) -> None:
        def is_only_one() -> bool:
            return not any(r.state is ReplicaState.READY for r in self.replicas if r is not replica)

        following = replica.follow(lambda info: self._accept(info, is_only_one))
        self._tasks[replica] = asyncio.create_task(following, name=f"follow {replica.address}")

    def _leave(self, replica: Replica) -> None:
        """Give a replica no further requests, and let it finish the answers that it has begun."""
        self._tasks[replica].cancel()
        task = self._tasks[replica] = asyncio.create_task(replica.finish(), name=f"leave {replica.address}")
        task.add_done_callback(lambda _: self._tasks.pop(replica))


def _rendezvous(address: str, prefix: bytes) -> bytes:
    # Highest random weight: when a replica goes, only its own prompts move.
    return hashlib.blake2b(prefix, digest_size=8, key=address.encode()[-64:]).digest()
