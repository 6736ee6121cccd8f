"""Small trained drafters of every kind, in folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from outrider.models.drafters.base import DraftModel
from outrider_tools.training.corpus import CorpusOptions
from outrider_tools.training.evaluation_stage import load_drafter
from outrider_tools.training.export import export_drafter
from outrider_tools.training.options import TrainerOptions
from outrider_tools.training.run_options import RunOptions
from outrider_tools.training.target import Target
from outrider_tools.training.texts import Texts
from outrider_tools.training.trainee import Trainee, make_trainee
from outrider_tools.training.trainer import Trainer

KINDS = ("EAGLE3", "EAGLE", "NEXTN", "STANDALONE")
OPTIONS = RunOptions(
    draft_vocab_size=200,
    feature_layers=(1, 2, 3),
    layers=2,
    corpus=CorpusOptions(),
    trainer=TrainerOptions(steps=12, batch_tokens=256, unroll=3, learning_rate=3e-3),
)


@torch.enable_grad()
def train_drafter(target: Target, texts: Texts, algorithm: str, steps: int = 12) -> Trainee:
    """Of a few steps."""
    options = replace(OPTIONS, algorithm=algorithm, trainer=replace(OPTIONS.trainer, steps=steps))
    trainee = make_trainee(target, texts, options)
    Trainer(trainee.learner, texts, options.trainer).run()
    return trainee


def loaded_drafter(target: Target, trainee: Trainee, algorithm: str, folder: Path) -> DraftModel:
    """Written and read again, in float32."""
    export_drafter(trainee.module, target.folder, folder, torch.float32)
    return load_drafter(algorithm, folder, target.folder, target.model)
