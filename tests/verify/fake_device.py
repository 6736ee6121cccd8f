"""A device whose rounds end when a test says so, and an engine on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness import PAGE_SIZE, Answer, Silence, make_request
from threaded_engine import ThreadedEngine

from outrider.sampling.params import SamplingParams
from verify_service.engine.memory import Memory
from verify_service.engine.postprocessor import Observer
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Growth, Pending, Result
from verify_service.engine.scheduler import EngineLimits
from verify_service.speculation.budget import WIDTHS, CostModel

VOCAB = 61


def count_up(position: int) -> int:
    """The token that the fake target commits at a position."""
    return position % VOCAB


def nothing() -> None:
    """What happens while a round is under way."""


class FakeRound(Pending):
    """A round that is over at the third look; `during` happens at the first."""

    gap_seconds = 0.25
    gpu_seconds = 0.5

    def __init__(self, device: FakeDevice, entries: Sequence[Entry]) -> None:
        self._device = device
        self._results = [device.result(entry) for entry in entries]
        self._num_looks = 0

    def done(self) -> bool:
        self._num_looks += 1
        if self._num_looks == 1:
            self._device.during()
        return self._num_looks >= 3

    def wait(self) -> list[Result]:
        self._device.events.append("wait")
        return self._results


class FakeDevice:
    """Accepts nodes as far as they count up, and notes what it is asked to do."""

    launches_ahead = False

    def __init__(self, spin: bool = False) -> None:
        """`spin`: its engine never sleeps while requests run."""
        self.spin = spin
        self.during: Callable[[], None] = nothing
        self.events: list[str] = []
        self.rounds: list[list[tuple[Request, int, int]]] = []
        """Request, tokens to extend by and nodes of each entry."""
        self.forgotten: list[Request] = []

    def launch(self, entries: Sequence[Entry], growth: Growth | None = None) -> FakeRound:
        self.events.append("launch")
        self.rounds.append([(entry.request, entry.num_extend, len(entry.nodes)) for entry in entries])
        for entry in entries:
            covered = len(entry.request.pages) * PAGE_SIZE
            assert covered >= entry.start + entry.num_tokens, "pages must cover the round"
        return FakeRound(self, entries)

    def dry_run(self, entries: Sequence[Entry]) -> None:
        """See Executor."""

    def forget(self, request: Request) -> None:
        self.forgotten.append(request)

    def result(self, entry: Entry) -> Result:
        return Result(self.target(entry)) if entry.samples else Result()

    def target(self, entry: Entry) -> list[int]:
        nodes, position = entry.nodes, entry.request.committed_len
        below = {node: i for i, node in enumerate(zip(nodes.parents, nodes.token_ids, strict=True))}
        tokens: list[int] = []
        node: int | None = -1
        while node is not None:
            tokens.append(count_up(position + len(tokens)))
            node = below.get((node, tokens[-1]))
        return tokens


def fake_engine(
    device: FakeDevice,
    num_pages: int = 64,
    seconds: float = 1e-3,
    observer: Observer | None = None,
    keep_prefixes: bool = True,
    **limits: object,
) -> ThreadedEngine:
    """An engine on the device, with rounds that are expected to take `seconds` whatever their width."""
    values: dict[str, object] = {"max_hold_seconds": 0.0, "spin": device.spin} | limits
    return ThreadedEngine(
        device,
        Memory(num_pages, PAGE_SIZE, keep_prefixes),
        CostModel([seconds] * len(WIDTHS)),
        EngineLimits(VOCAB, 200, **values),  # type: ignore[arg-type]
        observer or Silence(),
    )


def submit(
    engine: ThreadedEngine, prompt_len: int = 3, max_tokens: int = 8, answer: Answer | None = None, **fields: object
) -> Answer:
    """Ask for an answer of exactly `max_tokens`; `fields` of GenerationRequest."""
    answer = answer or Answer()
    prompt = [count_up(position) for position in range(prompt_len)]
    request = make_request(answer, prompt, SamplingParams(temperature=0.0), VOCAB, max_tokens, **fields)
    engine.submit(request)
    answer.request = request
    return answer
