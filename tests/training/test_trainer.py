from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_world import make_head, random_texts

from outrider.errors import ConfigError
from outrider.training import trainer as trainer_module
from outrider.training.corpus import greedy_texts
from outrider.training.prompts import ChatForm, Question
from outrider.training.target import Target
from outrider.training.texts import Texts, batches
from outrider.training.trainer import Trainer, TrainerOptions

OPTIONS = TrainerOptions(steps=12, batch_tokens=256, unroll=3, learning_rate=3e-3)


def some_texts(target: Target) -> Texts:
    return random_texts(target, 12, 6, 30)


def test_loss_falls_and_deep_guesses_get_better(target: Target) -> None:
    questions = [Question(word * 3) for word in ("abc", "x", "why? ", "1 + 2 = ", "zz", "Q")]
    texts = greedy_texts(target.model, ChatForm(target.folder), questions, 60, 4)
    head = make_head(target, 259)
    points = Trainer(target, head, texts, replace(OPTIONS, steps=120, warmup_share=0.1)).run().points
    # What is left is the entropy of a random target.
    assert points[-1].loss < points[0].loss - 0.3
    assert all(last > first + 0.2 for first, last in zip(points[0].rates, points[-1].rates, strict=True))


def test_a_resumed_training_equals_an_uninterrupted_one(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "LOG_EVERY", 4)
    texts = some_texts(target)
    whole = Trainer(target, make_head(target), texts, OPTIONS)
    whole.run()
    path = tmp_path / "state.safetensors"
    Trainer(target, make_head(target), texts, OPTIONS, path).run(stop_after=8)
    resumed = Trainer(target, make_head(target), texts, OPTIONS, path)
    resumed.run()
    for name, tensor in whole.head.state_dict().items():
        assert torch.equal(tensor, resumed.head.state_dict()[name]), name
    assert resumed.history.points == whole.history.points
    with pytest.raises(ConfigError, match=r"another unroll \(3, not 4\)"):
        Trainer(target, make_head(target), texts, replace(OPTIONS, unroll=4), path)
    path.write_bytes(b"PK\x03\x04 a zip of pickles")
    with pytest.raises(ConfigError, match="is no state of a training"):
        Trainer(target, make_head(target), texts, OPTIONS, path)


def test_minutes_become_steps_by_the_speed_of_the_first_ones(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(10**6))
    monkeypatch.setattr(trainer_module.time, "monotonic", lambda: float(next(seconds)))
    texts = random_texts(target, 2, 6, 12)
    options = replace(OPTIONS, steps=0, minutes=1.0, unroll=1)
    history = Trainer(target, make_head(target), texts, options).run()
    # The clock goes on by one at each look, and is looked at once or twice a step.
    assert 31 <= history.total_steps <= 60
    assert history.points[-1].step == history.total_steps


def test_an_epoch_has_every_sequence_once_in_batches_that_fit(target: Target) -> None:
    texts = random_texts(target, 40, 6, 50)
    seen = []
    for batch in batches(texts, 512, 4, seed=3):
        assert batch.token_ids.size <= 512 + 16 * len(batch.token_ids)
        for row, tokens in enumerate(batch.token_ids):
            length = int(tokens.nonzero()[0].max()) + 1
            number = next(n for n in range(len(texts)) if texts.sequence(n).tolist() == tokens[:length].tolist())
            seen.append(number)
            places = batch.targets - row * batch.token_ids.shape[1]
            own = places[(places >= 0) & (places < batch.token_ids.shape[1])]
            assert own.tolist() == list(range(max(4, int(texts.prompt_lens[number]) - 1), length - 1))
    assert sorted(seen) == list(range(40))
    order = [batch.token_ids.tolist() for batch in batches(texts, 512, 4, seed=3)]
    assert order == [batch.token_ids.tolist() for batch in batches(texts, 512, 4, seed=3)]
    assert order != [batch.token_ids.tolist() for batch in batches(texts, 512, 4, seed=4)]
