"""The common base of runners: rows, pages, features, and the steps of a burst."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kernels.attention_tiles import short_tokens
from outrider.attention.base import AttentionBackend
from outrider.attention.paged import PromptChunk
from outrider.device import DTYPES
from outrider.drafting.model.burst import Burst, BurstResult, BurstShape, Extent, Reroots, StepBucket, StepBuckets
from outrider.drafting.model.device_memory import DeviceMemory, working_on
from outrider.drafting.model.features import MemoryMapper, PartOfRows
from outrider.layers.linear import has_small_products
from outrider.models.drafters.base import DraftModel
from outrider.protocol.speculation import Features
from outrider.sampling.params import SamplingParams
from outrider.sampling.proposer import HostProposer, Proposer

_LEAD_PART = 0.25
"""A part is nearly over when at most this share of its expected time is left."""
_LAUNCH_MARGIN = 1.5
"""A part is also nearly over when at most this multiple of the host's time to queue a part is left. A part that is
queued too late leaves the device idle, takes longer than expected, and so makes the next part even later."""
_EMA_WEIGHT = 0.1


@dataclass(frozen=True)
class RunnerOptions:
    """How a runner works; the sizes are in `BurstShape`."""

    chunk_size: int = 256
    """Most prompt tokens of one forward."""
    rank_by_noise: bool = True
    use_graphs: bool = True


@dataclass(eq=False, repr=False)
class PendingBurst:
    """A burst that was launched, or a part of one."""

    runner: BurstRunner
    burst: Burst
    bucket: StepBucket
    num_steps: int
    """Steps of this part."""
    first_step: int = 0
    ran: bool = False
    """Whether the part runs or has run. On a CPU, a launched part runs later, and not at all if `cut` is set."""
    cut: bool = False
    """Whether the part ended before its last step because of an interruption."""
    error: Exception | None = None
    event: torch.cuda.Event | None = None
    """On a GPU, the event that the part is over; `copy` is the number of its host buffers there."""
    copy: int = 0
    brought: BurstResult | None = None
    """On a CPU, the result once the part has run."""
    began: float = field(default_factory=perf_counter)
    _next: PendingBurst | None = None
    _result: BurstResult | None = None

    @property
    def step_seconds(self) -> float:
        """Expected time of one of its steps; 0 if not known."""
        return self.runner.expected_seconds(self) / self.num_steps

    def done(self) -> bool:
        """Whether `wait` would return at once. Always true on a CPU, where `wait` runs the burst if necessary."""
        return self.event is None or self.event.query()

    def wait_until_nearly_over(self, interrupted: Callable[[], bool]) -> bool:
        """Wait, as `wait_until_over` does, until the part is nearly over; False if `interrupted()` meanwhile."""
        event = self.event
        if event is None:
            self.runner.run_until(interrupted)
            return True
        quiet_until = self.began + self.runner.quiet_seconds(self)
        while perf_counter() < quiet_until and not event.query():
            if interrupted():
                return False
        return True

    def wait_until_over(self, interrupted: Callable[[], bool]) -> bool:
        """Wait until the part is over, without holding the interpreter; False if `interrupted()` meanwhile."""
        if not self.wait_until_nearly_over(interrupted):
            return False
        event = self.event
        if event is not None:
            while not event.query():
                if interrupted():
                    return False
            ended = perf_counter()
            self.runner.note_seconds(self, ended - self.began)
            if self._next is not None:
                self._next.began = ended
        return True

    def go_on(self, num_steps: int, reroots: Reroots | None = None) -> PendingBurst | None:
        """Queue further steps of the same burst from its own pool: another part, with a result of its own.

        `reroots` apply from these steps on. Call this on the part queued last, before anything else is launched. None
        if the burst cannot go on.
        """
        began = perf_counter()
        self._next = self.runner.go_on(self, num_steps, reroots)
        self.runner.note_launch(perf_counter() - began)
        return self._next

    def wait(self) -> BurstResult:
        """Return the result; waits for it without holding the interpreter."""
        if self._result is None:
            self._result = self.runner.finish(self)
        return self._result


class BurstRunner(ABC):
    """Runs a draft model. One thread calls it; calls take effect in their order; at most two bursts are pending."""

    _proposer: Proposer | HostProposer
    """Finds the candidates of nodes; set by subclasses."""

    def __init__(
        self, model: DraftModel, shape: BurstShape, attention: AttentionBackend, options: RunnerOptions
    ) -> None:
        self.shape = shape
        self.options = options
        self.memory = DeviceMemory(model, shape)
        self.buckets = StepBuckets(shape, short_context(model))
        self._model = model
        self._attention = attention
        self._launched: deque[PendingBurst] = deque()
        self._step_seconds: dict[StepBucket, float] = {}
        self.launch_seconds = 0.0
        """The host's time to queue a part."""

    def at_work(self) -> AbstractContextManager[None]:
        """Enter the runner's device, without gradients. A thread that calls often enters once; else each call does."""
        return working_on(self.memory.kv.k.device)

    def open(self, row: int, sampling: SamplingParams) -> None:
        """Begin a request in a free row."""
        with self.at_work():
            self._run_launched()
            self._proposer.admit(row, sampling)

    def close(self, row: int) -> None:
        """Free a row."""
        self._run_launched()
        self.memory.forget(row)

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """Set all context pages of a row, in order. Pages may only be added at the end."""
        self._run_launched()
        self.memory.set_pages(row, pages)

    def extend(self, extents: Sequence[Extent]) -> None:
        """Compute KV of context tokens, with at most one extent for each row; in one forward if all fit.

        With a lag, a sequence's first token has no KV of its own. If this raises, the KV of all these rows is unknown.
        """
        with self.at_work():
            self._run_launched()
            self.memory.flush()
            given: Tensor | None = None
            if self.shape.feature_size:
                parts = [part for extent in extents for part in extent.features]
                given = self.join(parts) if parts else None
            done = 0
            for chunks in self._forwards(extents):
                count = sum(len(chunk.slots) for chunk in chunks)
                features = None if given is None else given[done : done + count]
                self._run_context(chunks, features)
                done += count

    def move(self, row: int, slots: Sequence[int], position: int) -> None:
        """Move KV of tree slots to places `position`, `position` + 1, ... of the context."""
        self._run_launched()
        if slots:
            self.memory.move(row, slots, position)

    def project(self, features: Features) -> Tensor:
        """Return target features as the model takes them: [N, feature_size] on its device, to be sliced by position.

        The values are in `features.data`, whose memory is free once this returns, or in `features.rows`: as a tensor of
        bytes, or as a part of joined rows, which are projected together.
        """
        part = features.rows
        if not isinstance(part, PartOfRows):
            return self._project(features, features.data if part is None else part, features.count)
        joined = part.joined
        if joined.projected is None:
            joined.projected = self._project(features, joined.rows, joined.count)
        # Called for each request, so make only a view.
        projected: Tensor = joined.projected
        return projected[part.start : part.start + features.count]

    def _project(self, features: Features, given: Any, count: int) -> Tensor:
        """Return rows [count, feature_size] of `given` bytes of any kind, in the format of `features`.

        Raises ValueError for rows of another width, which would make the bursts of all requests fail.
        """
        model, dtype = self._model, DTYPES[features.dtype]
        with self.at_work():
            if isinstance(given, Tensor):  # read from a ring, and not shared
                rows = given.view(dtype).view(count, -1).to(model.device, model.dtype)
            else:
                # Copy, since `given` is free when this returns, and bursts may be running.
                rows = torch.frombuffer(bytearray(given), dtype=dtype).view(count, -1).to(model.dtype)
                if model.device.type == "cuda":
                    rows = rows.pin_memory().to(model.device, non_blocking=True)
            made = model.finish_product(rows) if features.projected else model.project(rows)
        if made.shape[1] != self.shape.feature_size:
            raise ValueError(f"features of {made.shape[1]} values for a model that takes {self.shape.feature_size}")
        return made

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join results of `project`, or slices of them, one behind the other: [sum of N, feature_size].

        A lone part is not copied.
        """
        with self.at_work():
            return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def launch(self, burst: Burst) -> PendingBurst:
        """Queue a burst; returns before the burst has run. Two bursts may be pending."""
        lengths = burst.rows.context_lens
        longest = int(lengths[0]) if len(lengths) == 1 else None
        pending = PendingBurst(self, burst, self.buckets.fit(burst.width, len(lengths), longest), burst.num_steps)
        with self.at_work():
            self._queue(pending)
        self._launched.append(pending)
        return pending

    def finish(self, pending: PendingBurst) -> BurstResult:
        """Wait for a burst and read its result. Raises the error that the burst failed with."""
        with self.at_work():
            self._run_launched()
            self._launched.remove(pending)
            if pending.error is not None:
                raise pending.error
            if pending.event is not None and not pending.event.query():
                pending.event.synchronize()
            return self._read(pending)

    def go_on(self, pending: PendingBurst, num_steps: int, reroots: Reroots | None = None) -> PendingBurst | None:
        """See PendingBurst.go_on."""
        return None

    def expected_seconds(self, pending: PendingBurst) -> float:
        """Return the expected time of a part; 0 if not known."""
        return self._step_seconds.get(pending.bucket, 0.0) * pending.num_steps

    def quiet_seconds(self, pending: PendingBurst) -> float:
        """Return the time from a part's begin until it is nearly over: early enough to queue the next part."""
        expected = self.expected_seconds(pending)
        return expected - min(max(_LEAD_PART * expected, _LAUNCH_MARGIN * self.launch_seconds), expected)

    def note_launch(self, seconds: float) -> None:
        """Note how long the host took to queue a part."""
        self.launch_seconds += _EMA_WEIGHT * (seconds - self.launch_seconds)

    def note_seconds(self, pending: PendingBurst, seconds: float) -> None:
        """Note how long a part took. A part that had to wait for prompts counts little."""
        last, taken = self._step_seconds.get(pending.bucket), seconds / pending.num_steps
        self._step_seconds[pending.bucket] = taken if last is None else min(taken, last + _EMA_WEIGHT * (taken - last))

    def memory_mapper(self) -> MemoryMapper | None:
        """Return the mapper of other processes' memory on the model's device; None if that is not a GPU."""
        return None

    def run_until(self, interrupted: Callable[[], bool]) -> None:  # noqa: B027
        """On a CPU: run launched bursts, and end early if `interrupted()`."""

    def _run_launched(self) -> None:  # noqa: B027
        """On a CPU: run launched bursts before anything that they depend on changes."""

    def _forwards(self, extents: Sequence[Extent]) -> Iterator[list[PromptChunk]]:
        """Yield the tokens in order as forwards of at most `chunk_size` tokens; no row is in a forward twice."""
        lag, chunk_size = self.shape.lag, self.options.chunk_size
        chunks: list[PromptChunk] = []
        room = chunk_size
        for row, tokens, start, _, gap in extents:
            begin, first = 0, start - lag - gap
            while begin < len(tokens):
                end = min(begin + room, len(tokens))
                slots = self.memory.context_slots(row, first + begin, first + end)
                chunks.append(PromptChunk(row, tokens[begin:end], first + begin, slots, gap))
                room -= end - begin
                begin = end
                if not room:
                    yield chunks
                    chunks, room = [], chunk_size
        if chunks:
            yield chunks

    @abstractmethod
    def _queue(self, pending: PendingBurst) -> None:
        """Queue a burst on a GPU; on a CPU `_run_launched` runs it."""

    @abstractmethod
    def _read(self, pending: PendingBurst) -> BurstResult:
        """Return the result of a burst or part that is over."""

    @abstractmethod
    def _run_context(self, chunks: Sequence[PromptChunk], features: Tensor | None) -> None:
        """Run a forward of context tokens of several rows; the chunks' starts are places of the context.

        `features` [tokens, feature_size] if the model takes any.
        """


def short_context(model: DraftModel) -> int:
    """Return the longest context, in tokens, of a lone request that separate steps are captured for; 0 for none."""
    # The single layer of a head would gain nothing.
    if model.device.type != "cuda" or model.dtype == torch.float32 or model.num_layers == 1 or model.block_bytes:
        return 0
    # Mostly equal to the width of the residual stream, which a model without features does not state.
    width = model.num_heads * model.head_dim
    return short_tokens(model.head_dim) if has_small_products(width) else 0
