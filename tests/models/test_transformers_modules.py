"""Which modules of transformers become ours, and what is kept of what they copy from the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import check_chunks_and_tree, relative_error, run_one, save_tiny, token_ids
from torch import Tensor, nn

from outrider.models.loader import load_model
from outrider.models.transformers_modules import HostConstants, replace_modules


def parts(model: Any) -> set[str]:
    """Class names of the modules of a model, and what made or is what stands for modules."""
    found = set()
    for module in model._base.modules():
        found.add(type(module).__name__)
        for value in vars(module).values():
            found.add(getattr(value, "__qualname__", type(value).__name__).split(".")[0])
    return found


def test_norms_products_mlps_and_attention_are_ours(tmp_path: Path) -> None:
    save_tiny(tmp_path, head_dim=16)
    model = load_model(tmp_path, impl="transformers")
    assert {"_norm", "_gated_mlp", "_attention"} <= parts(model)
    assert not {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "Linear"} & parts(model)
    save_tiny(tmp_path, "Arcee")
    assert {"_FusedPart", "_product", "ArceeAttention"} <= parts(load_model(tmp_path))


ELSEWHERE = [
    ("Glm4", {"head_dim": 16}),
    ("Cohere", {}),
    ("HunYuanDenseV1", {"head_dim": 16}),
    ("SmolLM3", {"head_dim": 16, "num_hidden_layers": 4}),
    # So wide a clip changes none of the rows that modules are tried on.
    ("Olmo", {"head_dim": 16, "hidden_size": 64, "clip_qkv": 100.0}),
]


@pytest.mark.parametrize(("family", "changes"), ELSEWHERE)
def test_attention_that_does_something_else_stays(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Rotates neighbours or a part of a head, norms heads behind it, rotates in some layers alone, clips."""
    reference = save_tiny(tmp_path, family, **changes)
    model = load_model(tmp_path, impl="transformers")
    assert f"{family}Attention" in parts(model)
    assert ("_attention" in parts(model)) == (family == "SmolLM3")
    check_chunks_and_tree(model, reference)


def test_attention_that_rotates_otherwise_stays_where_scores_hide_it(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "Cohere", hidden_size=64)
    with torch.no_grad():
        for layer in reference.model.layers:
            layer.self_attn.q_proj.weight.mul_(1e-3)
    reference.save_pretrained(tmp_path)
    assert "_attention" not in parts(load_model(tmp_path, torch.bfloat16))


def test_an_mlp_that_gates_otherwise_stays_where_gates_are_large(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "Gemma3Text", head_dim=16)
    with torch.no_grad():
        for layer in reference.model.layers:
            layer.mlp.gate_proj.weight.mul_(100.0)
    reference.save_pretrained(tmp_path)
    assert "_gated_mlp" not in parts(load_model(tmp_path, torch.bfloat16, impl="transformers"))


def test_an_mlp_whose_gate_has_weights_of_its_own_stays(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", hidden_act="prelu")
    assert "_gated_mlp" not in parts(load_model(tmp_path, torch.bfloat16, impl="transformers"))


def test_a_norm_that_computes_something_else_stays(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "Nemotron", head_dim=16)
    model = load_model(tmp_path)
    assert "NemotronLayerNorm1P" in parts(model)
    check_chunks_and_tree(model, reference)


def test_a_norm_that_subtracts_the_mean_stays_in_bfloat16_too(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "Cohere", hidden_size=512, num_hidden_layers=1)
    model, ids = load_model(tmp_path, torch.bfloat16), token_ids(12)
    assert "CohereLayerNorm" in parts(model)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    assert relative_error(run_one(model, model.new_kv(12), ids, torch.arange(12)), expected) < 0.05


class Holder(nn.Module):
    """A model of one module, without an output matrix."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def get_output_embeddings(self) -> None:
        return None


@pytest.mark.parametrize("fault", ["takes two", "returns two"])
def test_a_norm_that_is_called_otherwise_stays(fault: str) -> None:
    class GatedNorm(nn.RMSNorm):
        def forward(self, rows: Tensor, *gate: Tensor) -> Any:
            return (super().forward(rows * gate[0]),) if fault == "takes two" else (super().forward(rows), rows)

    holder = Holder(GatedNorm(8, eps=1e-6))
    replace_modules(holder)
    assert isinstance(holder.child, GatedNorm)


@torch.no_grad()
def test_the_linear_layers_of_an_mlp_are_packed_once() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8, False) for _ in range(3))
            self.act_fn = nn.SiLU()

        def forward(self, rows: Tensor) -> Any:
            return self.down_proj(self.act_fn(self.gate_proj(rows)) * self.up_proj(rows))

    mlp, rows = Mlp(), torch.randn(1, 3, 8)
    holder, expected = Holder(mlp), mlp(rows)
    replace_modules(holder)
    assert not isinstance(holder.child, nn.Module) and relative_error(holder.child(rows), expected) < 1e-5
    assert all(isinstance(part, nn.Linear) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))


def test_what_a_container_runs_stays_a_module() -> None:
    model = Holder(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))
    rows = torch.randn(3, 4)
    expected = model.child(rows)
    replace_modules(model)
    assert torch.equal(model.child(rows), expected)


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_copied_from_the_host_is_kept_once_by_its_bytes(inference: bool) -> None:
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    with torch.inference_mode(inference), HostConstants(copies, "meta"):
        rows = torch.zeros(2, device="meta")
        for value in (1e-5, 1e-5, 2e-5):
            torch.tensor(value).to(rows.device)
        torch.tensor(1e-5).to(device=rows.device, dtype=torch.bfloat16)
        torch.ones(3, dtype=torch.bfloat16)[None].expand(2, -1).to(rows)
        torch.tensor(1e-5).to(torch.float64)
        torch.arange(4.0)[::2].to(rows.device)
        torch.ones(1).expand(3).to(rows.device)
        rows.to(torch.float64)
        for _ in range(2):
            torch.tensor([0.5, 0.25], dtype=torch.float32, device=rows.device)
    assert [(copy.device.type, copy.dtype) for copy in copies.values()] == [
        ("meta", torch.bfloat16 if number == 2 else torch.float32) for number in range(7)
    ]


def test_only_copies_of_the_same_numbers_are_one() -> None:
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    long = np.zeros(2000, np.float32)
    with torch.inference_mode(), HostConstants(copies, "meta"):
        for middle in (1.0, 1.0, 2.0):
            long[1000] = middle
            torch.tensor(long, device="meta")
            torch.tensor(data=[torch.tensor(middle * 1e-6 + 1.0)], device="meta")
        # Nothing of the host's: what lies on the device may be another thing in every forward.
        with pytest.warns(UserWarning, match="clone"):
            torch.tensor(torch.zeros(3, device="meta"))
    assert [len(copy) for copy in copies.values()] == [2000, 1, 2000, 1]
