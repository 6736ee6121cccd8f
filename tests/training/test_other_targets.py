"""Drafters for targets that lie in a larger model, have experts, or are quantized."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drafters import OPTIONS
from safetensors.torch import load_file, save_file
from training_world import random_texts

from outrider.cli.main import main
from outrider.errors import ConfigError
from outrider.models.config import ModelConfig
from outrider_tools.files import copy_files
from outrider_tools.training.drafters import export_drafter, make_learner, resolved
from outrider_tools.training.evaluate import load_drafter
from outrider_tools.training.options import RunOptions
from outrider_tools.training.target import TargetModel

ROPE = {"rope_theta": 50_000.0, "rope_type": "default"}


def saved(tiny_folder: Path, folder: Path, prefix: str = "") -> TargetModel:
    """The tiny target as a Mistral with another rotary base: alone, or as the text part of a larger model."""
    folder.mkdir()
    copy_files(tiny_folder, folder)
    fields = json.loads((tiny_folder / "config.json").read_text())
    text = {**fields, "model_type": "mistral", "sliding_window": None, "rope_parameters": ROPE}
    architecture = "Mistral3ForConditionalGeneration" if prefix else "MistralForCausalLM"
    if prefix:
        del text["architectures"]
        text = {"model_type": "mistral3", "text_config": text}
    (folder / "config.json").write_text(json.dumps({**text, "architectures": [architecture]}))
    weights = load_file(tiny_folder / "model.safetensors")
    if prefix:
        weights = {prefix + name: tensor for name, tensor in weights.items()}
        weights["vision_tower.layers.0.attention.q_proj.weight"] = torch.zeros(2, 2)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return TargetModel(folder, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["EAGLE3", "EAGLE", "NEXTN", "STANDALONE"])
def test_a_target_within_a_larger_model_has_the_drafters_that_it_has_alone(
    tiny_folder: Path, tmp_path: Path, kind: str
) -> None:
    found = []
    for name, prefix in (("alone", ""), ("within", "language_model.")):
        target = saved(tiny_folder, tmp_path / name, prefix)
        texts, out = random_texts(target, 4, 6, 20), tmp_path / f"{name}-draft"
        learner = make_learner(target, texts, replace(OPTIONS, algorithm=kind))
        export_drafter(learner.module, target.folder, out, torch.float32)
        load_drafter(kind, out, target.folder, target.model)
        found.append((json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")))
    (alone, alone_weights), (within, weights) = found
    assert within == alone and within["rope_parameters"] == ROPE
    torch.testing.assert_close(weights, alone_weights, rtol=0, atol=0)


@pytest.fixture(scope="module")
def with_experts(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = tmp_path_factory.mktemp("experts")
    copy_files(tiny_folder, folder)
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    fields = json.loads((tiny_folder / "config.json").read_text())
    config = transformers.Qwen3MoeConfig(
        **{name: fields[name] for name in sizes},
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=2,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return TargetModel(folder, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["EAGLE3", "EAGLE", "DSPARK"])
def test_a_head_for_a_target_with_experts_is_one_of_a_dense_layer(
    with_experts: TargetModel, tmp_path: Path, kind: str
) -> None:
    learner = make_learner(with_experts, random_texts(with_experts, 4, 6, 20), replace(OPTIONS, algorithm=kind))
    export_drafter(learner.module, with_experts.folder, tmp_path)
    load_drafter(kind, tmp_path, with_experts.folder, with_experts.model)
    fields = json.loads((tmp_path / "config.json").read_text())
    names = {"EAGLE3": "LlamaForCausalLMEagle3", "EAGLE": "LlamaForCausalLMEagle", "DSPARK": "Qwen3DSparkModel"}
    assert (fields["architectures"], fields["model_type"]) == ([names[kind]], "llama")
    assert fields["intermediate_size"] == 96 and "num_local_experts" not in fields


def test_models_that_attend_with_windows_are_not_measured_offline(
    target: TargetModel, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    windowed = tmp_path / "windowed"
    saved(tiny_folder, windowed)
    fields = json.loads((windowed / "config.json").read_text())
    (windowed / "config.json").write_text(json.dumps({**fields, "sliding_window": 8}))
    head, prompts = tmp_path / "head", tmp_path / "prompts.jsonl"
    export_drafter(make_learner(target, random_texts(target, 4, 6, 20), OPTIONS).module, target.folder, head)
    prompts.write_text('{"prompt": "One?"}\n')
    for model, draft in ((windowed, head), (tiny_folder, windowed)):
        words = ["evaluate-draft", "--model", str(model), "--draft", str(draft), "--prompts", str(prompts)]
        assert main([*words, "--device", "cpu"]) == 2
        stderr = capsys.readouterr().err
        assert "MistralForCausalLM attends with windows" in stderr and "answers" not in stderr


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("EAGLE3", {"own_feature_weight": 0.5}, "--feature-weight 0.5: is for --algorithm EAGLE or NEXTN, not EAGLE3"),
        ("STANDALONE", {"own_feature_weight": 0.5}, "--feature-weight 0.5: .* not STANDALONE; leave it out"),
        ("EAGLE3", {"markov_rank": 8}, "--markov-rank 8: is for --algorithm DSPARK, not EAGLE3"),
        ("EAGLE3", {"layers": 2}, "--layers 2: is for --algorithm STANDALONE or DFLASH or DSPARK, not EAGLE3"),
        ("DFLASH", {"hidden": 32}, "--hidden 32: is for --algorithm STANDALONE, not DFLASH"),
        ("EAGLE", {"feature_layers": (1, 2)}, "--feature-layers 1,2: is for --algorithm EAGLE3 or DFLASH or DSPARK"),
        ("NEXTN", {"draft_vocab_size": 9}, "--draft-vocab-size 9: is for --algorithm EAGLE3 or DFLASH or DSPARK"),
    ],
)
def test_an_option_of_other_drafters_is_refused(
    target: TargetModel, kind: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(RunOptions(kind, **given), target.config)


def test_a_language_model_is_not_made_of_experts_or_quantized_layers(with_experts: TargetModel) -> None:
    options = RunOptions("STANDALONE")
    with pytest.raises(ConfigError, match=r"--algorithm STANDALONE: .* has experts; give"):
        resolved(options, with_experts.config)
    fields = json.loads((with_experts.folder / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    fields |= {"architectures": ["LlamaForCausalLM"], "quantization_config": method}
    with pytest.raises(ConfigError, match=r"--algorithm STANDALONE: .* has .*fp8.* weights; give"):
        resolved(options, ModelConfig.from_fields(fields, {}))
