"""The training loop of a drafter, its optimizers, and its state on disk."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider_tools.files import replacing, writing
from outrider_tools.training.learner import Learner, TrainableDrafter
from outrider_tools.training.options import TrainerOptions
from outrider_tools.training.parallel import RankGroup
from outrider_tools.training.texts import Batches, TextBatch, Texts

_AVERAGE = "average."

Optimizers = list[torch.optim.Optimizer]


def make_optimizers(module: TrainableDrafter, options: TrainerOptions) -> Optimizers:
    """Make the optimizers. Every parameter is in one group, whose peak learning rate is "peak".

    Muon may take matrices: new 2-D weights, except embeddings.
    """
    inherited, peak, muon = module.inherited, options.learning_rate, options.optimizer == "muon"
    known = {id(weight) for weight in inherited}
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    new = [weight for weight in module.parameters() if id(weight) not in known]
    matrices = [weight for weight in new if weight.dim() == 2 and id(weight) not in tables]
    others = [weight for weight in new if weight.dim() != 2 or id(weight) in tables]
    shares = ([] if muon else [(matrices, 1.0)]) + [(others, 1.0), (inherited, options.output_share)]
    by_adamw = [{"params": weights, "peak": peak * share} for weights, share in shares if weights]
    found: Optimizers = []
    if by_adamw:
        fused = True if next(module.parameters()).is_cuda else None
        betas = (0.9, 0.95)
        found.append(torch.optim.AdamW(by_adamw, lr=peak, betas=betas, weight_decay=0.0, fused=fused))
    if muon and matrices:
        rate = options.muon_learning_rate
        by_muon = {"params": matrices, "peak": rate}
        found.append(torch.optim.Muon([by_muon], lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return found


class Average:
    """A running average of the weights that forgets: each step keeps `share` of it."""

    def __init__(self, weights: Sequence[Tensor], share: float) -> None:
        """`share` is between 0 and 1."""
        self._share = share
        self._steps = 0
        self._averages = [torch.zeros_like(weight) for weight in weights]

    @torch.no_grad()
    def add(self, weights: Sequence[Tensor]) -> None:
        """Add the weights after a step."""
        self._steps += 1
        # In the first steps it is their plain mean.
        share = min(self._share, 1.0 - 1.0 / self._steps)
        torch._foreach_lerp_(self._averages, list(weights), 1.0 - share)

    @torch.no_grad()
    def copy_to(self, weights: Sequence[Tensor]) -> None:
        """Overwrite the weights with their averages."""
        torch._foreach_copy_(list(weights), self._averages)

    def state(self) -> dict[str, Tensor]:
        """Return the state that `load` takes."""
        found = {f"{_AVERAGE}{number}": average for number, average in enumerate(self._averages)}
        return found | {f"{_AVERAGE}steps": torch.tensor(self._steps)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take the average's own tensors out of a state."""
        self._steps = int(state.pop(f"{_AVERAGE}steps"))
        for number, average in enumerate(self._averages):
            average.copy_(state.pop(f"{_AVERAGE}{number}"))


_RECORD = "training"


def _load_state(path: Path) -> tuple[dict[str, Tensor], dict[int, dict[int, dict[str, Tensor]]], dict[str, Any]]:
    """Return weights, each optimizer's state by parameter number, and the record. Raises ConfigError."""
    weights: dict[str, Tensor] = {}
    optimizers: dict[int, dict[int, dict[str, Tensor]]] = {}
    try:
        with safe_open(path, "pt") as file:
            record = json.loads(file.metadata()[_RECORD])
            for key in file.keys():  # noqa: SIM118
                kind, _, name = key.partition(".")
                if kind == "weights":
                    weights[name] = file.get_tensor(key)
                elif kind == "optimizer":
                    place, number, name = name.split(".", 2)
                    optimizers.setdefault(int(place), {}).setdefault(int(number), {})[name] = file.get_tensor(key)
                else:
                    raise ValueError(f"{kind} is unknown")
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no state of a training ({error}); remove it") from None
    return weights, optimizers, record


# Steps before the speed is measured, and steps over which it is measured.
SPEED_AFTER, SPEED_OVER = 10, 20
LOG_EVERY = 20
# Options that may change when a training is continued.
FREE = ("save_seconds", "compile")


@dataclass(slots=True)
class CurvePoint:
    """Means over the steps since the previous point."""

    step: int
    loss: float
    rates: list[float]
    """Share of places where the likeliest tokens agree, by depth."""


@dataclass(slots=True)
class History:
    """Report of a training: its length, its curve, its time without interruptions."""

    total_steps: int = 0
    seconds: float = 0.0
    points: list[CurvePoint] = field(default_factory=list)


ProgressCallback = Callable[[int, int, CurvePoint], None]


class Trainer:
    """Trains one drafter on one set of texts. All state except the texts is saved to `state_path`, and loaded from it.

    A training that was interrupted and continued gives the same as an uninterrupted one, bit by bit on a CPU. Each of
    `ranks` trains with its own share of the same batches, and all have the same weights after every step.
    """

    def __init__(
        self,
        learner: Learner,
        texts: Texts,
        options: TrainerOptions,
        state_path: Path | None = None,
        ranks: RankGroup | None = None,
        drafter: Mapping[str, Any] | None = None,
    ) -> None:
        """`drafter` has more options, by name, that a loaded state must have been saved with, like the trainer's."""
        self.history = History(total_steps=options.steps)
        self.learner = learner
        self._ranks = ranks or RankGroup()
        self._device = next(learner.module.parameters()).device
        self._options = options
        # As in JSON: lists for tuples, text for paths.
        must_fit = {**asdict(options), "processes": self._ranks.count, **(drafter or {})}
        self._must_fit: dict[str, Any] = json.loads(json.dumps(must_fit, default=str))
        self._batches = Batches(texts, options.batch_tokens, options.unroll + 1, learner.fixed_shape, options.cuts)
        self._state_path = state_path
        self._step = self._first_step = 0
        self._step_weights: Tensor | None = None
        self._optimizers = make_optimizers(learner.module, options)
        self._parameters = list(learner.module.parameters())
        self._average = Average(self._parameters, options.average) if options.average else None
        if state_path is not None and state_path.exists():
            self._resume(state_path)
            self._first_step = self._step
        # No rank writes the state before all have read it.
        self._ranks.barrier()

    def run(self, on_progress: ProgressCallback | None = None, stop_after: int | None = None) -> History:
        """Train to the end, or until `stop_after` steps in all are done, and save the state."""
        started = saved = time.monotonic()
        before = self.history.seconds
        speed_from = begun = 0.0
        gathered: list[tuple[Tensor, Tensor]] = []
        for batch in self.stream():
            if self._done() or (stop_after is not None and self._step >= stop_after):
                break
            gathered.append(self.learn(batch))
            self._step += 1
            now = time.monotonic()
            if not self.history.total_steps:
                speed_from = self._fit_minutes(speed_from)
                begun = begun or now
                self._end_if_late(now - begun)
            if self._step % LOG_EVERY == 0 or self._done():
                self._log(gathered, on_progress)
                gathered = []
            self.history.seconds = before + now - started
            # Only between two points of the curve, so that a continued one has the same points.
            if now - saved > self._options.save_seconds and not gathered:
                self._save()
                saved = now
        if stop_after is not None and gathered:
            self._log(gathered, None)
        self._save()
        if self._average is not None and self._done():
            self._average.copy_to(self._parameters)
        return self.history

    def _done(self) -> bool:
        return 0 < self.history.total_steps <= self._step

    def stream(self) -> Iterator[TextBatch]:
        """Yield this rank's batches from the current step on, epoch after epoch; all ranks have equally many."""
        epoch, skip = 0, self._step
        while True:
            seed = self._options.seed * 1000 + epoch
            groups = self._batches.groups(seed)
            steps = len(groups) // self._ranks.count
            if not groups:
                raise ConfigError("the texts are too short to train on: no answer is longer than the unrolled steps")
            if not steps:
                raise ConfigError(
                    f"the texts make {len(groups)} batches, fewer than there are processes ({self._ranks.count}); "
                    "make more text, or choose fewer tokens a batch"
                )
            for step in range(skip, steps):
                yield self._batches.batch(groups[step * self._ranks.count + self._ranks.rank], seed)
            skip = max(0, skip - steps)
            epoch += 1

    def learn(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """Run one step. Return its loss and its rates [unroll], still on the device."""
        if self._step == 0:
            self.learner.prepare(batch)
            self._ranks.broadcast(self._parameters)
            self._ranks.broadcast(buffer for buffer in self.learner.module.buffers() if buffer.is_floating_point())
        share = self._schedule()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * share
        losses, hits = self.learner.losses(batch)
        loss = (losses * self._weights(losses)).sum()
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._ranks.average_gradients(self._parameters, batch.num_targets)
        torch.nn.utils.clip_grad_norm_(self._parameters, self._options.clip)
        for optimizer in self._optimizers:
            optimizer.step()
        if self._average is not None:
            self._average.add(self._parameters)
        return loss.detach(), hits

    def _weights(self, losses: Tensor) -> Tensor:
        """Return the weights of the unrolled steps, on the device; they sum to 1."""
        if self._step_weights is None or self._step_weights.shape != losses.shape:
            weights = torch.tensor([self._options.decay**step for step in range(losses.shape[0])])
            self._step_weights = (weights / weights.sum()).to(losses.device)
        return self._step_weights

    def _schedule(self) -> float:
        """Return the share of the peak learning rate: a linear rise, then a cosine. An unknown end is far away."""
        total = self.history.total_steps or 100 * (SPEED_AFTER + SPEED_OVER)
        warmup = max(1.0, self._options.warmup_share * total)
        if self._step < warmup:
            return (self._step + 1) / (warmup + 1)
        done = min(1.0, (self._step - warmup) / max(1.0, total - warmup))
        low = self._options.final_share
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))

    def _fit_minutes(self, speed_from: float) -> float:
        """Choose the number of steps once the speed is known. Return when its measurement began."""
        count = self._step - self._first_step
        if count not in (SPEED_AFTER, SPEED_AFTER + SPEED_OVER):
            return speed_from
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        if count == SPEED_AFTER:
            return now
        seconds = (now - speed_from) / SPEED_OVER
        total = max(self._step + 1, int(60 * self._options.minutes / seconds))
        self.history.total_steps = self._ranks.broadcast_int(total)
        return now

    def _end_if_late(self, seconds: float) -> None:
        """End if the minutes are over before the speed is known; `seconds` count from the end of the first step."""
        is_over = seconds > 60 * self._options.minutes
        if not self.history.total_steps and self._ranks.broadcast_int(int(is_over)):
            self.history.total_steps = self._step

    def _log(self, gathered: list[tuple[Tensor, Tensor]], on_progress: ProgressCallback | None) -> None:
        loss = float(self._ranks.all_reduce_mean(torch.stack([loss for loss, _ in gathered]).mean()))
        rates: list[float] = self._ranks.all_reduce_mean(torch.stack([hits for _, hits in gathered]).mean(0)).tolist()
        if not math.isfinite(loss):
            raise ConfigError(f"the loss is {loss} at step {self._step}; choose a lower learning rate")
        point = CurvePoint(self._step, loss, rates)
        self.history.points.append(point)
        if on_progress is not None:
            on_progress(self._step, self.history.total_steps, point)

    def _save(self) -> None:
        if self._state_path is None or not self._ranks.is_main:
            return
        record = {"step": self._step, "history": asdict(self.history), "options": self._must_fit}
        weights = self.learner.module.state_dict() | (self._average.state() if self._average is not None else {})
        tensors = {f"weights.{name}": tensor for name, tensor in weights.items()}
        for place, optimizer in enumerate(self._optimizers):
            for number, values in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{place}.{number}.{name}": value for name, value in values.items()}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        with writing("--out", self._state_path), replacing(self._state_path) as part:
            save_file(tensors, part, {_RECORD: json.dumps(record)})

    def _resume(self, path: Path) -> None:
        weights, optimizers, record = _load_state(path)
        # Trainer options newer than the state count as their defaults; texts were not cut then.
        options = {**asdict(TrainerOptions()), "cuts": 0.0, **record["options"]}
        for name, value in self._must_fit.items():
            if name not in FREE and options.get(name, value) != value:
                raise ConfigError(
                    f"{path} is the state of a training with another {name} ({options[name]}, not {value}); "
                    "choose another folder or remove it"
                )
        # Groups follow from the options, which match.
        for place, optimizer in enumerate(self._optimizers):
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": optimizers.get(place, {}), "param_groups": groups})
        if self._average is not None:
            self._average.load(weights)
        self.learner.module.load_state_dict(weights)
        self._step = int(record["step"])
        history = record["history"]
        self.history = History(
            history["total_steps"], history["seconds"], [CurvePoint(**point) for point in history["points"]]
        )
