"""Heads and texts for the tests of training, and what target and drafters make of a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from outrider_tools.training.attention import Spans
from outrider_tools.training.heads import TrainableEagle3Head
from outrider_tools.training.learner import DraftInput, Learner, TrainableDrafter
from outrider_tools.training.options import TrainerOptions
from outrider_tools.training.target import TargetModel, target_states
from outrider_tools.training.texts import Texts
from outrider_tools.training.trainer import Trainer


def make_head(target: TargetModel, draft_vocab_size: int = 200) -> TrainableEagle3Head:
    """An untrained head whose draft vocabulary leaves some tokens out."""
    torch.manual_seed(5)
    random = torch.randperm(target.config.vocab_size)[:draft_vocab_size].sort().values
    head = TrainableEagle3Head(target.config, random, (1, 2, 3))
    head.start(target)
    head.calibrate(torch.rand(10, head.fc.in_features) * 3, torch.empty(0))
    return head


def random_texts(target: TargetModel, count: int, prompt_len: int, answer_len: int, seed: int = 0) -> Texts:
    """Sequences of random tokens, of different lengths."""
    random = torch.Generator().manual_seed(seed)

    def tokens(size: int) -> list[int]:
        ids: list[int] = torch.randint(3, target.config.vocab_size, (size,), generator=random).tolist()
        return ids

    return Texts.join(
        [tokens(prompt_len + i % 3) for i in range(count)], [tokens(answer_len - i % 5) for i in range(count)]
    )


def states(target: TargetModel, ids: Tensor, layers: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """The target's features [T, layers * hidden] and hidden states [T, hidden] of a text, int64 [T]."""
    return target_states(target.model, ids, Spans.whole(len(ids), ids.device), layers)


def run_ahead(target: TargetModel, module: TrainableDrafter, ids: Tensor, num_steps: int) -> list[Tensor]:
    """What a drafter yields over a text, int64 [T]: [T, hidden] of each step."""
    features, _ = states(target, ids, module.feature_layers)
    given = DraftInput(ids, target.embed(ids), features, Spans.whole(len(ids), ids.device))
    return list(module.runner(target.rotary, lambda piece: piece)(given, num_steps))


def make_trainer(
    target: TargetModel,
    head: TrainableEagle3Head,
    texts: Texts,
    options: TrainerOptions,
    state_path: Path | None = None,
) -> Trainer:
    """Of an EAGLE-3 head."""
    return Trainer(Learner(target, head, options), texts, options, state_path)
