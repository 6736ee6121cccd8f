"""Small trained drafters of every kind, in folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from outrider.models.drafters.base import DraftModel
from outrider_tools.training.drafters import export_drafter, make_learner
from outrider_tools.training.evaluate import load_drafter
from outrider_tools.training.learner import Learner
from outrider_tools.training.options import CorpusOptions, RunOptions, TrainerOptions
from outrider_tools.training.target import TargetModel
from outrider_tools.training.texts import Texts
from outrider_tools.training.trainer import Trainer

KINDS = ("EAGLE3", "EAGLE", "DFLASH", "DSPARK", "NEXTN", "STANDALONE")
OPTIONS = RunOptions(
    draft_vocab_size=200,
    feature_layers=(1, 2, 3),
    layers=2,
    markov_rank=8,
    corpus=CorpusOptions(),
    trainer=TrainerOptions(steps=12, batch_tokens=256, unroll=3, learning_rate=3e-3),
)


@torch.enable_grad()
def train_drafter(target: TargetModel, texts: Texts, algorithm: str, steps: int = 12) -> Learner:
    """Of a few steps."""
    options = replace(OPTIONS, algorithm=algorithm, trainer=replace(OPTIONS.trainer, steps=steps))
    learner = make_learner(target, texts, options)
    Trainer(learner, texts, options.trainer).run()
    return learner


def loaded_drafter(target: TargetModel, learner: Learner, algorithm: str, folder: Path) -> DraftModel:
    """Written and read again, in float32."""
    export_drafter(learner.module, target.folder, folder, torch.float32)
    return load_drafter(algorithm, folder, target.folder, target.model)
