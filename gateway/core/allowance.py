"""What answers keep in memory until they are told: log-probabilities, nodes of traced trees, tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import InvalidRequestError, OverloadedError

_ONE_OF = 4
"""A request may keep one part in so many of all."""
_RETRY_AFTER = 5.0


class Allowance:
    """Counts what all requests keep. Used from one event loop."""

    def __init__(self, most: int) -> None:
        """`most`: values over all requests."""
        self.most = most
        self.most_of_one = max(1, most // _ONE_OF)
        self.num_values = 0
        self.one_large = asyncio.Lock()
        """Held while a body of very many values is made: that takes several times the memory of the values."""

    @contextmanager
    def open(self) -> Iterator[Account]:
        """The account of a request that wants values told. Raises OverloadedError when most of all are taken.

        The rest is for those that are under way.
        """
        if self.num_values > self.most - self.most // _ONE_OF:
            raise self.refusal()
        account = Account(self)
        try:
            yield account
        finally:
            self.num_values -= account.num_values

    def refusal(self) -> OverloadedError:
        """That there is no room."""
        return OverloadedError(
            f"answers under way hold {self.num_values} log-probabilities and traced nodes, the limit is {self.most}; "
            "try again later, or stream",
            retry_after=_RETRY_AFTER,
            code="logprobs_used_up",
        )


class Account:
    """What one request keeps."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self.num_values = 0

    def hold(self, num_values: int, field: str) -> None:
        """Says what is kept now. Raises InvalidRequestError about `field` over a request's share, OverloadedError."""
        allowance = self._allowance
        if num_values > allowance.most_of_one:
            raise InvalidRequestError(
                field,
                "log-probabilities, traced nodes and their tokens, which a request keeps in memory, are over the limit "
                f"of {allowance.most_of_one}",
                "ask for fewer likely tokens, fewer answers or prompts at once, a lower limit of tokens, or a stream",
            )
        more = num_values - self.num_values
        if more > 0 and allowance.num_values + more > allowance.most:
            raise allowance.refusal()
        allowance.num_values += more
        self.num_values = num_values
