"""Draft services inside the engine's process, with guesses that a test chooses."""

from __future__ import annotations

import random
from collections.abc import Callable

from threaded_engine import ThreadedEngine

from outrider.protocol.speculation import Close, Commit, Decline, DeclineReason, Open, VerifyMessage
from outrider.tree.author import Outcome, TreeAuthor

Guess = Callable[[TreeAuthor], None]


class LocalDraft:
    """A draft whose answers are in the engine's inbox when the next round is planned."""

    def __init__(self, engine: ThreadedEngine, vocab_size: int, guess: Guess) -> None:
        self.address = "local"
        self.num_resets = 0
        self.authors: dict[int, TreeAuthor] = {}
        self._engine = engine
        self._vocab_size = vocab_size
        self._guess = guess

    def send(self, messages: list[VerifyMessage]) -> None:
        for message in messages:
            match message:
                case Open():
                    self.authors[message.request] = TreeAuthor(message, self._vocab_size)
                    self._grow(message.request)
                case Commit():
                    author = self.authors.get(message.request)
                    if author is None or author.apply(message) is Outcome.GAP:
                        decline = Decline(message.request, DeclineReason.GAP, True)
                        self._engine.draft_received(self, [decline])
                    else:
                        self._grow(message.request)
                case Close():
                    self.authors.pop(message.request, None)

    def reset(self) -> None:
        self.num_resets += 1

    def _grow(self, request: int) -> None:
        author = self.authors[request]
        self._guess(author)
        while (grow := author.take(64)) is not None:
            self._engine.draft_received(self, [grow])


def chain(author: TreeAuthor, tokens: list[int], score: float = -0.1) -> None:
    """Grow `tokens` one below the other from the root."""
    node: int | None = author.root
    for token in tokens:
        if node is None:
            return
        known = author.child(node, token)
        node = known if known is not None else author.add(node, token, score, 0)


def oracle(answers: dict[tuple[int, ...], list[int]], vocab_size: int, depth: int = 6) -> Guess:
    """Replays recorded texts (by prompt), and hangs wrong siblings beside the right nodes."""

    def guess(author: TreeAuthor) -> None:
        text = answers[tuple(author.tokens[: author.prompt_len])]
        right = text[author.committed_len : author.committed_len + depth]
        chain(author, right)
        chain(author, [(token + 1) % vocab_size for token in right[:2]], -0.5)

    return guess


def wrong(answers: dict[tuple[int, ...], list[int]], vocab_size: int) -> Guess:
    """Grows only tokens that the target will not choose."""

    def guess(author: TreeAuthor) -> None:
        text = answers[tuple(author.tokens[: author.prompt_len])]
        right = text[author.committed_len : author.committed_len + 4]
        chain(author, [(token + 1) % vocab_size for token in right])

    return guess


def noise(seed: int, vocab_size: int) -> Guess:
    """Grows random tokens at random places with random scores."""
    source = random.Random(seed)

    def guess(author: TreeAuthor) -> None:
        for _ in range(8):
            parent = source.choice(author.live_ids())
            author.add(parent, source.randrange(vocab_size), -source.random(), source.randrange(4))

    return guess
