from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from naive_head import NaiveHead
from safetensors.torch import load_file
from training_world import random_texts, run_ahead, states

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.config.draft import DraftOptions
from outrider.models.drafters.loader import load_draft_model
from outrider_tools.training.drafters import export_drafter
from outrider_tools.training.heads import TrainableEagle3Head
from outrider_tools.training.layers import matrix
from outrider_tools.training.target import TargetModel

STEPS = 5


def test_unrolled_head_equals_a_step_by_step_run(target: TargetModel, head: TrainableEagle3Head) -> None:
    ids = torch.from_numpy(random_texts(target, 1, 4, 14).sequence(0)).long()
    features, _ = states(target, ids, head.feature_layers)
    with torch.no_grad():
        steps = run_ahead(target, head, ids, STEPS)
        true = NaiveHead(target, head)
        for base in range(len(ids) - 1):
            feature = true.run(int(ids[base + 1]), true.feature(features[base]))
            chain = true.fork()
            for step in range(min(STEPS, len(ids) - 1 - base)):
                if step:
                    feature = chain.run(int(ids[base + 1 + step]), feature)
                torch.testing.assert_close(steps[step][base], feature, rtol=1e-4, atol=1e-4)


def test_target_ids_are_those_of_the_draft_vocabulary(head: TrainableEagle3Head) -> None:
    assert torch.equal(head.t2d.nonzero().squeeze(1), head.target_ids)


def test_a_seed_gives_the_same_weights_and_states_on_disk_the_same_numbers(target: TargetModel) -> None:
    config = replace(target.config, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True)
    torch.manual_seed(1)
    head = TrainableEagle3Head(config, torch.arange(200), (1, 2))
    matrices = [
        "fc",
        *(f"midlayer.self_attn.{name}_proj" for name in "qkvo"),
        *(f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down")),
        "lm_head",
    ]
    torch.manual_seed(1)
    for name in matrices:
        weight = head.get_parameter(f"{name}.weight")
        assert torch.equal(weight, matrix(weight.shape[1], weight.shape[0]).weight), name
    norms = [f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")]
    names = [name.removesuffix(".weight") for name, _ in head.named_parameters()]
    assert names == [*matrices[:-1], *norms, "norm", "lm_head"]


def test_exported_head_has_public_names_and_gives_the_same_logits(
    target: TargetModel, head: TrainableEagle3Head, tmp_path: Path
) -> None:
    export_drafter(head, target.folder, tmp_path, torch.float32)
    modes = [(tmp_path / name).stat().st_mode for name in ("model.safetensors", "config.json")]
    assert modes[0] == modes[1], "another user may run the services"
    assert set(load_file(tmp_path / "model.safetensors")) == {
        "d2t", "t2d", "fc.weight", "norm.weight", "lm_head.weight",
        *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        *(f"midlayer.{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    }  # fmt: skip
    options = replace(
        DraftOptions(),
        speculative_algorithm=("EAGLE3",),
        speculative_draft_model_path=str(tmp_path),
        target_model_path=str(target.folder),
    )
    loaded = load_draft_model(options, torch.device("cpu"), torch.float32)
    assert loaded.feature_layers == head.feature_layers
    assert loaded.target_ids is not None and torch.equal(loaded.target_ids.long(), head.target_ids)

    ids = torch.from_numpy(random_texts(target, 1, 4, 20).sequence(0)).long()
    features, _ = states(target, ids, head.feature_layers)
    count = ids.numel() - 1
    slots = torch.arange(count)
    batch = ForwardBatch(ids[1:], slots, [Segment(count, slots)])
    rows, own = loaded.forward(batch, loaded.project(features[:-1]), loaded.new_kv(count), TorchAttention())
    with torch.no_grad():
        feature = run_ahead(target, head, ids, 1)[0][:-1]
        expected = head.lm_head(head.norm(feature))
    torch.testing.assert_close(loaded.logits(rows), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own, feature, rtol=1e-4, atol=1e-4)


def test_default_feature_layers_go_without_saying(target: TargetModel, head: TrainableEagle3Head) -> None:
    fields = json.loads((target.folder / "config.json").read_text())
    layers = head.config_fields(fields)["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layers == [0, 1, 2]
    head.feature_layers = (2, 2, 1)
    assert "eagle_config" not in head.config_fields(fields)
