"""How much work this gateway takes on at once, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.core.shares import Shares
from outrider.errors import InvalidRequestError, OverloadedError, UnavailableError
from outrider.rpc.call import client

_RETRY_AFTER = 1.0


class Ticket:
    """A request inside the gate; holds one place until it knows how many answers it needs."""

    def __init__(self, gate: Gate, key: str) -> None:
        """`key`: which API key it came with, where there are several."""
        self._gate = gate
        self.key = key
        self.num_answers = 1

    def reserve(self, num_answers: int) -> None:
        """Takes a place for each answer. Raises OverloadedError, or InvalidRequestError if they can never fit."""
        limit = self._gate.most(self.key)
        if num_answers > limit:
            raise InvalidRequestError(
                "n",
                f"{num_answers} answers are more than the limit of {limit}",
                "ask for fewer answers or send fewer prompts at once",
            )
        self._gate.take(num_answers - self.num_answers, self.key)
        self.num_answers = num_answers


class Gate:
    """Counts answers in the making. Used from one event loop."""

    def __init__(self, max_answers: int) -> None:
        self.max_answers = max_answers
        self.num_answers = 0
        self.num_requests = 0
        self.draining = False
        self._shares = Shares(max_answers)
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def enter(self) -> Iterator[Ticket]:
        """Lets a request in. Raises UnavailableError while draining, OverloadedError when full."""
        ticket = Ticket(self, _key())
        self.check()
        self.take(1, ticket.key)
        self.num_requests += 1
        self._empty.clear()
        try:
            yield ticket
        finally:
            self.num_requests -= 1
            self.num_answers -= ticket.num_answers
            self._shares.add(ticket.key, -ticket.num_answers)
            if self.num_requests == 0:
                self._empty.set()

    def check(self) -> None:
        """Raises what `enter` would raise now, and takes no place: whoever still sends its body must not hold one."""
        if self.draining:
            raise UnavailableError("the gateway is shutting down; try again elsewhere", code="draining")
        self._check(1, _key())

    def most(self, key: str) -> int:
        """Answers that one request with this key can ever have."""
        return self._shares.most(key)

    def take(self, num_answers: int, key: str = "") -> None:
        """Takes places. Raises OverloadedError when there are not enough, or none for this key beside the others'."""
        self._check(num_answers, key)
        self.num_answers += num_answers
        self._shares.add(key, num_answers)

    def _check(self, num_answers: int, key: str) -> None:
        if self.num_answers + num_answers > self.max_answers:
            raise OverloadedError(
                f"{self.num_answers} answers are in the making, the limit is {self.max_answers}; try again later",
                retry_after=_RETRY_AFTER,
            )
        if not self._shares.allows(key, self.num_answers, num_answers):
            raise OverloadedError(
                "this API key has its share of the answers in the making; try again later",
                retry_after=_RETRY_AFTER,
                code="share_used_up",
            )

    async def drain(self, seconds: float) -> bool:
        """Refuses new requests and waits for those inside, at most `seconds`. Returns whether all finished."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True


def _key() -> str:
    return client.get().partition("/")[0]
