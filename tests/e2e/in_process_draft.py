"""A draft service's requests inside the verify engine's process, stepped by what verify says."""

from __future__ import annotations

import math

import torch
from threaded_engine import ThreadedEngine

from outrider.config.draft import DraftOptions
from outrider.drafting.base import AnyDrafter, Needs
from outrider.drafting.model.build import build_runner
from outrider.drafting.model.drafter import ModelDrafter
from outrider.drafting.requests import Requests
from outrider.models.drafters.base import DraftModel
from outrider.protocol.speculation import Commit, DraftMessage, Features, FeaturesBegin, VerifyMessage
from outrider.tree.author import TreeAuthor
from outrider.tree.handshake import Terms


def drafter_of(model: DraftModel, options: DraftOptions) -> ModelDrafter:
    """A draft model with the runner that its options ask for."""
    needs = Needs(
        vocab_size=model.target_vocab_size, hidden_size=model.hidden_size, feature_layers=tuple(model.feature_layers)
    )
    return ModelDrafter(build_runner(model, options), ("draft",), needs)


class InProcessDraft:
    """A port whose draft does all that it can whenever verify has said something; nothing depends on time.

    In lockstep that is while a round waits for it, else while a round is under way. With `turns`, it takes no more
    turns for each thing that it is told.
    """

    def __init__(self, engine: ThreadedEngine, drafter: AnyDrafter, options: DraftOptions, turns: int = 1000) -> None:
        self.address = "in-process"
        self.vocab_size = engine.limits.vocab_size
        self.parts: frozenset[int] | None = None
        self.requests = Requests(drafter, options)
        self.num_resets = 0
        self.committed: list[int | None] = []
        """Of each committed token that a live node's children could have held: its place among them, None if none."""
        self.has_room = True
        self.num_features = 0
        self._engine = engine
        self._turns = turns
        self._answers: list[DraftMessage] = []
        self._dtype = ""
        engine.draft_connected(self, Terms(feature_layers=drafter.needs.feature_layers))

    def send(self, messages: list[VerifyMessage] | list[DraftMessage]) -> None:
        """Of verify to the draft, or of the draft to verify: each finds the other here."""
        for message in messages:
            if isinstance(message, DraftMessage):
                self._answers.append(message)
                continue
            if isinstance(message, Commit):
                self._rank(message)
            self.requests.handle(self, message)
        if messages and not isinstance(messages[0], DraftMessage):
            self._work()

    def begin_features(self, begin: FeaturesBegin) -> None:
        self._dtype = begin.dtype
        self._engine.ask(lambda: self._engine.features.opened(self, 0))

    def send_features(self, messages: list[Features]) -> None:
        for message in messages:
            self.num_features += message.count
            self.requests.handle(self, message)
        through = messages[-1].sequence
        self._engine.ask(lambda: self._engine.features.released(self, through))
        self._work()

    def reset(self) -> None:
        self.num_resets += 1

    def _work(self) -> None:
        growth = self.requests.growth
        with torch.inference_mode():
            for _ in range(self._turns):
                if growth.idle:
                    break
                growth.grow(math.inf, lambda: False)
        self.requests.send_nodes()
        answers, self._answers = self._answers, []
        if answers:
            self._engine.draft_received(self, answers)

    def _rank(self, commit: Commit) -> None:
        """Note which children of the tree were committed."""
        tree = self.requests._trees.get((self, commit.request))
        if tree is None or commit.length_before != tree.author.committed_len:
            return
        author: TreeAuthor = tree.author
        node = author.root
        for token in commit.token_ids:
            below = author.children(node)
            if not below:
                return
            best_first = sorted(below, key=lambda child: -author.node(below[child]).score)
            self.committed.append(best_first.index(token) if token in below else None)
            if token not in below:
                return
            node = below[token]
