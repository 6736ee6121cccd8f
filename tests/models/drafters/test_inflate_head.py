"""Inflated heads guess on inflated features what their sources guess on the source's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import load, path_logits, run_chain
from safetensors.torch import load_file
from silent_progress import silent
from tiny_blocks import DEEPSPEC_FIELDS, ZLAB_FIELDS, backbone, dspark_tensors
from tiny_heads import (
    DRAFT_IDS,
    EAGLE3_FIELDS,
    FIELDS,
    HIDDEN,
    VOCAB,
    Maker,
    eagle3_tensors,
    eagle_tensors,
    save_head,
    save_mimo,
)
from tiny_models import relative_error, save_tiny, token_ids
from torch import Tensor

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.cli.main import main
from outrider.errors import ConfigError
from outrider.models.drafters.base import DraftModel
from outrider.models.loader import load_model
from outrider_tools.inflate.folder import InflateOptions, inflate
from outrider_tools.inflate.head import inflate_head, random_eagle3_head
from outrider_tools.inflate.shapes import Shape, shape_of
from outrider_tools.training.drafters import export_drafter
from outrider_tools.training.heads import TrainableMtpHead

# The tiny targets have hidden 32, 3 layers, 4 heads over 2 KV heads of 8 channels, and 48 MLP channels.
WIDER = Shape(hidden=48, layers=5, heads=12, kv_heads=4, head_dim=16, intermediate=56)
COPIED_KV = Shape(hidden=50, layers=4, heads=5, kv_heads=5, head_dim=24, intermediate=64)

SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": {name: value for name, value in FIELDS.items() if name != "architectures"},
    "draft_vocab_size": len(DRAFT_IDS),
    "eagle_aux_hidden_state_layer_ids": [0, 2, 3],
    "norm_output": True,
}


def true_features(model: DraftModel, target: Path, count: int) -> Tensor:
    """Of so many tokens of a text, as the head's layers leave them, side by side."""
    slots = torch.arange(count)
    base = load_model(target)
    batch = ForwardBatch(token_ids(count), slots, [Segment(count, slots)])
    _, features = base.forward_with_features(batch, base.new_kv(count), TorchAttention(), model.feature_layers)
    return torch.cat(features, 1)


def guesses_of(model: DraftModel, target: Path) -> tuple[Tensor, list[int]]:
    """A chain of guesses behind a prompt, from the target's true features."""
    return run_chain(model, token_ids(12)[1:], model.project(true_features(model, target, 11)), 4)


def check(
    tmp_path: Path, algorithm: str, shape: Shape, own_folder: Path, tolerance: float = 2e-5, **changes: Any
) -> None:
    target = tmp_path / "target"
    options = InflateOptions(shape, **{"dtype": torch.float32, **changes})
    inflate(target, tmp_path / "big", options, silent)
    inflate_head(own_folder, target, tmp_path / "big-head", options, silent)
    logits, guesses = guesses_of(
        load(algorithm, speculative_draft_model_path=str(own_folder), target_model_path=str(target)), target
    )
    big = load(
        algorithm,
        speculative_draft_model_path=str(tmp_path / "big-head"),
        target_model_path=str(tmp_path / "big"),
    )
    assert (big.hidden_size, big.feature_size, big.num_heads, big.head_dim) == (
        shape.hidden,
        shape.hidden,
        shape.heads,
        shape.head_dim,
    )
    found, own_guesses = guesses_of(big, tmp_path / "big")
    assert relative_error(found[:1], logits[:1]) <= tolerance
    # Later guesses build on the head's own features, and a random head multiplies what rounding has left: up to four
    # times a guess, as much as the CPU's products differ in.
    assert relative_error(found, logits) <= max(tolerance, 2e-4)
    if tolerance < 1e-3:
        assert own_guesses == guesses


@pytest.mark.parametrize("shape", [WIDER, COPIED_KV], ids=["wider", "copied kv"])
@pytest.mark.parametrize("layout", ["own embedding", "shared embedding", "all shared", "biases", "speculators"])
def test_eagle3(layout: str, shape: Shape, tmp_path: Path) -> None:
    save_tiny(tmp_path / "target")
    tensors, fields = eagle3_tensors(bias=layout == "biases"), dict(EAGLE3_FIELDS)
    if layout in ("shared embedding", "all shared"):
        tensors.pop("embed_tokens.weight")
    if layout == "all shared":
        for name in ("lm_head.weight", "d2t", "t2d"):
            tensors.pop(name)
        fields.pop("draft_vocab_size")
    if layout == "biases":
        tensors |= {"fc.bias": Maker(4).matrix(HIDDEN), "midlayer.self_attn.o_proj.bias": Maker(5).matrix(HIDDEN)}
    if layout == "speculators":
        fields = SPECULATORS
        tensors = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
    save_head(tmp_path / "head", fields, tensors)
    check(tmp_path, "EAGLE3", shape, tmp_path / "head")
    written = json.loads((tmp_path / "big-head" / "config.json").read_text())
    expected = {"wider": [0, 2, 4], "copied": [0, 1, 3]}["wider" if shape is WIDER else "copied"]
    if layout == "speculators":
        expected[:2] = [-1, expected[1]]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == expected


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_eagle3_of_a_target_with_experts(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "target")
    tensors, fields = eagle3_tensors(), dict(EAGLE3_FIELDS)
    for shared in (name, *(("d2t", "t2d") if name == "lm_head.weight" else ())):
        tensors.pop(shared)
    if name == "lm_head.weight":
        fields.pop("draft_vocab_size")
    save_head(tmp_path / "head", fields, tensors)
    check(tmp_path, "EAGLE3", Shape(80, 5, 12, 4, 16, 24, experts=8, active=4), tmp_path / "head")


@pytest.mark.parametrize("shape", [WIDER, replace(COPIED_KV, head_dim=32)], ids=["wider", "copied kv"])
@pytest.mark.parametrize("kind", ["z-lab's", "vanilla", "gated", "rnn"])
def test_a_block_head(kind: str, shape: Shape, tmp_path: Path) -> None:
    target, big = tmp_path / "target", tmp_path / "big"
    save_tiny(target)
    algorithm = "DFLASH" if kind == "z-lab's" else "DSPARK"
    tensors = backbone() if algorithm == "DFLASH" else dspark_tensors(kind)
    fields = ZLAB_FIELDS if algorithm == "DFLASH" else DEEPSPEC_FIELDS | {"markov_head_type": kind}
    plain = {name: tensor for name, tensor in tensors.items() if "_norm.weight" not in name or "self_attn" not in name}
    save_head(tmp_path / "head", fields, plain)
    options = InflateOptions(shape, dtype=torch.float32)
    inflate(target, big, options, silent)
    inflate_head(tmp_path / "head", target, tmp_path / "big-head", options, silent)
    found = {}
    for base, head in ((target, tmp_path / "head"), (big, tmp_path / "big-head")):
        model = load(algorithm, speculative_draft_model_path=str(head), target_model_path=str(base))
        found[base] = path_logits(model, true_features(model, base, 9), [7, 30, 12, 55])
    assert relative_error(found[big], found[target]) <= 2e-5
    save_head(tmp_path / "normed", fields, tensors)
    with pytest.raises(ConfigError, match="norm"):
        inflate_head(tmp_path / "normed", target, tmp_path / "out", options, silent)


@pytest.mark.parametrize("bias", [True, False])
def test_eagle(bias: bool, tmp_path: Path) -> None:
    save_tiny(tmp_path / "target")
    save_head(tmp_path / "head", {**FIELDS, "architectures": ["LlamaForCausalLM"]}, eagle_tensors(bias))
    check(tmp_path, "EAGLE", WIDER, tmp_path / "head")


@pytest.mark.parametrize("shape", [WIDER, COPIED_KV], ids=["wider", "copied kv"])
def test_an_mtp_module_as_training_writes_it(shape: Shape, tmp_path: Path) -> None:
    save_tiny(tmp_path / "target")
    torch.manual_seed(5)
    module = TrainableMtpHead(load_model(tmp_path / "target").config)
    for weight in module.parameters():
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, 1.0, 0.2)
    export_drafter(module, tmp_path / "target", tmp_path / "module", torch.float32)
    check(tmp_path, "NEXTN", shape, tmp_path / "module")
    found = load_file(tmp_path / "big-head" / "model.safetensors")
    assert found.keys() == load_file(tmp_path / "module" / "model.safetensors").keys()
    assert found["model.mtp_layers.0.input_proj.weight"].shape == (shape.hidden, 2 * shape.hidden)


@pytest.mark.parametrize("tied", [False, True])
def test_the_mtp_module_of_a_mimo_checkpoint(tied: bool, tmp_path: Path) -> None:
    save_mimo(tmp_path / "target", tie_word_embeddings=tied)
    check(tmp_path, "NEXTN", WIDER, tmp_path / "target")
    names = load_file(tmp_path / "big-head" / "model.safetensors").keys()
    assert names and all(name.startswith("model.mtp_layers.0.") for name in names)


def test_what_is_no_head_of_the_target_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target")
    save_mimo(tmp_path / "other", num_hidden_layers=4)
    save_mimo(tmp_path / "mimo")
    wider = InflateOptions(WIDER)
    with pytest.raises(ConfigError, match=r"target: holds a language model, not a head"):
        inflate_head(tmp_path / "target", tmp_path / "target", tmp_path / "out", wider, silent)
    with pytest.raises(ConfigError, match="the head is of a model of 4 layers, the target has 3"):
        inflate_head(tmp_path / "other", tmp_path / "target", tmp_path / "out", wider, silent)
    with pytest.raises(ConfigError, match="must not be padded"):
        inflate_head(tmp_path / "mimo", tmp_path / "mimo", tmp_path / "out", replace(wider, vocab_size=128), silent)
    assert not (tmp_path / "out").exists()


def test_a_padded_target(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target", rms_norm_eps=1e-5)
    tensors = eagle3_tensors()
    tensors.pop("embed_tokens.weight")
    save_head(tmp_path / "head", EAGLE3_FIELDS, tensors)
    check(tmp_path, "EAGLE3", WIDER, tmp_path / "head", vocab_size=128)
    model = load("EAGLE3", speculative_draft_model_path=str(tmp_path / "big-head"))
    assert (model.target_vocab_size, model.vocab_size) == (128, len(DRAFT_IDS))


def test_a_padded_target_and_a_head_of_the_whole_vocabulary(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target")
    tensors = eagle3_tensors() | {"lm_head.weight": Maker(9).matrix(VOCAB, HIDDEN)}
    tensors.pop("d2t")
    fields = {**EAGLE3_FIELDS, "draft_vocab_size": VOCAB}
    save_head(tmp_path / "head", fields, tensors)
    check(tmp_path, "EAGLE3", WIDER, tmp_path / "head", vocab_size=128)
    tensors.pop("lm_head.weight")
    save_head(tmp_path / "head", fields, tensors)
    with pytest.raises(ConfigError, match="must not be padded"):
        inflate_head(
            tmp_path / "head", tmp_path / "target", tmp_path / "x", InflateOptions(WIDER, vocab_size=128), silent
        )


def test_half_format_stays_close(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target")
    save_head(tmp_path / "head", EAGLE3_FIELDS, eagle3_tensors())
    check(tmp_path, "EAGLE3", WIDER, tmp_path / "head", tolerance=0.1, dtype=torch.bfloat16)


def test_the_rest_is_random_and_without_effect(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target")
    save_head(tmp_path / "head", EAGLE3_FIELDS, eagle3_tensors())
    inflate_head(tmp_path / "head", tmp_path / "target", tmp_path / "out", InflateOptions(WIDER), silent)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["midlayer.self_attn.k_proj.weight"].shape == (64, 96)
    assert (found["midlayer.self_attn.k_proj.weight"] != 0).all()
    assert not found["midlayer.mlp.down_proj.weight"][HIDDEN:].any()
    assert found["d2t"].dtype == torch.int64 and found["lm_head.weight"].dtype == torch.bfloat16


def test_heads_that_norm_features_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target")
    tensors = eagle3_tensors() | {"input_norm.weight": torch.ones(3 * HIDDEN)}
    save_head(tmp_path / "head", {**EAGLE3_FIELDS, "norm_before_fc": True}, tensors)
    with pytest.raises(ConfigError, match="norms features before fc"):
        inflate_head(tmp_path / "head", tmp_path / "target", tmp_path / "out", InflateOptions(WIDER), silent)
    assert not (tmp_path / "out").exists()


def test_a_random_head_loads_beside_its_target(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target", num_hidden_layers=8)
    target = tmp_path / "target"
    options = InflateOptions(shape_of(load_model(target).config), torch.float32)
    random_eagle3_head(tmp_path / "head", target, 40, options)
    model = load(
        "EAGLE3", speculative_draft_model_path=str(tmp_path / "head"), target_model_path=str(tmp_path / "target")
    )
    assert model.feature_layers == (2, 4, 5)  # the default ones
    assert model.vocab_size == 40
    assert model.target_ids is not None and model.target_ids.tolist() == [i * 97 // 40 for i in range(40)]
    logits, _ = guesses_of(model, tmp_path / "target")
    assert torch.isfinite(logits).all() and float(logits.std()) > 0
    random_eagle3_head(tmp_path / "again", target, 40, options)
    random_eagle3_head(tmp_path / "other", target, 40, replace(options, seed=1))
    first, again, other = (load_file(tmp_path / name / "model.safetensors") for name in ("head", "again", "other"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    with pytest.raises(ConfigError, match="--draft-vocab-size 98: the target has 97 tokens; choose at most as many"):
        random_eagle3_head(tmp_path / "larger", target, 98, options)
    random_eagle3_head(tmp_path / "whole", target, None, options)
    whole = load(
        "EAGLE3", speculative_draft_model_path=str(tmp_path / "whole"), target_model_path=str(tmp_path / "target")
    )
    assert (whole.vocab_size, whole.target_ids) == (97, None)


def test_the_command_makes_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "target")
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    save_head(tmp_path / "head", EAGLE3_FIELDS, eagle3_tensors())
    words = ["inflate", "--model", str(tmp_path / "target"), "--shape", str(WIDER), "--device", "cpu"]
    draft = ["--draft", str(tmp_path / "head"), "--draft-out", str(tmp_path / "big-head")]
    assert main([*words, *draft]) == 0
    assert (tmp_path / "big-head" / "model.safetensors").is_file()
    assert main([*words, *draft]) == 2
    assert "--draft-out" in capsys.readouterr().err
    out = tmp_path / "random"
    assert main([*words, "--random-draft", "--draft-vocab-size", "50", "--draft-out", str(out)]) == 0
    fields = json.loads((out / "config.json").read_text())
    assert (fields["hidden_size"], fields["draft_vocab_size"], fields["vocab_size"]) == (48, 50, VOCAB)
    assert fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 1, 1]
    for wrong, problem in (
        ([], "--out"),
        (["--draft", "x"], "--draft-out"),
        (["--draft-out", "x"], "--draft-out"),
        (["--draft", "x", "--random-draft", "--draft-out", "x"], "--random-draft"),
    ):
        assert main([*words, *wrong]) == 2
        assert problem in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--random-draft", "--draft-out", "x", "--draft-vocab-size", "0"])
    assert "--draft-vocab-size: '0' is not" in capsys.readouterr().err


@pytest.mark.parametrize("makes", ["--random-draft", "--draft"])
def test_a_vocabulary_below_the_targets_is_told_before_a_head_is_made(
    tmp_path: Path, makes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "target")
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    save_head(tmp_path / "head", EAGLE3_FIELDS, eagle3_tensors())
    words = ["inflate", "--model", str(tmp_path / "target"), "--shape", str(WIDER), "--device", "cpu"]
    words += [makes, str(tmp_path / "head")] if makes == "--draft" else [makes]
    words += ["--draft-out", str(tmp_path / "out"), "--vocab-size"]
    assert main([*words, "10"]) == 2
    assert "--vocab-size 10: below the source's 97" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        main([*words, "0"])
