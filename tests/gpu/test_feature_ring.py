"""Features in device memory that another process reads, on the same GPU or on the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from cuda_harness import VOCAB, jobs, texts
from feature_draft import FeatureDraft, ProjectedDraft, random_projection
from harness import run_all, tokens
from local_draft import oracle
from ring_reader import Offerer, Reader
from threaded_engine import ThreadedEngine

from outrider.cuda_ipc import HANDLE_BYTES, DriverError, ExportedMemory, ImportedMemory
from outrider.drafting.model.features import map_ring
from outrider.models.decoder import CausalLM
from outrider.protocol.speculation import MAX_FEATURE_BYTES, Features, FeaturesBegin
from verify_service.executors.cuda import CudaExecutor
from verify_service.features.staging import NUM_SLOTS, RING_BYTES, Ring, RingPool

LAYERS = (0, 1, 3)
WHERE = [pytest.param("cuda:0", marks=pytest.mark.gpu), pytest.param("cuda:1", marks=pytest.mark.multi_gpu)]
Models = Callable[..., CausalLM]
Start = Callable[..., tuple[ThreadedEngine, CudaExecutor]]
MakeReader = Callable[[str], Reader]


@pytest.fixture
def reading() -> Iterator[MakeReader]:
    """Starts processes that read."""
    made: list[Reader] = []

    def begin(device: str) -> Reader:
        made.append(Reader(device))
        return made[-1]

    yield begin
    for reader in made:
        if reader.process.is_alive():
            reader.kill()


class RingDraft(FeatureDraft):
    """A draft whose features another process reads."""

    reader: Reader
    uses_ring = False
    gone = False

    def accept(self, begin: FeaturesBegin) -> None:
        assert begin.ring is not None, "the engine shares no memory"
        self.uses_ring = self.reader.map(begin.ring)
        given = self.projection if isinstance(self, ProjectedDraft) and begin.wants_projection else None
        self._engine.features.opened(self, self.window, self.uses_ring, given)

    def send_features(self, messages: list[Features]) -> None:
        if not self.gone:
            super().send_features(messages)

    def data_of(self, message: Features) -> bytes:
        assert message.ring_offset is not None and not message.data
        return self.reader.read(message.ring_offset, message.count * self._width * self._dtype.itemsize)


class ProjectedRingDraft(RingDraft, ProjectedDraft):
    """Takes products there."""


def new_ring() -> Ring:
    ring = RingPool(torch.device("cuda", 0), ExportedMemory).lend()
    assert ring is not None, "no device memory can be shared"
    return ring


@pytest.mark.parametrize("where", WHERE)
def test_another_process_reads_what_was_written(reading: MakeReader, where: str) -> None:
    ring = new_ring()
    reader = reading(where)
    assert reader.map(ring.description), "the other process cannot map it"
    offsets = [ring.take() for _ in range(NUM_SLOTS)]
    assert None not in offsets and max(offsets) + MAX_FEATURE_BYTES < RING_BYTES  # type: ignore[type-var, operator]
    for turn in range(2):
        for number, offset in enumerate(offsets):
            ring.rows(offset, MAX_FEATURE_BYTES).fill_((number + turn) % 256)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        for number, offset in enumerate(offsets):
            found = reader.read(offset, MAX_FEATURE_BYTES)  # type: ignore[arg-type]
            assert found == bytes([(number + turn) % 256]) * MAX_FEATURE_BYTES
    # Places that are no multiple of anything.
    assert len(reader.read(RING_BYTES - 1, 1)) == 1 and len(reader.read(257, 4099)) == 4099
    with pytest.raises(RuntimeError, match="do not lie"):
        reader.read(RING_BYTES - 1, 2)
    reader.unmap()
    with pytest.raises(RuntimeError, match="do not lie"):
        reader.read(0, 1)
    assert reader.map(ring.description), "a ring may be mapped again"


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_every_committed_position_is_read_by_another_process(
    small_models: Models,
    start: Start,
    reading: MakeReader,
    dtype: torch.dtype,
    tolerance: float,
    projected: bool,
    where: str,
) -> None:
    model = small_models(dtype=dtype)
    engine, _ = start(model)
    truth = run_all(engine, jobs(), speculate=False)
    guess = oracle(texts(truth), VOCAB)
    draft: RingDraft
    if projected:
        draft = ProjectedRingDraft(engine, VOCAB, guess, random_projection(LAYERS, 64, 64))
    else:
        draft = RingDraft(engine, VOCAB, guess, LAYERS)
    draft.reader = reading(where)
    draft.connect_and_wait()
    answers = run_all(engine, jobs(), 3)
    run_all(engine, jobs(), 3)
    engine.stop()
    assert draft.uses_ring, "the other process cannot map it"
    assert draft.check(model, tolerance) > 145
    if dtype is torch.float32:
        assert tokens(answers) == tokens(truth)


@pytest.mark.parametrize("where", WHERE)
def test_a_draft_that_is_killed_harms_nobody_and_its_ring_serves_the_next(
    small_models: Models, start: Start, reading: MakeReader, where: str
) -> None:
    model = small_models(dtype=torch.float32)
    engine, _ = start(model)
    truth = run_all(engine, jobs(), speculate=False)
    guess = oracle(texts(truth), VOCAB)
    dead, alive = RingDraft(engine, VOCAB, guess, LAYERS), RingDraft(engine, VOCAB, guess, LAYERS)
    dead.reader = reading(where)
    dead.releases = False
    dead.connect_and_wait()
    assert tokens(run_all(engine, jobs()[:6])) == tokens(truth[:6])
    assert dead.messages
    killed = threading.Event()

    def kill() -> None:
        dead.gone = True
        dead.reader.kill()
        killed.set()

    # Where it cannot be reading.
    engine.ask(kill)
    assert killed.wait(60)
    engine.draft_disconnected(dead)
    alive.reader = reading(where)
    alive.connect_and_wait()
    assert tokens(run_all(engine, jobs())) == tokens(truth)
    assert tokens(run_all(engine, jobs())) == tokens(truth)
    engine.stop()
    assert alive.check(model, 1e-3) > 145
    assert dead.begun is not None and alive.begun is not None
    assert dead.begun.ring == alive.begun.ring
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_process_reads_on_or_is_told_when_the_ring_s_owner_is_killed() -> None:
    owner = Offerer()
    device = torch.device("cuda", 0)
    ring = map_ring(owner.ring, lambda handle, num_bytes: ImportedMemory(handle, num_bytes, device))
    assert ring is not None, "this process cannot map it"

    def read() -> bytes:
        found = ring.read(owner.offset, 4096)
        assert isinstance(found, torch.Tensor)
        return found.cpu().numpy().tobytes()

    assert read() == bytes([7]) * 4096
    owner.kill()
    try:
        assert read() == bytes([7]) * 4096
    except DriverError as error:
        print(f"what a dead process shared cannot be read: {error}")
    ring.close()
    assert int(torch.arange(100, device=device).sum()) == 4950, "this process's own context is broken"


@pytest.mark.gpu
def test_what_is_no_handle_is_refused_and_harms_nothing() -> None:
    device = torch.device("cuda", 0)
    with pytest.raises(ValueError, match="no handle"):
        ImportedMemory(bytes(HANDLE_BYTES - 1), 4096, device)
    for handle in (bytes(HANDLE_BYTES), bytes(range(HANDLE_BYTES))):
        with pytest.raises(DriverError, match="cuIpcOpenMemHandle"):
            ImportedMemory(handle, 4096, device)
    assert int(torch.arange(100, device=device).sum()) == 4950
