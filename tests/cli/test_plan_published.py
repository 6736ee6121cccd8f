"""Sizes and fields of models on the hub, and their numbers of parameters, without weights.

Longrope factors of Phi-4-mini and lists of modules left out of quantization are stand-ins of the same form.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.main import main
from outrider.models.config import ModelConfig

MODELS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "models" / "published_configs.json").read_text("utf-8")
)


@pytest.mark.parametrize("name", MODELS)
def test_published_models_are_planned_with_the_parameters_that_they_have(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields, parameters = MODELS[name]["config"], MODELS[name]["parameters"]
    (tmp_path / "config.json").write_text(json.dumps(fields), "utf-8")
    assert main(["plan", f"--model={tmp_path}", "--gpu-memory=400GiB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    config = ModelConfig.from_fields(fields, {})
    # Norms of heads are kept once a head; attention sinks are not counted.
    heads = config.num_heads + config.num_kv_heads
    copies = (heads - 2) * config.head_dim * config.num_layers if config.qk_norm else 0
    sinks = config.num_heads * config.num_layers if config.family.sinks else 0
    assert report["parameters"] == parameters + copies - sinks
    assert bool(report["quantization"]) == ("quantization_config" in fields)
    assert report["weights"] + report["saved"] == report["parameters"] * report["item_bytes"]
    assert (report["saved"] > 0) == bool(report["quantization"])
