"""The training loop of a head."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.training.dense import target_states
from outrider.training.eagle3 import Eagle3Head
from outrider.training.loss import soft_cross_entropy, wanted_at
from outrider.training.state import load_state, save_state
from outrider.training.target import Target
from outrider.training.texts import TextBatch, Texts, batches

# Steps that are run before the speed is taken, and that it is then taken over.
SPEED_AFTER, SPEED_OVER = 10, 20
LOG_EVERY = 20


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """How a head is trained. `steps` 0 fits as many as `minutes` allow, by the speed of the first ones."""

    steps: int = 0
    minutes: float = 2.0
    batch_tokens: int = 16384
    learning_rate: float = 1e-3
    output_share: float = 0.3
    """Learning rate of the output matrix and the norm before it, as a share: they begin as the target's own."""
    warmup_share: float = 0.04
    final_share: float = 0.02
    """Learning rate at the end, as a share of its peak."""
    unroll: int = 8
    """Steps that the head runs on its own features (training-time test)."""
    decay: float = 1.0
    """Weight of an unrolled step against the one before it."""
    clip: float = 1.0
    seed: int = 0
    save_seconds: float = 60.0


@dataclass(slots=True)
class Point:
    """Means over the steps since the point before."""

    step: int
    loss: float
    rates: list[float]
    """Share of places where the likeliest tokens agree, by depth."""


@dataclass(slots=True)
class History:
    """What is told of a training: its length, its curve, its time without interruptions."""

    total_steps: int = 0
    seconds: float = 0.0
    points: list[Point] = field(default_factory=list)


Told = Callable[[int, int, Point], None]


class Trainer:
    """Trains one head on one set of texts. All of its state but the texts goes to `state_path`, and comes from there.

    An interrupted training that is taken up gives what an uninterrupted one gives: bit by bit on a CPU.
    """

    def __init__(
        self, target: Target, head: Eagle3Head, texts: Texts, options: TrainerOptions, state_path: Path | None = None
    ) -> None:
        self.head = head
        self.history = History(total_steps=options.steps)
        self._target = target
        self._texts = texts
        self._options = options
        self._state_path = state_path
        self._step = self._first_step = 0
        self._optimizer = _optimizer(head, options)
        if state_path is not None and state_path.exists():
            self._resume(state_path)
            self._first_step = self._step

    def run(self, told: Told | None = None, stop_after: int | None = None) -> History:
        """Train to the end, or until `stop_after` steps are done in all; the state is then saved."""
        started = saved = time.monotonic()
        before = self.history.seconds
        speed_from = 0.0
        gathered: list[tuple[Tensor, Tensor]] = []
        for batch in self._stream():
            if self._done() or (stop_after is not None and self._step >= stop_after):
                break
            gathered.append(self._train(batch))
            self._step += 1
            if not self.history.total_steps:
                speed_from = self._fit_minutes(speed_from)
            if self._step % LOG_EVERY == 0 or self._done():
                self._log(gathered, told)
                gathered = []
            now = time.monotonic()
            self.history.seconds = before + now - started
            # Only between two points of the curve, so that a resumed one has the same points.
            if now - saved > self._options.save_seconds and not gathered:
                self._save()
                saved = now
        if stop_after is not None and gathered:
            self._log(gathered, None)
        self._save()
        return self.history

    def _done(self) -> bool:
        return 0 < self.history.total_steps <= self._step

    def _stream(self) -> Iterator[TextBatch]:
        """Batches from where the state stands, epoch after epoch."""
        epoch, skip = 0, self._step
        while True:
            count = 0
            for batch in batches(
                self._texts, self._options.batch_tokens, self._options.unroll + 1, self._options.seed * 1000 + epoch
            ):
                count += 1
                if skip:
                    skip -= 1
                else:
                    yield batch
            if not count:
                raise ConfigError("the texts are too short to train on: no answer is longer than the unrolled steps")
            epoch += 1

    def _train(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """One step; its loss and its rates [unroll], still on the device."""
        if self._step == 0:
            calibrate(self._target, self.head, batch)
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak"] * self._schedule()
        losses, hits = head_losses(self._target, self.head, batch, self._options.unroll)
        weights = torch.tensor([self._options.decay**step for step in range(self._options.unroll)])
        loss = (losses * (weights / weights.sum()).to(losses.device)).sum()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self._options.clip)
        self._optimizer.step()
        return loss.detach(), hits

    def _schedule(self) -> float:
        """Share of the peak learning rate: up in a line, down in a cosine. Unknown ends count as far away."""
        total = self.history.total_steps or 100 * (SPEED_AFTER + SPEED_OVER)
        warmup = max(1.0, self._options.warmup_share * total)
        if self._step < warmup:
            return (self._step + 1) / (warmup + 1)
        done = min(1.0, (self._step - warmup) / max(1.0, total - warmup))
        low = self._options.final_share
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))

    def _fit_minutes(self, speed_from: float) -> float:
        """Choose the number of steps once the speed is known; returns when it began to be taken."""
        count = self._step - self._first_step
        if count not in (SPEED_AFTER, SPEED_AFTER + SPEED_OVER):
            return speed_from
        if self._target.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        if count == SPEED_AFTER:
            return now
        seconds = (now - speed_from) / SPEED_OVER
        self.history.total_steps = max(self._step + 1, int(60 * self._options.minutes / seconds))
        return now

    def _log(self, gathered: list[tuple[Tensor, Tensor]], told: Told | None) -> None:
        loss = float(torch.stack([loss for loss, _ in gathered]).mean())
        rates: list[float] = torch.stack([hits for _, hits in gathered]).mean(0).tolist()
        if not math.isfinite(loss):
            raise ConfigError(f"the loss is {loss} at step {self._step}; choose a lower learning rate")
        point = Point(self._step, loss, rates)
        self.history.points.append(point)
        if told is not None:
            told(self._step, self.history.total_steps, point)

    def _save(self) -> None:
        if self._state_path is None:
            return
        record = {"step": self._step, "history": asdict(self.history), "options": asdict(self._options)}
        save_state(self._state_path, self.head.state_dict(), self._optimizer, record)

    def _resume(self, path: Path) -> None:
        tensors, record = load_state(path, self._optimizer)
        given, options = asdict(self._options), record["options"]
        changed = [name for name in given if name != "save_seconds" and options.get(name) != given[name]]
        if changed:
            raise ConfigError(
                f"{path} is the state of a training with another {changed[0]} "
                f"({options.get(changed[0])}, not {given[changed[0]]}); choose another folder or remove it"
            )
        self.head.load_state_dict(tensors)
        self._step = int(record["step"])
        history = record["history"]
        self.history = History(
            history["total_steps"], history["seconds"], [Point(**point) for point in history["points"]]
        )


def _optimizer(head: Eagle3Head, options: TrainerOptions) -> torch.optim.AdamW:
    """Groups with their peak learning rates."""
    given = [*head.lm_head.parameters(), *head.norm.parameters()]
    new = [*head.fc.parameters(), *head.midlayer.parameters()]
    peak = options.learning_rate
    groups = [{"params": new, "peak": peak}, {"params": given, "peak": peak * options.output_share}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), weight_decay=0.0)


def calibrate(target: Target, head: Eagle3Head, batch: TextBatch) -> None:
    """Fit the head's scale of features to those of a batch."""
    token_ids, places = (torch.from_numpy(part).to(target.device) for part in (batch.token_ids, batch.targets))
    features, _ = target_states(target.model, token_ids, head.shape.feature_layers)
    head.calibrate(features.flatten(0, 1)[places])


def head_losses(target: Target, head: Eagle3Head, batch: TextBatch, unroll: int) -> tuple[Tensor, Tensor]:
    """Run target and head over a batch.

    Returns:
        the loss of each unrolled step, float32 [unroll], and the share of the batch's targets where the likeliest
        tokens agree, the same shape.
    """
    token_ids = torch.from_numpy(batch.token_ids).to(target.device, non_blocking=True)
    places = torch.from_numpy(batch.targets).to(target.device, non_blocking=True)
    features, hidden = target_states(target.model, token_ids, head.shape.feature_layers)
    wanted = wanted_at(target.model, hidden.flatten(0, 1).index_select(0, places), head.target_ids, head.draft_ids)
    losses, rates = [], []
    with target.autocast():
        for step, feature in enumerate(head.unroll(features, target.embed(token_ids), target.rotary, unroll)):
            # The target's word at place i is what the head says at base i - 1 when it has run one step more.
            rows = head.norm(feature.flatten(0, 1).index_select(0, places - 1 - step))
            loss, hits = soft_cross_entropy(rows, head.lm_head.weight, wanted)
            losses.append(loss)
            rates.append(hits.float().mean())
    return torch.stack(losses), torch.stack(rates)
