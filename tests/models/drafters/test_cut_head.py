"""Heads that are cut over ranks propose what they propose whole; which heads are cut follows from their sizes."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import load, run_chain
from tiny_heads import (
    DRAFT_IDS,
    EAGLE3_FIELDS,
    FIELDS,
    HIDDEN,
    VOCAB,
    Tensors,
    eagle3_tensors,
    eagle_tensors,
    save_head,
    save_mimo,
)
from tiny_models import relative_error, save_tiny, token_ids
from torch import Tensor

from outrider.config.draft import DraftOptions
from outrider.host.rank_memory import RankMemory
from outrider.layers.exchange import HostExchange
from outrider.models.drafters import config as head_config
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.config import HeadConfig, cut_head, eagle3_config
from outrider.models.drafters.loader import is_cut, load_draft_model

HEAD_8B: dict[str, Any] = {
    **FIELDS,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}


def head_of(**changes: Any) -> HeadConfig:
    return eagle3_config(HEAD_8B | changes, {"fc.weight"}, 32)


def test_a_head_of_8b_shape_is_cut_in_half() -> None:
    whole, half = head_of(), cut_head(head_of(), 2, 2)
    assert half is not None and half.num_ranks == 2
    one, other = whole.decoder, half.decoder
    assert (other.num_heads, other.num_kv_heads, other.intermediate_size) == (16, 4, 7168)
    assert other.hidden_size == one.hidden_size and other.vocab_size == one.vocab_size
    assert half.output_rows(32000) == 16000 and half.output_rows(31999) == 31999


@pytest.mark.parametrize(
    ("changes", "world"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}, 2),
        ({"num_key_value_heads": 2, "num_attention_heads": 30, "head_dim": 128}, 4),
        ({"intermediate_size": 14337}, 2),
        ({"target_hidden_size": 8192}, 2),
        ({"hidden_size": 1024, "intermediate_size": 3584, "draft_vocab_size": 16000}, 2),
    ],
    ids=["heads", "kv heads", "channels", "width", "small"],
)
def test_rank_0_has_other_heads_alone(changes: dict[str, Any], world: int) -> None:
    assert cut_head(head_of(**changes), world, 2) is None


def test_a_head_of_blocks_is_rank_0s_alone() -> None:
    from outrider.models.drafters.config import BlockConfig

    assert cut_head(replace(head_of(), block=BlockConfig(8, 1, True)), 2, 2) is None


def ranks_of(draft_options: DraftOptions, ids: Tensor, features: Tensor, steps: int) -> list[tuple[Tensor, list[int]]]:
    """What each of two ranks proposes along a chain."""
    memory = RankMemory.create(2)
    memories = [memory, RankMemory(memory.descriptor, 1, 2)]

    def run(mine: RankMemory) -> tuple[Tensor, list[int]]:
        model = load_draft_model(draft_options, torch.device("cpu"), torch.float32, exchange=HostExchange(mine))
        assert model.num_heads == 2 and model.num_kv_heads == 1
        return run_chain(model, ids, model.project(features), steps)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, memories))
    os.close(memory.descriptor)
    return found


def save_eagle3(folder: Path, tensors: Tensors | None = None) -> dict[str, str]:
    save_head(folder / "head", EAGLE3_FIELDS, tensors or eagle3_tensors(bias=True))
    return {"speculative_draft_model_path": str(folder / "head")}


def save_eagle(folder: Path) -> dict[str, str]:
    save_tiny(folder / "target", vocab_size=VOCAB + 1)
    fields = FIELDS | {"vocab_size": VOCAB + 1, "num_hidden_layers": 2}
    save_head(folder / "head", fields, eagle_tensors(num_layers=2))
    paths = {"speculative_draft_model_path": "head", "target_model_path": "target"}
    return {name: str(folder / path) for name, path in paths.items()}


def save_nextn(folder: Path) -> dict[str, str]:
    save_mimo(folder)
    return {"target_model_path": str(folder)}


def save_mapped(folder: Path) -> dict[str, str]:
    """With a token map, which leaves 24 rows of the output matrix."""
    path = folder / "map.json"
    path.write_text(json.dumps(DRAFT_IDS[:24]))
    return save_eagle3(folder) | {"speculative_token_map": str(path)}


@pytest.mark.parametrize(
    ("algorithm", "save", "width"),
    [
        ("EAGLE3", save_eagle3, 3 * HIDDEN),
        ("EAGLE", save_eagle, HIDDEN),
        ("NEXTN", save_nextn, HIDDEN),
        ("EAGLE3", save_mapped, 3 * HIDDEN),
    ],
    ids=["eagle3", "eagle", "nextn", "token map"],
)
def test_ranks_together_are_the_head(
    algorithm: str, save: Any, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_config, "LEAST_SAVED_BYTES", 1)
    options = save(tmp_path)
    draft_options = DraftOptions(speculative_algorithm=(algorithm,), **options)
    ids, features = token_ids(9), torch.randn(9, width, generator=torch.Generator().manual_seed(11))
    whole: DraftModel = load(algorithm, **options)
    expected, guesses = run_chain(whole, ids, whole.project(features), 4)
    one, other = ranks_of(draft_options, ids, features, 4)
    assert torch.equal(one[0], other[0])
    assert one[1] == other[1] == guesses
    assert relative_error(one[0], expected) < 1e-4


def test_what_a_folder_holds_tells_whether_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_options = DraftOptions(speculative_algorithm=("EAGLE3",), **save_eagle3(tmp_path))  # type: ignore[arg-type]
    assert not is_cut(draft_options, 2, torch.bfloat16)
    monkeypatch.setattr(head_config, "LEAST_SAVED_BYTES", 1)
    assert is_cut(draft_options, 2, torch.bfloat16) and not is_cut(draft_options, 8, torch.bfloat16)
    save_tiny(tmp_path / "model")
    model = DraftOptions(speculative_algorithm=("STANDALONE",), speculative_draft_model_path=str(tmp_path / "model"))
    assert not is_cut(model, 2, torch.bfloat16)
