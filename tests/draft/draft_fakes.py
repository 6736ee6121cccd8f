"""A drafter and a peer that do what a test tells them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Sequence

from outrider.drafting.base import Candidate, Drafter, FrontierNode
from outrider.drafting.tree_growth import Tree
from outrider.protocol.speculation import Commit, Decline, DeclineReason, DraftMessage, Grow, Open
from outrider.sampling.params import SamplingParams
from outrider.tree.mirror import TreeMirror

VOCAB = 100
GREEDY = SamplingParams(temperature=0.0)

Guesses = dict[int, float]
"""Token to chance."""


def evenly(node: FrontierNode) -> Guesses:
    """Two children everywhere: one likely, one not."""
    return {(node.token + 1) % VOCAB: 0.6, (node.token + 2) % VOCAB: 0.3}


class ScriptedDrafter(Drafter):
    """Guesses what a function says and keeps a record of what it was asked."""

    sources = ("scripted",)

    def __init__(self, guess: Callable[[FrontierNode], Guesses] = evenly) -> None:
        self.guess = guess
        self.open_requests: dict[int, list[int]] = {}
        self.known: dict[int, set[int]] = {}
        self.asked: list[FrontierNode] = []
        self.widths: list[int] = []

    def open(self, tree: Tree) -> None:
        self.open_requests[tree.handle] = list(tree.author.tokens)
        self.known[tree.handle] = {0}

    def commit(self, request: int, tokens: Sequence[int], root: int, live: Collection[int]) -> None:
        self.open_requests[request].extend(tokens)
        self.known[request] = {node for node in self.known[request] if node in live} | {root}

    def expand(self, frontier: Sequence[FrontierNode]) -> list[list[Candidate]]:
        self.widths.append(len(frontier))
        for node in frontier:
            self.asked.append(node)
            known = self.known[node.request]
            if node.parent not in known and node.node not in known:
                raise RuntimeError(f"node {node.node} hangs below {node.parent}, which was never a frontier node")
            known.add(node.node)
        return [
            [Candidate(token, math.log(chance), 0) for token, chance in self.guess(node).items()] for node in frontier
        ]

    def close(self, request: int) -> None:
        del self.open_requests[request]
        del self.known[request]

    def forget_target(self) -> None:
        pass


class RecordingPort:
    """Keeps what it is sent."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self.vocab_size = vocab_size
        self.parts: frozenset[int] | None = None
        self.received: list[DraftMessage] = []

    def send(self, messages: Sequence[DraftMessage]) -> None:
        self.received.extend(messages)

    def take(self) -> list[DraftMessage]:
        received, self.received = self.received, []
        return received

    def grows(self) -> list[Grow]:
        return [message for message in self.take() if isinstance(message, Grow)]

    def reasons(self) -> list[DeclineReason]:
        return [message.reason for message in self.take() if isinstance(message, Decline)]


def open_message(tokens: Sequence[int], request: int = 1, credit: int = 64, sampling: SamplingParams = GREEDY) -> Open:
    return Open(request, list(tokens), len(tokens), sampling, credit)


def commit_message(
    before: int, tokens: Sequence[int], request: int = 1, mirror: TreeMirror | None = None, credit: int = 64
) -> Commit:
    epoch, seen, root = (mirror.epoch, mirror.received_through, mirror.resolved_root) if mirror else (0, 0, None)
    return Commit(request, before, list(tokens), epoch, seen, root, credit)


class SignallingDrafter(ScriptedDrafter):
    """Tells when the last request was closed."""

    def __init__(self, guess: Callable[[FrontierNode], Guesses] = evenly) -> None:
        super().__init__(guess)
        self.empty = threading.Event()

    def close(self, request: int) -> None:
        super().close(request)
        if not self.open_requests:
            self.empty.set()
