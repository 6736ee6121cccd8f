from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from training_world import make_head, make_trainer, random_texts

from outrider.errors import ConfigError
from outrider_tools.training import trainer as trainer_module
from outrider_tools.training.generate import answer_questions
from outrider_tools.training.options import TrainerOptions
from outrider_tools.training.prompts import ChatForm, Question
from outrider_tools.training.target import TargetModel
from outrider_tools.training.texts import Batches, Texts

OPTIONS = TrainerOptions(steps=12, batch_tokens=256, unroll=3, learning_rate=3e-3)


def some_texts(target: TargetModel) -> Texts:
    return random_texts(target, 12, 6, 30)


def test_loss_falls_and_deep_guesses_get_better(target: TargetModel) -> None:
    questions = [Question(word * 3) for word in ("abc", "x", "why? ", "1 + 2 = ", "zz", "Q")]
    texts = answer_questions(
        target.model, ChatForm(target.folder), questions, temperature=0.0, max_new_tokens=60, num_rows=4
    ).texts
    head = make_head(target, 259)
    points = make_trainer(target, head, texts, replace(OPTIONS, steps=70, warmup_share=0.1)).run().points
    # What is left is the entropy of a random target.
    assert points[-1].loss < points[0].loss - 0.3
    assert all(last > first + 0.2 for first, last in zip(points[0].rates, points[-1].rates, strict=True))


@pytest.mark.parametrize("changes", [{"optimizer": "adamw"}, {"optimizer": "muon", "average": 0.7}])
def test_a_resumed_training_equals_an_uninterrupted_one(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(trainer_module, "LOG_EVERY", 4)
    texts = some_texts(target)
    options = replace(OPTIONS, **changes)
    whole = make_trainer(target, make_head(target), texts, options)
    whole.run()
    path = tmp_path / "state.safetensors"
    make_trainer(target, make_head(target), texts, options, path).run(stop_after=8)
    resumed = make_trainer(target, make_head(target), texts, options, path)
    resumed.run()
    for name, tensor in whole.learner.module.state_dict().items():
        assert torch.equal(tensor, resumed.learner.module.state_dict()[name]), name
    assert resumed.history.points == whole.history.points
    with pytest.raises(ConfigError, match=r"another unroll \(3, not 4\)"):
        make_trainer(target, make_head(target), texts, replace(options, unroll=4), path)
    path.write_bytes(b"PK\x03\x04 a zip of pickles")
    with pytest.raises(ConfigError, match="is no state of a training"):
        make_trainer(target, make_head(target), texts, options, path)


def test_a_state_from_before_an_option_was_there_is_taken_up(target: TargetModel, tmp_path: Path) -> None:
    texts, path = some_texts(target), tmp_path / "state.safetensors"
    make_trainer(target, make_head(target), texts, OPTIONS, path).run(stop_after=4)
    with safe_open(path, "pt") as file:
        record = json.loads(file.metadata()["training"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del record["options"]["hit_weight"]
    save_file(tensors, path, {"training": json.dumps(record)})
    make_trainer(target, make_head(target), texts, OPTIONS, path)
    with pytest.raises(ConfigError, match=r"another hit_weight \(0\.0, not 0\.5\)"):
        make_trainer(target, make_head(target), texts, replace(OPTIONS, hit_weight=0.5), path)


def test_hits_alone_teach_a_head(target: TargetModel) -> None:
    texts = random_texts(target, 2, 6, 30)
    options = replace(OPTIONS, steps=30, optimizer="muon", muon_learning_rate=2e-2, hit_weight=1.0)
    points = make_trainer(target, make_head(target), texts, options).run().points
    assert points[-1].loss < points[0].loss - 0.1 and points[-1].rates[-1] > points[0].rates[-1] + 0.1


def test_what_is_exported_is_the_average_of_the_steps(target: TargetModel, tmp_path: Path) -> None:
    texts = some_texts(target)
    seen = []
    for steps in (1, 2, 3):
        head = make_head(target)
        make_trainer(target, head, texts, replace(OPTIONS, steps=3)).run(stop_after=steps)
        seen.append(head.fc.weight.detach().clone())
    head = make_head(target)
    # Kept shares of at least 0.9 make the plain mean of so few steps.
    make_trainer(target, head, texts, replace(OPTIONS, steps=3, average=0.9)).run()
    torch.testing.assert_close(head.fc.weight, torch.stack(seen).mean(0))


def test_muon_learns(target: TargetModel) -> None:
    texts = random_texts(target, 2, 6, 30)
    options = replace(OPTIONS, steps=30, optimizer="muon", muon_learning_rate=2e-2)
    points = make_trainer(target, make_head(target), texts, options).run().points
    assert points[-1].loss < points[0].loss - 0.1


def test_minutes_become_steps_by_the_speed_of_the_first_ones(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(10**6))
    monkeypatch.setattr(trainer_module.time, "monotonic", lambda: float(next(seconds)))
    texts = random_texts(target, 2, 6, 12)
    options = replace(OPTIONS, steps=0, minutes=1.0, unroll=1)
    history = make_trainer(target, make_head(target), texts, options).run()
    # The clock goes on by one at each look, and is looked at once or twice a step.
    assert 31 <= history.total_steps <= 60
    assert history.points[-1].step == history.total_steps


def test_minutes_end_a_training_whose_speed_is_not_known_yet(target: TargetModel) -> None:
    options = replace(OPTIONS, steps=0, minutes=1e-6, unroll=1)
    history = make_trainer(target, make_head(target), random_texts(target, 2, 6, 12), options).run()
    assert history.total_steps == 2, "the first step is not of them"
    assert [point.step for point in history.points] == [2]


def test_an_epoch_has_every_sequence_once_in_batches_that_fit(target: TargetModel) -> None:
    texts = random_texts(target, 40, 6, 50)
    batches = Batches(texts, 512, 4)
    groups = [group.tolist() for group in batches.groups(3)]
    assert sorted(number for group in groups for number in group) == list(range(40))
    assert groups == [group.tolist() for group in batches.groups(3)]
    assert groups != [group.tolist() for group in batches.groups(4)]
    for group in groups:
        batch = batches.batch(np.array(group))
        assert batch.token_ids.size == batch.bounds[-1] <= 512 and batch.num_targets == batch.targets.size
        for begin, end, number in zip(batch.bounds, batch.bounds[1:], group, strict=False):
            assert batch.token_ids[begin:end].tolist() == texts.sequence(number).tolist()
            own = batch.targets[(begin <= batch.targets) & (batch.targets < end)] - begin
            assert own.tolist() == list(range(max(4, int(texts.prompt_lens[number]) - 1), end - begin - 1))
    # A single sequence may be longer.
    assert len(Batches(texts, 32, 4).groups(3)) == 40
