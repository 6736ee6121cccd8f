"""What processes of a parallel training run in tests."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from io import StringIO
from pathlib import Path

import torch
from safetensors.torch import save_file
from training_world import make_head, random_texts

from outrider.errors import ConfigError
from outrider_tools.training.corpus import Corpus
from outrider_tools.training.figures import Report
from outrider_tools.training.learner import Learner
from outrider_tools.training.options import CorpusOptions, TrainerOptions
from outrider_tools.training.parallel import RankGroup
from outrider_tools.training.prompts import ChatForm, Question
from outrider_tools.training.target import TargetModel
from outrider_tools.training.texts import TextBatch, Texts
from outrider_tools.training.trainer import Trainer

OPTIONS = TrainerOptions(steps=4, batch_tokens=130, unroll=2, optimizer="adamw", learning_rate=1e-2, packed=True)
"""AdamW: Muon makes much of last bits, which sums of two ranks round otherwise than one process."""


class Calibrated(Learner):
    """Leaves a head's scale of features as it is."""

    def prepare(self, batch: TextBatch) -> None:
        pass


def texts_and_options(target: TargetModel, together: bool) -> tuple[Texts, TrainerOptions]:
    """Texts that make two batches of unequal numbers of targets; one batch `together`."""
    texts = random_texts(target, 6, 6, 30)
    return texts, replace(OPTIONS, batch_tokens=2 * OPTIONS.batch_tokens) if together else OPTIONS


def train_and_make_texts(folder: Path, out: Path, device: torch.device, ranks: RankGroup) -> None:
    """Both, one after the other: a rank takes longer to start than to do either."""
    train_two(folder, out, device, ranks)
    make_texts(folder, out, device, ranks)


def train_two(folder: Path, out: Path, device: torch.device, ranks: RankGroup) -> None:
    """Each rank saves the weights that it ends with."""
    target = TargetModel(folder, device)
    texts, options = texts_and_options(target, False)
    # Only the first rank's beginning counts.
    head = make_head(target)
    if not ranks.is_main:
        with torch.no_grad():
            head.fc.weight += 1.0
    learner = Calibrated(target, head, options)
    Trainer(learner, texts, options, out / "state.safetensors", ranks).run()
    save_file(head.state_dict(), out / f"{ranks.rank}.safetensors")


def make_texts(folder: Path, out: Path, device: torch.device, ranks: RankGroup) -> None:
    """Each rank saves all that it was given, twice: made, and found."""
    options = CorpusOptions(
        tokens=200,
        invented=48,
        question_tokens=60,
        answer_tokens=20,
        held_out=1,
        num_rows=24,
        question_temperature=3.0,
        beginnings=0.0,
    )
    target, form = TargetModel(folder, device), ChatForm(folder)
    for turn in range(2):
        corpus = Corpus(target.model, form, options, out, Report(StringIO()), ranks)
        made = corpus.texts([Question(f"What is {number}?") for number in range(5)])
        made.texts.save(out / f"made-{turn}-{ranks.rank}.safetensors")
        (out / f"held-{turn}-{ranks.rank}.json").write_text(json.dumps(made.held_out))


def wait_for_late_ones(out: Path, device: torch.device, ranks: RankGroup) -> None:
    """The first rank comes early, the others after some work: it must find their work done."""
    for turn in range(20):
        if not ranks.is_main:
            (out / f"late-{turn}-{ranks.rank}").write_bytes(torch.randn(2_000_000).numpy().tobytes())
        ranks.barrier()
        if len(list(out.glob(f"late-{turn}-*"))) != ranks.count - 1:
            raise ConfigError(f"turn {turn}: the first rank did not wait")
        ranks.barrier()


def fail_on_one(out: Path, device: torch.device, ranks: RankGroup) -> None:
    """Rank 1 fails while the other waits for it."""
    (out / f"pid-{ranks.rank}").write_text(str(os.getpid()))
    ranks.barrier()
    if ranks.rank == 1:
        raise ConfigError("rank 1 has had enough")
    ranks.barrier()


def die_on_one(out: Path, device: torch.device, ranks: RankGroup) -> None:
    """Rank 1 is killed."""
    ranks.barrier()
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.barrier()
