from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafters import OPTIONS, loaded_drafter, train_drafter
from training_world import random_texts, run_ahead, states

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.config.draft import BLOCK_ALGORITHMS
from outrider.errors import ConfigError
from outrider.models.drafters.heads import BlockHead
from outrider.models.drafters.kinds import algorithm_of
from outrider_tools.training import trainer as trainer_module
from outrider_tools.training.drafters import TrainableLM, export_drafter, make_learner, small_config
from outrider_tools.training.evaluate import read_text
from outrider_tools.training.generate import answer_questions
from outrider_tools.training.learner import TrainableHead
from outrider_tools.training.prompts import ChatForm, Question
from outrider_tools.training.rollout import NodeRollout
from outrider_tools.training.target import TargetModel
from outrider_tools.training.texts import Texts
from outrider_tools.training.trainer import Trainer

HEADS = ("EAGLE", "NEXTN")


@pytest.fixture(scope="module")
def texts(target: TargetModel) -> Texts:
    questions = [Question(word * 3) for word in ("abc", "x", "why? ", "1 + 2 = ", "zz", "Q")]
    return answer_questions(
        target.model, ChatForm(target.folder), questions, temperature=0.0, max_new_tokens=40, num_rows=6
    ).texts


@pytest.mark.parametrize("kind", HEADS)
@torch.no_grad()
def test_exported_heads_run_ahead_as_the_trained_module_does(
    target: TargetModel, texts: Texts, tmp_path: Path, kind: str
) -> None:
    module = (learner := train_drafter(target, texts, kind)).module
    assert isinstance(module, TrainableHead)
    model = loaded_drafter(target, learner, kind, tmp_path)
    assert algorithm_of(tmp_path) == kind
    ids = torch.from_numpy(random_texts(target, 1, 4, 16).sequence(0)).long()
    features, _ = states(target, ids, model.feature_layers)
    steps = run_ahead(target, module, ids, 4)
    for base in range(len(ids) - 5):
        # The text up to the base, then a chain on the head's own features.
        kv, count = model.new_kv(64), base + 1
        slots = torch.arange(64)
        batch = ForwardBatch(ids[1 : count + 1], slots[:count], [Segment(count, slots[:count])])
        rows, own = model.forward(batch, model.project(features[:count]), kv, TorchAttention())
        for step in range(4):
            expected = steps[step][base]
            torch.testing.assert_close(rows[-1], expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                model.logits(rows)[-1], target.model.logits(expected[None])[0], rtol=1e-4, atol=1e-4
            )
            place = count + step
            batch = ForwardBatch(ids[place + 1][None], slots[place][None], [Segment(1, slots[: place + 1])])
            assert own is not None
            rows, own = model.forward(batch, own[-1:], kv, TorchAttention())


@pytest.mark.parametrize("kind", BLOCK_ALGORITHMS)
@torch.no_grad()
def test_exported_block_heads_guess_as_the_trained_module_does(
    target: TargetModel, texts: Texts, tmp_path: Path, kind: str
) -> None:
    learner = train_drafter(target, texts, kind)
    model = loaded_drafter(target, learner, kind, tmp_path)
    assert algorithm_of(tmp_path) == kind
    assert isinstance(model, BlockHead) and model.block.num_guesses == 3
    ids = torch.from_numpy(random_texts(target, 1, 4, 16).sequence(0)).long()
    steps = run_ahead(target, learner.module, ids, 3)
    output = learner.module.output_weight
    assert output is not None
    draft = read_text(target.model, model, ids)
    roots = torch.arange(1, len(ids) - 4)
    branches = NodeRollout(draft, roots)
    features, owners = branches.root_features, torch.arange(len(roots))
    for step in range(3):
        rows, features = branches.run(ids[roots + step], owners, features, owners)
        expected = steps[step][roots - 1] @ output.t()
        torch.testing.assert_close(model.logits(rows), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_exported_language_model_gives_the_trained_modules_logits(
    target: TargetModel, texts: Texts, tmp_path: Path
) -> None:
    learner = train_drafter(target, texts, "STANDALONE")
    module = learner.module
    assert isinstance(module, TrainableLM)
    model = loaded_drafter(target, learner, "STANDALONE", tmp_path)
    assert algorithm_of(tmp_path) == "STANDALONE"
    assert (tmp_path / "tokenizer.json").read_bytes() == (target.folder / "tokenizer.json").read_bytes()
    ids = torch.from_numpy(random_texts(target, 1, 4, 16).sequence(0)).long()
    slots = torch.arange(len(ids))
    rows, _ = model.forward(
        ForwardBatch(ids, slots, [Segment(len(ids), slots)]), None, model.new_kv(64), TorchAttention()
    )
    expected = run_ahead(target, module, ids, 1)[0] @ module.output_weight.t()
    torch.testing.assert_close(model.logits(rows), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ("EAGLE", *BLOCK_ALGORITHMS, "NEXTN", "STANDALONE"))
def test_every_kind_learns(target: TargetModel, texts: Texts, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "LOG_EVERY", 5)
    options = replace(OPTIONS, algorithm=kind, trainer=replace(OPTIONS.trainer, steps=30, warmup_share=0.1))
    learner = make_learner(target, texts, options)
    points = Trainer(learner, texts, options.trainer).run().points
    # A small model begins with the target's own layers, so it has less to learn.
    assert points[-1].loss < points[0].loss - 0.15
    assert all(last > first + 0.1 for first, last in zip(points[0].rates, points[-1].rates, strict=True))


@pytest.mark.parametrize("kind", ("EAGLE", "DSPARK", "NEXTN", "STANDALONE"))
def test_a_resumed_training_of_every_kind_equals_an_uninterrupted_one(
    target: TargetModel, texts: Texts, tmp_path: Path, kind: str
) -> None:
    options = replace(OPTIONS, algorithm=kind, trainer=replace(OPTIONS.trainer, steps=6))
    whole = train_drafter(target, texts, kind, 6).module.state_dict()
    path = tmp_path / "state.safetensors"
    Trainer(make_learner(target, texts, options), texts, options.trainer, path).run(stop_after=3)
    again = make_learner(target, texts, options)
    Trainer(again, texts, options.trainer, path).run()
    for name, tensor in again.module.state_dict().items():
        assert torch.equal(tensor, whole[name]), name


def test_a_small_model_of_all_layers_begins_as_the_target(target: TargetModel) -> None:
    model = TrainableLM(small_config(target.config, target.config.num_layers, 0))
    model.start(target)
    ids = torch.from_numpy(random_texts(target, 1, 4, 16).sequence(0)).long()
    _, hidden = states(target, ids)
    with torch.no_grad():
        torch.testing.assert_close(run_ahead(target, model, ids, 1)[0], hidden, rtol=1e-4, atol=1e-4)


def test_a_narrow_model_keeps_the_size_of_heads_and_begins_with_the_embeddings_main_directions(
    target: TargetModel, texts: Texts, tmp_path: Path
) -> None:
    options = replace(OPTIONS, algorithm="STANDALONE", hidden=32, layers=1)
    learner = make_learner(target, texts, options)
    module = learner.module
    assert isinstance(module, TrainableLM)
    assert (module.config.num_heads, module.config.head_dim) == (2, target.config.head_dim)
    own, full = module.embed_tokens.weight, target.embed(torch.arange(target.config.vocab_size))
    # As much of the embedding's size as any 32 directions can hold.
    best = torch.linalg.svdvals(full)[:32].square().sum()
    torch.testing.assert_close(own.detach().square().sum(), best, rtol=1e-4, atol=1e-4)
    model = loaded_drafter(target, learner, "STANDALONE", tmp_path)
    assert model.num_heads == 2
    with pytest.raises(ConfigError, match="--hidden 33: must be a multiple of the head size 16"):
        small_config(target.config, 1, 33)
    with pytest.raises(ConfigError, match="--layers 5: the target has 4"):
        small_config(target.config, 5, 0)


def test_a_head_for_another_family_says_what_it_needs(target: TargetModel, texts: Texts, tmp_path: Path) -> None:
    learner = train_drafter(target, texts, "NEXTN", 1)
    export_drafter(learner.module, target.folder, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["architectures"] == ["LlamaForCausalLM"] and fields["num_nextn_predict_layers"] == 1
    assert fields["torch_dtype"] == "bfloat16" and "dtype" not in fields
