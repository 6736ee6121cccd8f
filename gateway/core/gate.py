"""Limits of what the gateway lets in: concurrent answers, in all and by API key, and memory of answers; and drain."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.errors import InvalidRequestError, OverloadedError, UnavailableError
from outrider.rpc.call import client

_MEMORY_RETRY_AFTER_SECONDS = 5.0
_SHARE_OF_ONE = 4
"""One request may keep at most 1 / this of all values in memory."""
_NO_KEY = ("", "0")
"""Names of clients at a door with fewer than two keys."""


class Gate:
    """Counts answers in progress. Used from one event loop.

    A quarter of all places is kept for API keys that hold less than an even share, so that one key's flood never shuts
    out another. Clients without a key of their own share all places, first come first served.
    """

    def __init__(self, max_answers: int) -> None:
        self.max_answers = max_answers
        self.num_requests = 0
        self.draining = False
        """Whether the gateway is shutting down: it is no longer ready, but lets in calls already on their way."""
        self._closed = False
        self._held: Counter[str] = Counter()
        """Answers by key, for keys that have any."""
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_answers(self) -> int:
        """Answers of all keys."""
        return self._held.total()

    @contextmanager
    def enter(self) -> Iterator[Callable[[int], None]]:
        """Let a request in, with one place until it knows how many answers it needs.

        Yield a function that takes a place for each answer. It raises OverloadedError, or InvalidRequestError if they
        can never fit. Raises UnavailableError once `drain` was called, OverloadedError when full.
        """
        self.check()
        key, held = _key(), 0

        def reserve(num_answers: int) -> None:
            nonlocal held
            if num_answers > (limit := self._max_places(key)):
                raise InvalidRequestError(
                    "n",
                    f"{num_answers} answers are more than the limit of {limit}",
                    "ask for fewer answers or send fewer prompts at once",
                )
            if num_answers > held:  # the request keeps the places it has, whoever came in meanwhile
                self.take(num_answers - held, key)
                held = num_answers

        reserve(1)
        self.num_requests += 1
        self._empty.clear()
        try:
            yield reserve
        finally:
            self.num_requests -= 1
            self._held[key] -= held
            if not self._held[key]:
                del self._held[key]
            if self.num_requests == 0:
                self._empty.set()

    def check(self) -> None:
        """Raise what `enter` would raise now, but take no place: a client still sending its body must not hold one."""
        if self._closed:
            raise UnavailableError("the gateway is shutting down; try again elsewhere", code="draining")
        self._check(1, _key())

    def _max_places(self, key: str) -> int:
        """Return how many answers one request with this key can ever have."""
        return self.max_answers if key in _NO_KEY else self.max_answers - self.max_answers // 4

    def take(self, num_answers: int, key: str = "") -> None:
        """Take places. Raises OverloadedError if too few are left, in all or for this key."""
        self._check(num_answers, key)
        self._held[key] += num_answers

    def _check(self, num_answers: int, key: str) -> None:
        num_then = self.num_answers + num_answers
        if num_then > self.max_answers:
            raise OverloadedError(
                f"{self.num_answers} answers are in progress, the limit is {self.max_answers}; try again later"
            )
        # Counts at least two keys, so that the only key leaves something for the next one.
        share = max(1, self.max_answers // max(2, len({*self._held, key})))
        if num_then > self._max_places(key) and self._held[key] + num_answers > share:
            raise OverloadedError(
                "this API key already has its share of the answers in progress; try again later", code="share_used_up"
            )

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for those inside, at most `seconds`. Return whether all finished."""
        self.draining = self._closed = True
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True


def _key() -> str:
    return client.get().partition("/")[0]


class Turns:
    """A lock whose API keys take turns, however many of one key wait. Used from one event loop."""

    def __init__(self) -> None:
        self._is_held = False
        self._last = ""
        """The key that had the last turn."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Those who wait, by key; the key that has waited longest first."""

    async def __aenter__(self) -> None:
        """Wait for the lock."""
        key = _key()
        if self._is_held:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(key, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # the turn came all the same
                    self._pass_on()
                raise
        self._is_held, self._last = True, key

    async def __aexit__(self, *error: object) -> None:
        """Give the lock to the next one who waits."""
        self._pass_on()

    def _pass_on(self) -> None:
        self._is_held = False
        while self._waiting:
            key = next((key for key in self._waiting if key != self._last), self._last)
            turns = self._waiting.pop(key)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns
            if not turn.done():  # nobody may take the lock before the one whose turn it is runs
                self._is_held = True
                turn.set_result(None)
                return


class LogprobQuota:
    """Counts the values that all requests keep in memory. Used from one event loop."""

    def __init__(self, most: int) -> None:
        """`most` is the limit of values over all requests."""
        self.most = most
        self.most_of_one = max(1, most // _SHARE_OF_ONE)
        self.num_values = 0
        self.one_large = Turns()
        """Held while a body with very many values is built, which takes several times the memory of the values."""

    @contextmanager
    def open(self) -> Iterator[Callable[[int, str], None]]:
        """Let in a request that keeps values. Raises OverloadedError if most of the limit is taken; the rest is for
        requests under way.

        Yield a function that sets how many values the request keeps now, and which field asked for them. It raises
        OverloadedError, or InvalidRequestError about the field if they exceed the share of one request.
        """
        if self.num_values > self.most - self.most // _SHARE_OF_ONE:
            raise self._refusal()
        held = 0

        def hold(num_values: int, field: str) -> None:
            nonlocal held
            if num_values > self.most_of_one:
                raise InvalidRequestError(
                    field,
                    "log-probabilities, traced nodes and their tokens that are kept in memory are over the limit of "
                    f"{self.most_of_one} for one request",
                    "ask for fewer likely tokens, fewer answers or prompts at once, a lower limit of tokens, "
                    "or a stream",
                )
            more = num_values - held
            if more > 0 and self.num_values + more > self.most:
                raise self._refusal()
            self.num_values += more
            held = num_values

        try:
            yield hold
        finally:
            self.num_values -= held

    def _refusal(self) -> OverloadedError:
        return OverloadedError(
            f"answers in progress hold {self.num_values} log-probabilities and traced nodes, the limit is {self.most}; "
            "try again later, or stream",
            retry_after=_MEMORY_RETRY_AFTER_SECONDS,
            code="logprobs_used_up",
        )
