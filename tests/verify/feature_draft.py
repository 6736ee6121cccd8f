"""A draft inside the engine's process that takes features and keeps them."""

from __future__ import annotations

from collections import defaultdict

import torch
from harness import Answer
from local_draft import Guess, LocalDraft

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.models.base import CausalLM
from outrider.tree.handshake import Terms
from outrider.tree.messages import Commit, Features, Open, VerifyMessage
from verify_service.engine import Engine


class FeatureDraft(LocalDraft):
    """Notes the features of each request that was opened, position by position, and releases them at once."""

    def __init__(self, engine: Engine, vocab_size: int, guess: Guess, layers: tuple[int, ...]) -> None:
        super().__init__(engine, vocab_size, guess)
        self.terms = Terms(feature_layers=layers)
        self.texts: dict[int, list[int]] = {}
        self.rows: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        self.finals: dict[int, int] = {}
        self.messages: list[Features] = []
        self.window = 0
        self.releases = True
        self.has_room = True
        self.num_begun = 0
        self._width = 0
        self._dtype = torch.float32

    def connect(self) -> None:
        self._engine.draft_connected(self, self.terms)

    def begin_features(self, layers: tuple[int, ...], width: int, dtype: str) -> None:
        assert layers == self.terms.feature_layers
        self.num_begun += 1
        self._width, self._dtype = width, getattr(torch, dtype)
        self._engine.features.opened(self, self.window)

    def send(self, messages: list[VerifyMessage]) -> None:
        for message in messages:
            if isinstance(message, Open):
                self.texts[message.request] = message.token_ids.tolist()
            elif isinstance(message, Commit):
                text = self.texts[message.request]
                text[message.length_before :] = message.token_ids.tolist()
        super().send(messages)

    def send_features(self, messages: list[Features]) -> None:
        for message in messages:
            self.messages.append(message)
            assert len(message.data) <= 1 << 18
            data = torch.frombuffer(bytearray(message.data), dtype=self._dtype).view(message.count, self._width)
            known = self.rows[message.request]
            for place, row in enumerate(data):
                assert message.start + place not in known, "sent twice"
                known[message.start + place] = row
            if message.final:
                self.finals[message.request] = message.start + message.count
        if self.releases:
            self.release()

    def release(self) -> None:
        through = self.messages[-1].sequence
        self._engine.ask(lambda: self._engine.features.released(self, through))

    def check(self, model: CausalLM, tolerance: float = 1e-4, preempted: bool = False) -> int:
        """Every committed position's features are here but the newest token's, and right. Returns how many.

        `preempted`: a request may have lost its pages, or its draft, before the last ones left.
        """
        count = 0
        for number, text in self.texts.items():
            rows = self.rows[number]
            end = len(rows) if preempted else len(text) - 1
            if not end:
                continue
            assert sorted(rows) == list(range(end)), (number, len(text))
            assert preempted or self.finals[number] == end
            expected = true_features(model, text[:end], self.terms.feature_layers)
            found = torch.stack([rows[position] for position in range(end)]).to(expected)
            error = (found - expected).float().norm(dim=1) / expected.float().norm(dim=1)
            assert error.max() <= tolerance, (number, int(error.argmax()), float(error.max()))
            count += len(rows)
        return count


def true_features(model: CausalLM, text: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """What one forward over the whole text gives."""
    count, device = len(text), model.device
    places = torch.arange(count, device=device)
    batch = ForwardBatch(torch.tensor(text, device=device), places, [Segment(count, places)])
    _, features = model.forward_with_features(batch, model.new_kv(count), TorchAttention(), layers)
    return torch.cat(features, 1)


def wait_for(answers: list[Answer]) -> None:
    for answer in answers:
        assert answer.done.wait(60)
