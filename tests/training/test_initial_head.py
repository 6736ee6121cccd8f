from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import OPTIONS
from safetensors.torch import load_file, save_file
from training_world import make_head, make_trainer, random_texts, run_ahead

from outrider.errors import ConfigError
from outrider_tools.quantize import nearest_e4m3
from outrider_tools.training.drafters import export_drafter, make_learner, resolved, round_output
from outrider_tools.training.evaluate import load_drafter
from outrider_tools.training.heads import StoredEagle3Head, TrainableEagle3Head
from outrider_tools.training.options import RunOptions
from outrider_tools.training.target import TargetModel
from outrider_tools.training.trainer import Trainer


@pytest.fixture(scope="module")
def trained(target: TargetModel) -> TrainableEagle3Head:
    """A head with a vocabulary and an MLP of its own, after a few steps."""
    torch.manual_seed(0)
    head = make_head(target)
    make_trainer(target, head, random_texts(target, 12, 6, 30), OPTIONS.trainer).run()
    return head


@pytest.fixture
def folder(target: TargetModel, trained: TrainableEagle3Head, tmp_path: Path) -> Path:
    """Where that head was written, in float32."""
    export_drafter(trained, target.folder, tmp_path / "head", torch.float32)
    return tmp_path / "head"


@torch.no_grad()
def guesses(target: TargetModel, head: TrainableEagle3Head) -> torch.Tensor:
    """Log-probabilities [T, vocabulary] of two steps, -inf for what it has no word for."""
    ids = torch.from_numpy(random_texts(target, 1, 4, 20).sequence(0)).long()
    _, feature = run_ahead(target, head, ids, 2)
    logits = head.lm_head(head.norm(feature))
    found = torch.full((logits.shape[0], target.config.vocab_size), float("-inf"))
    found[:, head.target_ids] = logits.log_softmax(1)
    return found


def test_a_training_begins_as_the_head_in_the_folder(
    target: TargetModel, trained: TrainableEagle3Head, folder: Path
) -> None:
    texts = random_texts(target, 12, 6, 30, seed=4)
    options = resolved(RunOptions(init_from=folder, trainer=replace(OPTIONS.trainer, steps=40)), target.config)
    assert (options.draft_vocab_size, options.feature_layers) == (200, (1, 2, 3))
    learner = make_learner(target, texts, options)
    head = learner.module
    assert isinstance(head, TrainableEagle3Head)
    torch.testing.assert_close(guesses(target, head), guesses(target, trained), rtol=1e-4, atol=1e-4)
    trainer = Trainer(learner, texts, options.trainer)
    # Calibration gives channels other scales, and leaves what the head computes as it is.
    learner.prepare(next(trainer.stream()))
    assert not torch.allclose(head.feature_scale, trained.feature_scale, rtol=1e-2)
    torch.testing.assert_close(guesses(target, head), guesses(target, trained), rtol=1e-4, atol=1e-4)
    points = trainer.run().points
    assert points[-1].loss < points[0].loss


def test_a_training_may_add_tokens_to_those_of_the_head_in_the_folder(
    target: TargetModel, trained: TrainableEagle3Head, folder: Path
) -> None:
    texts = random_texts(target, 12, 6, 30, seed=4)
    tensors = load_file(folder / "model.safetensors")
    rows = target.stored_output().float()
    turned = rows @ torch.randn(rows.shape[1], rows.shape[1], generator=torch.Generator().manual_seed(5))
    tensors["lm_head.weight"] = turned[trained.target_ids]
    save_file(tensors, folder / "model.safetensors")
    options = resolved(RunOptions(init_from=folder, draft_vocab_size=230), target.config)
    head = make_learner(target, texts, options).module
    assert isinstance(head, TrainableEagle3Head)
    assert head.target_ids.shape[0] == 230
    known, added = torch.isin(head.target_ids, trained.target_ids), ~torch.isin(head.target_ids, trained.target_ids)
    assert int(known.sum()) == 200, "all that the head in the folder guesses"
    torch.testing.assert_close(head.lm_head.weight[known], tensors["lm_head.weight"])
    torch.testing.assert_close(head.lm_head.weight[added], turned[head.target_ids[added]], rtol=1e-3, atol=1e-3)
    counts = np.bincount(texts.answer_tokens(), minlength=target.config.vocab_size)
    left = np.setdiff1d(np.arange(target.config.vocab_size), head.target_ids)
    assert counts[head.target_ids[added]].min() >= counts[left].max(), "the answers' most frequent others"


def test_an_output_matrix_in_eight_bits_guesses_nearly_the_same(
    target: TargetModel, trained: TrainableEagle3Head, folder: Path, tmp_path: Path
) -> None:
    texts = random_texts(target, 12, 6, 30, seed=4)
    options = resolved(RunOptions(init_from=folder, trainer=OPTIONS.trainer), target.config)
    learner = make_learner(target, texts, options)
    head = learner.module
    assert isinstance(head, TrainableEagle3Head)
    batch = next(Trainer(learner, texts, options.trainer).stream())
    learner.prepare(batch)
    whole, moments = head.lm_head.weight.detach().clone(), learner.output_moments(batch)
    round_output(learner, batch)

    def error(matrix: torch.Tensor) -> float:
        difference = matrix.detach() - whole
        return float(((difference @ moments) * difference).sum())

    assert error(head.lm_head.weight) < 0.7 * error(nearest_e4m3(whole)), "products with the head's own rows"
    export_drafter(head, target.folder, tmp_path / "eight", torch.float32, output_dtype=torch.float8_e4m3fn)
    stored = load_file(tmp_path / "eight/model.safetensors")
    assert stored["lm_head.weight"].dtype == torch.float8_e4m3fn and stored["fc.weight"].dtype == torch.float32
    again = StoredEagle3Head(tmp_path / "eight", target.config).head(target)
    assert torch.equal(again.lm_head.weight, head.lm_head.weight), "a training may start from it"
    served = load_drafter("EAGLE3", tmp_path / "eight", target.folder, target.model)
    rows = torch.randn(5, target.config.hidden_size)
    torch.testing.assert_close(served.logits(rows), head.lm_head(rows).detach(), rtol=0.02, atol=0.02)


def test_rows_of_a_head_in_another_order_are_sorted(
    target: TargetModel, trained: TrainableEagle3Head, folder: Path
) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    order = torch.randperm(200)
    ids = (tensors["d2t"] + torch.arange(200))[order]
    tensors |= {"d2t": ids - torch.arange(200), "lm_head.weight": tensors["lm_head.weight"][order]}
    save_file({f"model.{name}" if name == "norm.weight" else name: tensor for name, tensor in tensors.items()}, path)
    head = StoredEagle3Head(folder, target.config).head(target)
    assert torch.equal(head.t2d, trained.t2d)
    torch.testing.assert_close(guesses(target, head), guesses(target, trained), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128, "head_dim": 32, "target_hidden_size": 128}, "target_hidden_size is 128, and must be 64"),
        ({"hidden_size": 128}, "hidden_size is 128, and must be 64"),
        ({"vocab_size": 300}, "vocab_size is 300, and must be 259"),
        ({"num_key_value_heads": 4}, "num_kv_heads is 4, and must be 2"),
        ({"rms_norm_eps": 0.1}, "rms_norm_eps is 0.1, and must be 1e-06"),
        ({"rope_theta": 5.0, "rope_parameters": None}, "rope is .*, and must be"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, and must be 1"),
        ({"norm_output": True}, "norm_output is True, and must be False"),
        ({"draft_vocab_size": 199}, r"config.json calls for integers \[199\]"),
        ({"intermediate_size": 95}, r"has shape \[64, 96\], the draft's config.json calls for \[64, 95\]"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_the_field_and_both_values(
    target: TargetModel, folder: Path, changes: dict[str, Any], message: str
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        StoredEagle3Head(folder, target.config).head(target)


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {**tensors, name: tensor}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_tensor("embed_tokens.weight", torch.zeros(259, 64)), "embed_tokens.weight is not the target's embedding"),
        (with_tensor("embed_tokens.weight", torch.zeros(9, 64)), r"is \[9, 64\], and must be \[259, 64\]"),
        (with_tensor("midlayer.self_attn.q_proj.bias", torch.zeros(64)), "qkv_bias is True, and must be False"),
        (lambda found: {n: t for n, t in found.items() if n != "d2t"}, "draft_vocab_size is 200, and must be 259"),
        (
            lambda found: {"lm_head.weight": found["lm_head.weight"]},
            "holds no known kind of draft; its tensors include lm_head.weight",
        ),
    ],
)
def test_a_head_of_other_tensors_is_refused(
    target: TargetModel,
    folder: Path,
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    message: str,
) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(ConfigError, match=message):
        StoredEagle3Head(folder, target.config).head(target)


def test_the_targets_own_embedding_in_the_folder_is_no_fault(target: TargetModel, folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), "embed_tokens.weight": target.embed(torch.arange(259)).contiguous()}, path)
    assert StoredEagle3Head(folder, target.config).head(target).learned


def test_options_that_the_head_decides_may_not_differ(target: TargetModel, folder: Path) -> None:
    for changes, message in (
        ({"draft_vocab_size": 150}, "--draft-vocab-size 150: the head of --init-from has 200"),
        ({"draft_vocab_size": 260}, "--draft-vocab-size 260: the target has 259 tokens"),
        ({"intermediate_size": 80}, "--intermediate-size 80: the head of --init-from has 96"),
        ({"feature_layers": (1, 2, 2)}, r"--feature-layers \(1, 2, 2\): the head of --init-from has \(1, 2, 3\)"),
        ({"algorithm": "EAGLE"}, "--init-from .*: is for --algorithm EAGLE3, not EAGLE; leave it out"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolved(replace(RunOptions(init_from=folder), **changes), target.config)
    learning = RunOptions(algorithm="NEXTN", trainer=replace(OPTIONS.trainer, hit_weight=0.5))
    with pytest.raises(ConfigError, match=r"--hit-weight 0\.5: is for --algorithm EAGLE3, not NEXTN"):
        resolved(learning, target.config)
    assert resolved(RunOptions(), replace(target.config, vocab_size=10000)).draft_vocab_size == 8192
    assert resolved(RunOptions(), target.config).draft_vocab_size == 259, "all of a smaller vocabulary"


@pytest.mark.parametrize(
    ("given", "layers", "message"),
    [
        (RunOptions(feature_layers=(1, 5)), 4, r"--feature-layers 5: the target has 4 layers; choose from 0 to 4"),
        (RunOptions(feature_layers=(-1,)), 4, r"--feature-layers -1: the target has 4 layers"),
        (RunOptions("DFLASH"), 3, "--feature-layers: must be given for a target of 3 layers"),
        (RunOptions(draft_vocab_size=260), 4, "--draft-vocab-size 260: the target has 259 tokens"),
        (RunOptions("STANDALONE", layers=5), 4, "--layers 5: the target has 4"),
        (RunOptions("STANDALONE", hidden=33), 4, "--hidden 33: must be a multiple of the head size 16"),
    ],
)
def test_sizes_that_do_not_fit_the_target_are_told_before_text_is_made(
    target: TargetModel, given: RunOptions, layers: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(given, replace(target.config, num_layers=layers))


def test_a_training_that_began_as_another_head_is_not_taken_up(
    target: TargetModel, folder: Path, tmp_path: Path
) -> None:
    texts, path = random_texts(target, 12, 6, 30), tmp_path / "state.safetensors"
    options = resolved(RunOptions(init_from=folder, trainer=OPTIONS.trainer), target.config)

    def trainer(given: RunOptions) -> Trainer:
        return Trainer(make_learner(target, texts, options), texts, options.trainer, path, drafter=given.of_drafter)

    trainer(options).run(stop_after=2)
    trainer(options)
    with pytest.raises(ConfigError, match="another --init-from"):
        trainer(replace(options, init_from=None))
