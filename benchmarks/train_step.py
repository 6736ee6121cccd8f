"""Time of one training step of an EAGLE-3 head by its parts, with what may be left out left out, and what it does.

python benchmarks/train_step.py --out benchmarks/results/train_step.json

Texts are made of random lengths and tokens: a step's time depends on lengths alone. Before anything is timed, losses
and gradients of every way are held against those of a plainer one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from report import Row, write_report
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from outrider.models.store import DEFAULT_MODEL, resolve_model
from outrider_tools.training.eagle3 import Eagle3Head, HeadShape, default_feature_layers
from outrider_tools.training.eagle3_learner import Eagle3Learner
from outrider_tools.training.options import TrainerOptions
from outrider_tools.training.packing import PackedBatches
from outrider_tools.training.target import Target
from outrider_tools.training.texts import TextBatch, Texts, make_batch
from outrider_tools.training.trainer import Trainer

WAYS = {
    "padded, eager": {"packed": False, "compile": False},
    "packed, eager": {"packed": True, "compile": False},
    "packed, compiled": {"packed": True, "compile": True},
    "packed, compiled, muon": {"packed": True, "compile": True, "optimizer": "muon"},
}


def make_texts(target: Target, count: int, longest: int) -> Texts:
    """Questions of 20 to 80 tokens, and answers whose mean length is that of SmolLM2's."""
    random = np.random.default_rng(0)

    def tokens(size: int) -> list[int]:
        found: list[int] = random.integers(20, target.config.vocab_size, size).tolist()
        return found

    prompts = [tokens(int(random.integers(20, 80))) for _ in range(count)]
    answers = [tokens(int(min(longest, 40 + random.exponential(300)))) for _ in range(count)]
    return Texts.join(prompts, answers)


def make_head(target: Target, vocab_size: int, texts: Texts) -> Eagle3Head:
    """Untrained, the same each time."""
    torch.manual_seed(0)
    layers = default_feature_layers(target.config.num_layers)
    chosen = torch.arange(vocab_size) * (target.config.vocab_size // vocab_size)
    head = Eagle3Head(HeadShape(target.config, vocab_size, layers), chosen).to(target.device)
    target.start(head)
    learner = Eagle3Learner(target, head, TrainerOptions(packed=False, compile=False))
    learner.prepare(make_batch(texts, np.arange(8), 9))
    return head


def learn(learner: Eagle3Learner, batch: TextBatch) -> tuple[Tensor, list[Tensor]]:
    """Losses of the unrolled steps and gradients."""
    losses, _ = learner.losses(batch)
    losses.mean().backward()
    return losses.detach(), [weight.grad for weight in learner.module.parameters() if weight.grad is not None]


def check(target: Target, texts: Texts, options: TrainerOptions, vocab_size: int, plain: str, name: str) -> list[Row]:
    """Hold one way against a plainer one, on the same sequences."""
    packing = PackedBatches(texts, options.batch_tokens, options.unroll + 1)
    numbers = packing.groups(0)[0]
    packed = packing.batch(numbers)
    padded = make_batch(texts, numbers, options.unroll + 1)
    kept = packed.num_targets
    padded = replace(padded, targets=padded.targets[:kept], num_targets=kept)
    found = []
    for way in (plain, name):
        learner = Eagle3Learner(target, make_head(target, vocab_size, texts), replace(options, **WAYS[way]))
        begun = time.monotonic()
        found.append(learn(learner, packed if learner.packed else padded))
        torch.cuda.synchronize()
        losses = [round(loss, 4) for loss in found[-1][0].tolist()]
        print(f"{way}, {options.batch_tokens} tokens: first step {time.monotonic() - begun:.1f} s, losses {losses}")
    expected, got = found
    off_loss = float(((got[0] - expected[0]) / expected[0]).abs().max())
    off_grad = max(float((a - b).norm() / b.norm()) for a, b in zip(got[1], expected[1], strict=True))
    good = off_loss < 1e-2 and off_grad < 0.1
    print(f"{name} {'agrees' if good else 'DOES NOT AGREE'} with {plain}: losses off by {off_loss:.1e} of their size, "
          f"gradients by at most {off_grad:.1e} of their norm", flush=True)  # fmt: skip
    return [Row(name, "loss_error", off_loss, "ratio"), Row(name, "gradient_error", off_grad, "ratio")]


def milliseconds(work: Callable[[], object], count: int) -> float:
    """Mean time of a run, after three."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count * 1e3


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--unroll", type=int, default=8)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    target = Target(resolve_model(given.model), torch.device("cuda"))
    texts = make_texts(target, 2000, 512)
    options = TrainerOptions(steps=10**6, batch_tokens=given.batch_tokens, unroll=given.unroll)
    # A padded rectangle of unsorted lengths is large: a few sequences are enough.
    fewer = replace(options, batch_tokens=min(4096, given.batch_tokens))
    rows = check(target, texts, fewer, given.draft_vocab_size, "padded, eager", "packed, eager")
    rows += check(target, texts, options, given.draft_vocab_size, "packed, eager", "packed, compiled")
    for name in given.ways:
        learner = Eagle3Learner(
            target, make_head(target, given.draft_vocab_size, texts), replace(options, **WAYS[name])
        )
        trainer = Trainer(learner, texts, replace(options, **WAYS[name]))
        ready = [batch for batch, _ in zip(trainer.stream(), range(4), strict=False)]
        turn = iter(range(10**9))

        def step(trainer: Trainer = trainer, ready: list[TextBatch] = ready, turn: object = turn) -> None:
            trainer.learn(ready[next(turn) % len(ready)])  # type: ignore[call-overload]

        torch.cuda.reset_peak_memory_stats()
        took = milliseconds(step, given.count)
        forward = milliseconds(lambda learner=learner, ready=ready: learner.losses(ready[0]), given.count)
        target_only = milliseconds(lambda learner=learner, ready=ready: learner.look(ready[0]), given.count)
        peak = torch.cuda.max_memory_allocated() / 2**30
        filled = np.mean([batch.num_targets for batch in ready])
        print(
            f"{name}: step {took:.1f} ms, of which losses without backward {forward:.1f}, of which the target "
            f"{target_only:.1f}; {peak:.1f} GiB, {filled:.0f} targets",
            flush=True,
        )
        for metric, value in (("step", took), ("losses", forward), ("target", target_only)):
            rows.append(Row(name, f"{metric}_milliseconds", value, "ms"))
        if name == "packed, compiled":
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                for _ in range(3):
                    step()
                torch.cuda.synchronize()
            print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))
        del trainer, learner
        torch.cuda.empty_cache()
    if given.out is not None:
        write_report(given.out, "train_step", torch.cuda.get_device_name(), rows, ("torch", "triton"))


if __name__ == "__main__":
    main()
