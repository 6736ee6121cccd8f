"""Which verify replica an answer goes to."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing

from gateway.core.replica import Replica, ReplicaState
from outrider.errors import UnavailableError
from outrider.logs import get_logger
from outrider.protocol.generation import GenerationRequest, GenerationUpdate, VerifyInfo
from outrider.rpc.names import PeerAddresses

_logger = get_logger(__name__)

_MAX_LOAD_RATIO = 1.5
_MAX_EXTRA_ANSWERS = 4
"""How far the preferred replica's load may be over the least loaded one's: so many times as high, and so many more."""


class Router:
    """Sends prompts of equal prefix to one replica, whose cache holds it, unless it is much busier than another."""

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
        self._leaving: dict[Replica, asyncio.Task[None]] = {}
        """Replicas whose address is gone, until their last answers have ended."""
        self._watches: dict[Replica, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Those that may get requests."""
        return tuple(self._replicas.values())

    @property
    def ready(self) -> bool:
        """Whether any replica can take a request."""
        return any(r.state is ReplicaState.READY for r in self.replicas)

    def start(self) -> None:
        """Starts to follow the replicas: which there are, and the state of each."""
        for replica in self.replicas:
            self._watch(replica)
        self._task = asyncio.create_task(self._follow_addresses(), name="follow addresses of verify")

    def end_answers(self) -> None:
        """Ends the answers in the making with an error that says why."""
        for replica in (*self.replicas, *self._leaving):
            replica.end_answers()

    async def close(self) -> None:
        """Stops following, and ends all calls."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        replicas = (*self.replicas, *self._leaving)
        tasks = (*self._watches.values(), *self._leaving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in replicas:
            await replica.close()

    async def refresh_loads(self) -> None:
        """Asks all replicas at once how busy they are."""
        await asyncio.gather(*(r.refresh_load() for r in self.replicas))

    def choose(self, prompt: Sequence[int], avoid: Collection[Replica] = (), *, tenant: str = "") -> Replica:
        """The replica for a tenant's prompt; those in `avoid` only if there is no other. Raises UnavailableError."""
        ready = [r for r in self.replicas if r.state is ReplicaState.READY]
        ready = [r for r in ready if r not in avoid] or ready
        if not ready:
            raise UnavailableError("no verify service is ready; try again shortly", code="verify_unavailable")
        if len(ready) == 1:
            return ready[0]
        prefix = tenant.encode() + array("q", prompt[: self._affinity_tokens]).tobytes()
        preferred = max(ready, key=lambda r: _rendezvous(r.address, prefix))
        least_loaded = min(ready, key=lambda r: r.num_answers)
        if preferred.num_answers > least_loaded.num_answers * _MAX_LOAD_RATIO + _MAX_EXTRA_ANSWERS:
            return least_loaded
        return preferred

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationUpdate, None]:
        """One answer; closing the iterator cancels the call. Raises OutriderError.

        An answer that fails before its first token is tried once more, where possible elsewhere: nobody has seen
        anything yet. Later it fails, because a client that counts tokens must not see them twice.
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

    async def _follow_addresses(self) -> None:
        async for addresses in self._addresses.follow():
            for address in self._replicas.keys() - addresses:
                self._leave(self._replicas.pop(address))
            for address in addresses:
                if address not in self._replicas:
                    replica = self._replicas[address] = self._connect(address)
                    self._watch(replica)

    def _watch(self, replica: Replica) -> None:
        self._watches[replica] = asyncio.create_task(self._follow(replica), name=f"follow {replica.address}")

    def _leave(self, replica: Replica) -> None:
        """Gives a replica no further request; what it answers already, it may finish."""
        if (watch := self._watches.pop(replica, None)) is not None:
            watch.cancel()
        task = asyncio.create_task(replica.finish(), name=f"leave {replica.address}")
        self._leaving[replica] = task
        task.add_done_callback(lambda _: self._leaving.pop(replica, None))

    async def _follow(self, replica: Replica) -> None:
        def is_only_one() -> bool:
            return not any(r.state is ReplicaState.READY for r in self.replicas if r is not replica)

        await replica.follow(lambda info: self._accept(info, is_only_one))


def _rendezvous(address: str, prefix: bytes) -> bytes:
    # Highest random weight: when a replica goes, only its own prompts move.
    return hashlib.blake2b(prefix, digest_size=8, key=address.encode()[-64:]).digest()
