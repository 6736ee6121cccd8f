"""Rounding whose errors make up for each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import run_one, save_tiny, token_ids

from outrider.errors import ConfigError
from outrider.models.loader import load_decoder, load_model
from outrider_tools.compensate import InputMoments, calibration_moments, compensated, own_text
from outrider_tools.quantize import FORMATS, quantize

SIZES = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16}


@pytest.mark.parametrize("name", FORMATS)
def test_errors_of_products_are_smaller_and_weights_stay_on_the_grid(name: str) -> None:
    torch.manual_seed(3)
    form = FORMATS[name]
    matrix = torch.randn(48, 256) * 0.1
    # Columns depend on each other, as a model's do, and some are larger than others.
    rows = torch.randn(400, 32) @ torch.randn(32, 256) + torch.randn(400, 256) * 0.1
    rows *= torch.logspace(-1, 1, 256)[torch.randperm(256)]
    scales = form.fit(matrix, 32)
    spread = form.spread(scales, matrix, 32)
    nearest = form.nearest(matrix / spread) * spread
    found = compensated(matrix, rows.T @ rows, spread, form.nearest)
    assert torch.equal(form.nearest(found / spread) * spread, found)

    def error(rounded: torch.Tensor) -> float:
        return float((rows @ (rounded - matrix).T).square().mean())

    assert error(found) < 0.6 * error(nearest)
    alone = compensated(matrix, torch.eye(256), spread, form.nearest)
    assert torch.equal(alone, nearest), "rows that say nothing of each other make up for nothing"


def test_moments_are_those_of_what_is_multiplied(tmp_path: Path) -> None:
    save_tiny(tmp_path, **SIZES)
    model = load_decoder(tmp_path)
    texts = [token_ids(12).tolist(), token_ids(7, seed=1).tolist()]
    with torch.inference_mode():
        moments = InputMoments(model, texts)
        first = moments.of(0)
        rows = model.layers[0].attention_norm(model.embedding[torch.tensor(texts[0] + texts[1])])
        torch.testing.assert_close(first["q_proj"], rows.T @ rows)
        assert first["q_proj"] is first["v_proj"]
        assert first["down_proj"].shape == (160, 160)
        last = moments.of(len(model.layers) - 1)
        assert set(last) == set(first) and not torch.equal(last["o_proj"], first["o_proj"])
    # What was observed is as it was.
    ids, places = torch.tensor(texts[0]), torch.arange(12)
    again = load_model(tmp_path)
    assert torch.equal(run_one(model, model.new_kv(12), ids, places), run_one(again, again.new_kv(12), ids, places))


def test_a_model_writes_the_same_text_every_time(tmp_path: Path) -> None:
    save_tiny(tmp_path, **SIZES)
    model = load_decoder(tmp_path)
    texts = own_text(model, 1, count=3, length=9)
    assert [len(text) for text in texts] == [9, 9, 9]
    assert len({tuple(text) for text in texts}) == 3
    assert own_text(model, 1, count=3, length=9) == texts


def test_a_calibrated_checkpoint_is_nearer_to_its_source(tmp_path: Path) -> None:
    save_tiny(tmp_path / "source", **SIZES)
    source, ids, places = load_model(tmp_path / "source"), token_ids(64), torch.arange(64)
    expected = run_one(source, source.new_kv(64), ids, places)
    errors = []
    for calibration in ("none", "own"):
        out = tmp_path / calibration
        quantize(tmp_path / "source", out, "int4", 32, torch.device("cpu"), 1 << 30, lambda *_: None, calibration)
        model = load_model(out)
        errors.append(float((run_one(model, model.new_kv(64), ids, places) - expected).square().mean()))
    assert errors[1] < errors[0]


def test_a_model_that_is_not_ours_cannot_be_read(tmp_path: Path) -> None:
    save_tiny(tmp_path, **SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        calibration_moments(tmp_path, "own", torch.device("cpu"))
