"""What runners have in common: rows, pages, features, and the steps of a burst."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from time import perf_counter, sleep
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from draft_service.burst.buckets import Bucket, Buckets
from draft_service.burst.buffers import NUM_COPIES, BurstInput, BurstOutput
from draft_service.burst.device_memory import DeviceMemory, as_tensor
from draft_service.burst.plan import Burst, BurstResult, BurstShape
from draft_service.feature_batch import PartOfRows
from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.attention.frontier import (
    NUM_FIELDS,
    Pool,
    StepTokens,
    append_candidates,
    begin_burst,
    choose_entries,
    place_entries,
)
from outrider.device import put
from outrider.models.drafters.base import DraftModel
from outrider.sampling.host_proposer import HostProposer
from outrider.sampling.params import SamplingParams
from outrider.sampling.proposer import Proposer
from outrider.tree.messages import Features

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


_CALM = 0.75
"""Share of a burst's expected time in which something else may interrupt the wait for it."""
_NAP_SECONDS = 20e-6
"""Others get the interpreter meanwhile; it takes some 70 us in all."""
_RISE = 0.1

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="Runner")


def on_device(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Run a runner's method on its device, whichever thread calls, and without gradients."""

    @wraps(method)
    def run(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        device = self.memory.kv.k.device
        with torch.inference_mode(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return method(self, *args, **kwargs)

    return run


@dataclass(frozen=True)
class RunnerOptions:
    """How a runner works; its shape says what it holds."""

    chunk_size: int = 256
    """Prompt tokens of one forward at most."""
    vocab_limit: int = 0
    """Target ids from here on are never proposed; 0 allows all that the model knows."""
    rank_by_noise: bool = True
    use_graphs: bool = True


class Pending:
    """A burst that was launched, or a part of one; `copy` is its part of the host's buffers."""

    def __init__(
        self, runner: Runner, burst: Burst, bucket: Bucket, copy: int, first_step: int = 0, num_steps: int = 0
    ) -> None:
        """`num_steps` 0 for those that the burst names."""
        self._runner = runner
        self.burst = burst
        self.bucket = bucket
        self.copy = copy
        self.first_step = first_step
        self._num_steps = num_steps
        self._next: Pending | None = None
        self.ran = False
        self.cut = False
        """Whether it was ended before its last step because something else came."""
        self.error: Exception | None = None
        self.event: torch.cuda.Event | None = None
        self.began = perf_counter()
        self._result: BurstResult | None = None

    @property
    def num_steps(self) -> int:
        """Steps of this part."""
        return self._num_steps or self.burst.num_steps

    @property
    def step_seconds(self) -> float:
        """See PendingBurst."""
        return self._runner.expected_seconds(self) / self.num_steps

    def done(self) -> bool:
        """See PendingBurst. Where there is no device that works meanwhile, `wait` is what there is to do."""
        return self.event is None or self.event.query()

    def nearly(self, interrupted: Callable[[], bool]) -> bool:
        """See PendingBurst."""
        event = self.event
        if event is None:
            self._runner.run_until(interrupted)
            return True
        calm = self.began + _CALM * self._runner.expected_seconds(self)
        while perf_counter() < calm and not event.query():
            if interrupted():
                return False
            sleep(_NAP_SECONDS)
        return True

    def over(self, interrupted: Callable[[], bool]) -> bool:
        """See PendingBurst."""
        if not self.nearly(interrupted):
            return False
        if self.event is not None:
            self.event.synchronize()
            ended = perf_counter()
            self._runner.note_seconds(self, ended - self.began)
            if self._next is not None:
                self._next.began = ended
        return True

    def go_on(self, num_steps: int) -> Pending | None:
        """See PendingBurst."""
        self._next = self._runner.go_on(self, num_steps)
        return self._next

    def wait(self) -> BurstResult:
        """See PendingBurst."""
        if self._result is None:
            self._result = self._runner.finish(self)
        return self._result


class Runner(ABC):
    """See BurstRunner."""

    def __init__(
        self, model: DraftModel, shape: BurstShape, attention: AttentionBackend, options: RunnerOptions
    ) -> None:
        """Raises ValueError for a shape that does not fit the model or itself."""
        _check(model, shape)
        device = model.device
        self.shape = shape
        self.options = options
        self.memory = DeviceMemory(model, shape)
        self.buckets = Buckets(shape.max_width, shape.num_rows)
        self._model = model
        self._attention = attention
        self._input = BurstInput(shape, device)
        self._output = BurstOutput(shape, device)
        self._vocab_limit = options.vocab_limit or model.target_vocab_size
        self._proposer = self._make_proposer()
        self._capacity = shape.max_steps * shape.max_width * shape.branching
        self._entries = torch.zeros(NUM_FIELDS * (shape.max_seeds + self._capacity), dtype=torch.int32, device=device)
        size = (shape.max_width, shape.branching)
        self._tokens = torch.zeros(size, dtype=torch.int32, device=device)
        self._scores = torch.zeros(size, dtype=torch.float32, device=device)
        self._steps: dict[Bucket, StepTokens] = {}
        self._launched: deque[Pending] = deque()
        self._turn = 0
        self._step_seconds: dict[Bucket, float] = {}

    @on_device
    def open(self, row: int, sampling: SamplingParams) -> None:
        """See BurstRunner."""
        self._settle()
        self._check_row(row)
        self.memory.forget(row)
        self._proposer.admit(row, sampling)

    def close(self, row: int) -> None:
        """See BurstRunner."""
        self._settle()
        self._check_row(row)
        self.memory.forget(row)

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """See BurstRunner."""
        self._settle()
        self._check_row(row)
        self.memory.set_pages(row, pages)

    @on_device
    def extend(self, row: int, tokens: Sequence[int], start: int, features: object | None) -> None:
        """See BurstRunner. A sequence's first token, which has no KV of its own under a lag, is left out."""
        self._check_row(row)
        given = None if features is None else as_tensor(features)
        if (given is None) == bool(self.shape.feature_size):
            raise ValueError("features for a model that takes none" if given is not None else "features are missing")
        if given is not None and given.shape != (len(tokens), self.shape.feature_size):
            raise ValueError(f"features of {list(given.shape)} for {len(tokens)} tokens of {self.shape.feature_size}")
        self._settle()
        self.memory.flush()
        first = self.shape.lag - start if start < self.shape.lag else 0
        for begin in range(first, len(tokens), self.options.chunk_size):
            end = min(begin + self.options.chunk_size, len(tokens))
            chunk = None if given is None else given[begin:end].to(self._model.device, self._model.dtype)
            batch = self._prompt_batch(row, tokens[begin:end], start + begin - self.shape.lag)
            self._model.forward(batch, chunk, self.memory.kv, self._attention)

    def move(self, row: int, slots: Sequence[int], position: int) -> None:
        """See BurstRunner."""
        self._settle()
        self._check_row(row)
        if slots:
            self.memory.move(row, slots, position)

    @on_device
    def project(self, features: object) -> Tensor:
        """See BurstRunner."""
        if not isinstance(features, Features):
            return self._model.project(self._taken(as_tensor(features)))
        part = features.rows
        if not isinstance(part, PartOfRows):
            return self._project(features, features.data if part is None else part, features.count)
        joined = part.joined
        made: Tensor = joined.made(self, lambda: self._project(features, joined.rows, joined.count))
        return made[part.start : part.start + features.count]

    @on_device
    def join(self, parts: Sequence[object]) -> Tensor:
        """See BurstRunner."""
        return torch.cat([as_tensor(part) for part in parts])

    def _project(self, features: Features, given: object, count: int) -> Tensor:
        """Rows [count, feature_size] of values that are bytes of any kind, in the format of `features`."""
        dtype = _DTYPES[features.dtype]
        if isinstance(given, Tensor):  # read from a ring: nobody else has it
            rows = given.view(dtype).view(count, -1).to(self._model.device, self._model.dtype)
        elif isinstance(given, bytes | memoryview):
            rows = self._taken(torch.frombuffer(bytearray(given), dtype=dtype).view(count, -1))
        else:
            raise ValueError(f"features must be bytes, not {type(given).__name__}")
        return self._model.finish_product(rows) if features.projected else self._model.project(rows)

    def _taken(self, rows: Tensor) -> Tensor:
        """A copy on the model's device, whose source is free when this returns, though bursts may be under way."""
        device, dtype = self._model.device, self._model.dtype
        if device.type != "cuda":
            return rows.to(device, dtype, copy=True)
        if not rows.is_cuda:
            return rows.to(dtype).pin_memory().to(device, non_blocking=True)
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            copied = rows.to(device, dtype, copy=True)
        stream.synchronize()
        copied.record_stream(torch.cuda.current_stream())
        return copied

    @on_device
    def launch(self, burst: Burst) -> Pending:
        """See BurstRunner. Raises ValueError for a burst that does not fit, or a third one beside two pending."""
        if len(self._launched) == NUM_COPIES:
            raise ValueError(f"{NUM_COPIES} bursts are pending already")
        pending = Pending(self, burst, self.buckets.fit(burst.width, len(burst.rows)), self._turn)
        self._input.fill(pending.copy, burst)
        self._turn = (self._turn + 1) % NUM_COPIES
        self._queue(pending)
        self._launched.append(pending)
        return pending

    @on_device
    def finish(self, pending: Pending) -> BurstResult:
        """Wait for a burst, and read what it brought. Raises what went wrong in it."""
        self._settle()
        self._launched.remove(pending)
        if pending.error is not None:
            raise pending.error
        if pending.event is not None:
            pending.event.synchronize()
        return self._output.read(pending.copy, pending.bucket, pending.num_steps, pending.first_step)

    def go_on(self, pending: Pending, num_steps: int) -> Pending | None:
        """See PendingBurst.go_on."""
        return None

    def expected_seconds(self, pending: Pending) -> float:
        """How long such a burst takes, as far as that is known."""
        return self._step_seconds.get(pending.bucket, 0.0) * pending.num_steps

    def note_seconds(self, pending: Pending, seconds: float) -> None:
        """A burst took so long. One that had to wait for prompts counts little."""
        last, taken = self._step_seconds.get(pending.bucket), seconds / pending.num_steps
        self._step_seconds[pending.bucket] = taken if last is None else min(taken, last + _RISE * (taken - last))

    def _run(self, pending: Pending) -> None:
        """Queue all work of a burst on the device."""
        pending.ran = True
        burst, bucket = pending.burst, pending.bucket
        self.memory.flush()
        self.memory.take_features(burst.features)
        self._input.to_device(pending.copy, len(burst.rows))
        self._run_begin(bucket)
        for _ in range(burst.num_steps):
            self._run_step(bucket)
        self._output.to_host(pending.copy, bucket, burst.num_steps)

    def _begin(self, bucket: Bucket) -> None:
        """What precedes a burst's steps on the device; may be captured."""
        rows = self._input.rows.head(bucket.rows)
        begin_burst(self._input.header, self._input.seeds, self._pool(bucket), rows, self.memory.plan)

    def _step(self, bucket: Bucket) -> None:
        """The whole of a step on the device; may be captured."""
        header, pool, step = self._input.header, self._pool(bucket), self._step_tokens(bucket)
        rows = self._input.rows.head(bucket.rows)
        choose_entries(header, pool, rows, step, self.shape.branching)
        place_entries(pool, rows, step, self.memory.plan)
        tokens, scores = self._tokens[: bucket.width], self._scores[: bucket.width]
        self._propose(bucket, step, tokens, scores)
        append_candidates(header, pool, step, tokens, scores, self._output.steps(bucket.width))

    def _propose(self, bucket: Bucket, step: StepTokens, tokens: Tensor, scores: Tensor) -> None:
        """Run the nodes of a step, and write their candidates."""
        batch = self._step_batch(bucket, step)
        count = batch.token_ids.shape[0]
        store = self.memory.features
        given = None if store is None else store.index_select(0, step.sources[:count])
        rows, features = self._model.forward(batch, given, self.memory.kv, self._attention)
        logits = self._model.logits(rows)
        where = (step.table_rows[:count], step.positions[:count])
        self._proposer(logits, *where, tokens[:count], scores[:count])
        if store is not None and features is not None:
            store.index_copy_(0, step.targets[:count], features)

    def _pool(self, bucket: Bucket) -> Pool:
        """The pool as bursts of this width lay it out."""
        max_seeds = self.shape.max_seeds
        size = max_seeds + self.shape.max_steps * bucket.width * self.shape.branching
        return Pool(self._entries[: NUM_FIELDS * size].view(NUM_FIELDS, size), max_seeds)

    def _step_tokens(self, bucket: Bucket) -> StepTokens:
        found = self._steps.get(bucket)
        if found is None:
            words, device = self.shape.region // 32, self._model.device
            found = self._steps[bucket] = StepTokens.new(bucket.width, bucket.rows, words, device)
        return found

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.shape.num_rows:
            raise ValueError(f"row {row} of {self.shape.num_rows}")

    def _put(self, values: Sequence[int]) -> Tensor:
        return put(values, self._model.device)

    def run_until(self, interrupted: Callable[[], bool]) -> None:  # noqa: B027
        """Where nothing works in the background: run what was launched, and end early if `interrupted()`."""

    def _settle(self) -> None:  # noqa: B027
        """Run what was launched, before anything changes that it depends on."""

    @abstractmethod
    def _make_proposer(self) -> Proposer | HostProposer:
        """What finds candidates."""

    @abstractmethod
    def _queue(self, pending: Pending) -> None:
        """Run a burst now or by the next `_settle`."""

    def _run_begin(self, bucket: Bucket) -> None:
        """Queue what precedes the steps."""
        self._begin(bucket)

    @abstractmethod
    def _run_step(self, bucket: Bucket) -> None:
        """Queue a step on the device."""

    @abstractmethod
    def _step_batch(self, bucket: Bucket, step: StepTokens) -> TokenBatch:
        """What a forward of the placed nodes is given."""

    @abstractmethod
    def _prompt_batch(self, row: int, tokens: Sequence[int], position: int) -> TokenBatch:
        """A forward of context tokens at KV positions `position`, ..."""


def _check(model: DraftModel, shape: BurstShape) -> None:
    if shape.region % 32 or shape.region < 32:
        raise ValueError(f"a region of {shape.region} slots; it must be a multiple of 32")
    if shape.feature_size != model.feature_size:
        raise ValueError(f"features of {shape.feature_size} for a model that takes {model.feature_size}")
    if min(shape.num_rows, shape.branching, shape.max_seeds, shape.max_steps, shape.max_width, shape.num_pages) < 1:
        raise ValueError(f"a runner needs rows, seeds, steps and pages: {shape}")
