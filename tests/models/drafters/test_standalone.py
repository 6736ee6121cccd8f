"""Small language models as drafters, token maps, and which drafter the options name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import CPU, load
from safetensors.torch import save_file
from tiny_models import relative_error, save_tiny, token_ids

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.config.draft import DraftOptions
from outrider.errors import ConfigError
from outrider.models import store, transformers_model, transformers_survey
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.loader import load_draft_model, read_token_map


def save(folder: Path, **changes: Any) -> Any:
    reference = save_tiny(folder, **changes)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return reference


def logits_of(model: DraftModel, count: int = 30) -> torch.Tensor:
    ids, slots = token_ids(count), torch.arange(count)
    rows, features = model.forward(
        ForwardBatch(ids, slots, [Segment(count, slots)]), None, model.new_kv(count), TorchAttention()
    )
    assert features is None
    return model.logits(rows)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_transformers(tied: bool, tmp_path: Path) -> None:
    reference = save(tmp_path, tie_word_embeddings=tied)
    model = load("STANDALONE", speculative_draft_model_path=str(tmp_path))
    with torch.inference_mode():
        expected = reference(token_ids(30)[None]).logits[0]
    assert relative_error(logits_of(model), expected) <= 1e-5
    assert model.token_ids_hash == hashlib.sha256(b'{"a": 1}').hexdigest()
    assert (model.vocab_size, model.target_vocab_size, model.target_ids) == (97, 97, None)
    assert (model.hidden_size, model.feature_layers, model.feature_size, model.max_positions) == (0, (), 0, 256)
    allowed = tmp_path / "map.json"
    allowed.write_text(json.dumps([70, 3, 8]))
    cut = load("STANDALONE", speculative_draft_model_path=str(tmp_path), speculative_token_map=str(allowed))
    assert cut.target_ids is not None and cut.target_ids.tolist() == [3, 8, 70]
    assert (cut.vocab_size, cut.target_vocab_size) == (3, 97)
    assert relative_error(logits_of(cut), expected[:, [3, 8, 70]]) <= 1e-5


def test_its_target_is_not_fetched_and_it_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, family="StableLm")
    folders: list[Path] = []
    survey = transformers_survey.survey_model

    def note(folder: Path) -> Any:
        folders.append(folder)
        return survey(folder)

    for module in (transformers_model, transformers_survey):
        monkeypatch.setattr(module, "survey_model", note)
    monkeypatch.setattr(store, "fetch_from_hub", lambda name, *_: pytest.fail(f"{name} was fetched"))
    load("STANDALONE", speculative_draft_model_path=str(tmp_path), target_model_path="owner/target")
    assert folders == [tmp_path]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ((), "needs one of EAGLE"),
        (("NGRAM",), "--speculative-algorithm NGRAM: needs one of EAGLE"),
        (("EAGLE", "STANDALONE"), "EAGLE,STANDALONE: needs one of"),
        (("MEDUSA",), "MEDUSA: needs one of"),
    ],
)
def test_one_drafter_with_a_model_is_named(names: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_draft_model(DraftOptions(speculative_algorithm=names), CPU, torch.float32)


def test_a_second_drafter_without_a_model_is_none_of_the_loaders_business(tmp_path: Path) -> None:
    save(tmp_path)
    options = DraftOptions(speculative_algorithm=("NGRAM", "STANDALONE"), speculative_draft_model_path=str(tmp_path))
    calls: list[tuple[int, int]] = []
    load_draft_model(options, CPU, torch.float32, lambda done, total: calls.append((done, total)))
    assert calls and calls[-1][0] == calls[-1][1]


def test_the_folder_must_be_given_and_hold_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--speculative-draft-model-path: STANDALONE"):
        load("STANDALONE")
    save_tiny(tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load("STANDALONE", speculative_draft_model_path=str(tmp_path))


def test_device_and_format_are_those_of_the_options(tmp_path: Path) -> None:
    save(tmp_path)
    for dtype in ("float32", "bfloat16", "float16"):
        options = DraftOptions(
            speculative_algorithm=("STANDALONE",), speculative_draft_model_path=str(tmp_path), device="cpu", dtype=dtype
        )
        model = load_draft_model(options)
        assert (model.device, model.dtype) == (CPU, getattr(torch, dtype))


def test_a_window_is_for_models_without_windows_of_their_own(tmp_path: Path) -> None:
    save(tmp_path)
    options: dict[str, Any] = {"speculative_draft_model_path": str(tmp_path), "speculative_draft_window_size": 256}
    assert load("STANDALONE", speculative_draft_model_path=str(tmp_path)).window.size == 0
    assert load("STANDALONE", **options).window == (256, 16)
    config = json.loads((tmp_path / "config.json").read_text())
    sliding = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | sliding))
    with pytest.raises(ConfigError, match=r"--speculative-draft-window-size: .* may have windows of its own"):
        load("STANDALONE", **options)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("map.json", "[]", "holds no token ids"),
        ("map.json", "[1, 97]", "token id 97 is outside the vocabulary of 97"),
        ("map.json", "[-1]", "token id -1 is outside"),
        ("map.json", "[1, true]", "must be a list of token ids"),
        ("map.json", '{"a": 1}', "must be a list of token ids"),
        ("map.json", "[1e3]", "must be a list of token ids"),
        ("map.json", "[99999999999999999999999]", "must be a list of token ids"),
        ("map.json", "[1", "cannot be read as JSON"),
        ("map.pt", "x", "outrider convert"),
        ("map.safetensors", "x", "cannot be read as safetensors"),
    ],
)
def test_a_wrong_token_map_is_named(name: str, content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=problem) as raised:
        read_token_map(tmp_path / name, 97)
    assert name in raised.value.message


def test_a_token_map_of_other_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "map.safetensors"
    with pytest.raises(ConfigError, match="no such file"):
        read_token_map(path, 97)
    save_file({"a": torch.zeros(3)}, path)
    with pytest.raises(ConfigError, match="tensor a must be a list of integers"):
        read_token_map(path, 97)
    save_file({"a": torch.zeros(1, dtype=torch.int64), "b": torch.zeros(1)}, path)
    with pytest.raises(ConfigError, match="must hold one tensor, and holds 2"):
        read_token_map(path, 97)
    save_file({"a": torch.tensor([4, 2], dtype=torch.int32)}, path)
    assert read_token_map(path, 97).tolist() == [2, 4]
