"""A draft that says what a test wants, at times that a test sets."""

from __future__ import annotations

from harness import Answer, make_request

from outrider.protocol.speculation import Grow, VerifyMessage
from outrider.sampling.params import SamplingParams
from verify_service.engine.request import Request
from verify_service.speculation.drafts import Drafts


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """A port that notes what it is given."""

    def __init__(self, address: str = "recorder") -> None:
        self.address = address
        self.sent: list[VerifyMessage] = []
        self.num_resets = 0

    def send(self, messages: list[VerifyMessage]) -> None:
        self.sent += messages

    def reset(self) -> None:
        self.num_resets += 1

    def take(self, drafts: Drafts) -> list[VerifyMessage]:
        drafts.flush()
        sent, self.sent = self.sent, []
        return sent


def request(tokens: list[int]) -> Request:
    return make_request(Answer(), tokens, SamplingParams(), 50)


def tree(number: int, epoch: int, base_len: int, tokens: list[int], first: int = 1, score: float = -0.05) -> Grow:
    """A chain of tokens, node `first` and what hangs below it, behind the node before."""
    count = len(tokens)
    parents = list(range(first - 1, first - 1 + count))
    return Grow(
        number, epoch, base_len, base_len, first, parents, list(tokens),
        [score] * count, bytes(count),
    )  # fmt: skip


def follow(drafts: Drafts, one: Request, count: int = 1) -> None:
    """The request's last `count` tokens are committed."""
    drafts.on_commit(one)
    drafts.send_commit(one, count, credit=16)
    drafts.learn()
