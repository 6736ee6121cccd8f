"""Features that lie in a ring which the draft reads: what is where, what is free when, and what happens without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from cuda_harness import VOCAB, jobs, texts
from feature_draft import FeatureDraft, ProjectedDraft, random_projection
from harness import Answer, run_all, tokens
from local_draft import oracle
from shared_file import MappedFile, SharedFiles
from threaded_engine import ThreadedEngine

from outrider.models.decoder import CausalLM
from outrider.protocol.speculation import MAGIC_BYTES, MAX_FEATURE_BYTES, Features, FeaturesBegin
from verify_service.features.staging import NUM_SLOTS, Ring, RingPool

LAYERS = (0, 1, 3)
Start = Callable[..., ThreadedEngine]


class RingDraft(FeatureDraft):
    """Reads the ring when it is told where its features lie."""

    maps = True
    memory: MappedFile | None = None

    def accept(self, begin: FeaturesBegin) -> None:
        if begin.ring is not None and self.maps:
            self.memory = MappedFile(begin.ring.handle, begin.ring.num_bytes)
            for place in (0, begin.ring.num_bytes - MAGIC_BYTES):
                assert self.memory.peek(place, MAGIC_BYTES) == begin.ring.magic
        given = self.projection if isinstance(self, ProjectedDraft) else None
        self._engine.features.opened(self, self.window, self.memory is not None, given)

    def data_of(self, message: Features) -> bytes | memoryview:
        if self.memory is None:
            assert message.ring_offset is None
            return message.data
        assert message.ring_offset is not None and not message.data
        return self.memory.read(message.ring_offset, message.count * self._width * self._dtype.itemsize)


class ProjectedRingDraft(RingDraft, ProjectedDraft):
    """Both."""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedFiles:
    """From now on engines share files with drafts."""
    made = SharedFiles(tmp_path)
    monkeypatch.setattr("verify_service.features.staging.RingPool", lambda device, share: RingPool(device, made))
    return made


def reading(engine: ThreadedEngine, truth: list[Answer], layers: tuple[int, ...] = LAYERS) -> RingDraft:
    return RingDraft(engine, VOCAB, oracle(texts(truth), VOCAB), layers)


def ring_of(engine: ThreadedEngine, draft: FeatureDraft) -> Ring | None:
    channel = engine.drafts.replicas[draft].channel
    assert channel is not None
    return channel.ring


@pytest.mark.parametrize("kind", ["torch", "paged"])
@pytest.mark.parametrize("width", [1, 4])
def test_every_committed_position_lies_in_the_ring(
    model: CausalLM, truth: list[Answer], start: Start, files: SharedFiles, kind: str, width: int
) -> None:
    engine = start(kind)
    draft = reading(engine, truth)
    draft.connect()
    engine.start()
    draft.wait()
    assert tokens(run_all(engine, jobs(), width)) == tokens(truth)
    engine.stop()
    assert draft.check(model) > 145
    ring = ring_of(engine, draft)
    assert ring is not None and len(files.made) == 1
    # Slots come back with the releases.
    assert len(ring._free) + len(engine.drafts.replicas[draft].channel.lent) == NUM_SLOTS  # type: ignore[union-attr]
    assert len(ring._free) >= NUM_SLOTS - 1
    assert {(message.ring_offset - 256) // MAX_FEATURE_BYTES for message in draft.messages} <= set(range(NUM_SLOTS))  # type: ignore[operator]


def test_products_lie_in_the_ring(model: CausalLM, truth: list[Answer], start: Start, files: SharedFiles) -> None:
    engine = start("paged")
    draft = ProjectedRingDraft(engine, VOCAB, oracle(texts(truth), VOCAB), random_projection(LAYERS, 64, 48))
    draft.connect()
    engine.start()
    draft.wait()
    assert tokens(run_all(engine, jobs(), 2)) == tokens(truth)
    engine.stop()
    assert draft.check(model, 1e-3) > 145 and len(files.made) == 1


def test_what_is_not_released_stays_and_a_full_ring_holds_up_this_draft_alone(
    model: CausalLM, truth: list[Answer], start: Start, files: SharedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify_service.features.staging.NUM_SLOTS", 5)
    monkeypatch.setattr("verify_service.features.staging.RING_BYTES", 5 * MAX_FEATURE_BYTES + 512)
    engine = start("torch")
    slow, other = reading(engine, truth), reading(engine, truth)
    slow.releases = False
    slow.connect()
    other.connect()
    engine.start()
    other.wait()
    assert tokens(run_all(engine, jobs(), 2)) == tokens(truth)
    engine.stop()
    offsets = [message.ring_offset for message in slow.messages]
    assert len(set(offsets)) == 5 == len(offsets), "a slot was written again that nobody has released"
    ring = ring_of(engine, slow)
    assert ring is not None and len(ring._free) == 0
    expected = {message.sequence: bytes(slow.data_of(message)) for message in slow.messages}
    assert len(expected) == 5
    assert other.check(model) > 50
    assert slow.check(model, preempted=True) > 5


def test_a_draft_that_declines_the_ring_gets_messages_and_the_next_one_the_ring(
    model: CausalLM, truth: list[Answer], start: Start, files: SharedFiles
) -> None:
    engine = start("paged")
    far, near = reading(engine, truth), reading(engine, truth)
    far.maps = False
    far.connect()
    engine.start()
    far.wait()
    assert tokens(run_all(engine, jobs()[:4])) == tokens(truth[:4])
    assert ring_of(engine, far) is None
    near.connect()
    assert tokens(run_all(engine, jobs())) == tokens(truth)
    engine.stop()
    assert len(files.made) == 1
    assert all(message.ring_offset is None for message in far.messages)
    assert near.messages and all(message.ring_offset is not None for message in near.messages)
    assert far.check(model) > 50 and near.check(model) > 50


def test_the_ring_of_a_draft_that_died_serves_the_next(
    model: CausalLM, truth: list[Answer], start: Start, files: SharedFiles
) -> None:
    engine = start("paged")
    dead, alive = reading(engine, truth), reading(engine, truth)
    dead.releases = False
    dead.connect()
    engine.start()
    dead.wait()
    assert tokens(run_all(engine, jobs()[:6], 3)) == tokens(truth[:6])
    assert dead.messages
    engine.draft_disconnected(dead)
    alive.connect()
    assert tokens(run_all(engine, jobs())) == tokens(truth)
    engine.stop()
    assert alive.check(model) > 145 and len(files.made) == 1
    ring = ring_of(engine, alive)
    assert ring is not None and len(ring._free) >= NUM_SLOTS - 1


def test_where_no_memory_can_be_shared_features_are_in_the_messages(
    model: CausalLM, truth: list[Answer], start: Start, files: SharedFiles
) -> None:
    files.fails = True
    engine = start("paged")
    draft = reading(engine, truth)
    draft.connect()
    engine.start()
    draft.wait()
    assert tokens(run_all(engine, jobs())) == tokens(truth)
    engine.stop()
    assert draft.memory is None and draft.begun is not None and draft.begun.ring is None
    assert draft.check(model) > 145


def test_a_pool_lends_what_is_free_and_shares_no_more_than_it_must(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path)
    pool = RingPool(torch.device("cpu"), files)
    first, second = pool.lend(), pool.lend()
    assert first is not None and second is not None
    assert first.description.magic != second.description.magic and first.description.handle != second.description.handle
    taken = [first.take() for _ in range(NUM_SLOTS + 1)]
    assert taken[-1] is None and len(set(taken)) == NUM_SLOTS + 1
    free = partial(first.give_back, taken[3])  # type: ignore[arg-type]
    pool.take_back(first)
    again = pool.lend()
    assert again is not None and again.description == first.description and len(again._free) == NUM_SLOTS
    free()
    assert len(again._free) == NUM_SLOTS, "what the dead one gives back is not the next one's"
    assert len(files.made) == 2
