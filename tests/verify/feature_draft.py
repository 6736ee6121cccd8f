"""A draft inside the engine's process that takes features and keeps them."""

from __future__ import annotations

import threading
from collections import defaultdict

import torch
from harness import Answer
from local_draft import Guess, LocalDraft
from threaded_engine import ThreadedEngine

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.models.decoder import CausalLM
from outrider.protocol.speculation import Commit, Features, FeaturesBegin, Open, VerifyMessage
from outrider.tree.handshake import Projection, Terms, name_projection


class FeatureDraft(LocalDraft):
    """Notes the features of each request that was opened, position by position, and releases them at once."""

    def __init__(self, engine: ThreadedEngine, vocab_size: int, guess: Guess, layers: tuple[int, ...]) -> None:
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
        self.begun: FeaturesBegin | None = None
        self._width = 0
        self._dtype = torch.float32

    def connect(self) -> None:
        self._engine.draft_connected(self, self.terms)

    def connect_and_wait(self) -> None:
        """Connect, and wait until a running engine stores what this takes."""
        self.connect()
        self.wait()

    def wait(self) -> None:
        """Wait for that."""
        stored = threading.Event()

        def look() -> None:
            if self._engine.features.num_waiting:
                self._engine.ask(look)
            else:
                stored.set()

        self._engine.ask(look)
        assert stored.wait(60)

    def begin_features(self, begin: FeaturesBegin) -> None:
        assert begin.layers == self.terms.feature_layers
        self.num_begun += 1
        self.begun = begin
        self._width, self._dtype = begin.width, getattr(torch, begin.dtype)
        self.accept(begin)

    def accept(self, begin: FeaturesBegin) -> None:
        self._engine.features.opened(self, self.window)

    def data_of(self, message: Features) -> bytes | memoryview:
        return message.data

    def send(self, messages: list[VerifyMessage]) -> None:
        for message in messages:
            if isinstance(message, Open):
                self.texts[message.request] = list(message.token_ids)
            elif isinstance(message, Commit):
                text = self.texts[message.request]
                text[message.length_before :] = list(message.token_ids)
        super().send(messages)

    def send_features(self, messages: list[Features]) -> None:
        for message in messages:
            self.messages.append(message)
            assert len(message.data) <= 1 << 18
            data = torch.frombuffer(bytearray(self.data_of(message)), dtype=self._dtype).view(
                message.count, self._width
            )
            known = self.rows[message.request]
            for place, row in enumerate(data):
                assert message.start + place not in known, "sent twice"
                known[message.start + place] = row
            if message.final:
                self.finals[message.request] = message.start + message.count
        if self.releases:
            self.release()

    def expected(self, features: torch.Tensor) -> torch.Tensor:
        """What should come for these."""
        return features

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
            expected = self.expected(true_features(model, text[:end], self.terms.feature_layers))
            found = torch.stack([rows[position] for position in range(end)]).to(expected)
            error = (found - expected).float().norm(dim=1) / expected.float().norm(dim=1)
            assert error.max() <= tolerance, (number, int(error.argmax()), float(error.max()))
            count += len(rows)
        return count


class ProjectedDraft(FeatureDraft):
    """Offers a projection."""

    def __init__(self, engine: ThreadedEngine, vocab_size: int, guess: Guess, projection: Projection) -> None:
        super().__init__(engine, vocab_size, guess, projection.layers)
        self.projection = projection
        self.terms = Terms(
            feature_layers=projection.layers,
            projection_columns=projection.num_columns,
            projection_hash=projection.name,
        )

    def accept(self, begin: FeaturesBegin) -> None:
        given = self.projection if begin.wants_projection else None
        self._engine.features.opened(self, self.window, projection=given)

    def expected(self, features: torch.Tensor) -> torch.Tensor:
        assert self.begun is not None
        if not self.begun.projected:
            return features
        matrix = torch.frombuffer(bytearray(self.projection.data), dtype=getattr(torch, self.projection.dtype))
        return features @ matrix.view(self.projection.num_columns, -1).to(features).T


def random_projection(
    layers: tuple[int, ...], hidden: int, columns: int, seed: int = 1, dtype: str = "float32"
) -> Projection:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(columns, len(layers) * hidden, generator=generator).to(getattr(torch, dtype))
    data = bytes(matrix.view(torch.uint8).numpy().data)
    return Projection(layers, columns, dtype, data, name_projection(layers, columns, dtype, data))


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
