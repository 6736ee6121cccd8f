"""What guesses where no option chooses: the head that ships for the default target, beside n-grams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cli.cluster import link
from outrider.cli.placement import draft_for
from outrider.config.draft import DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.models.drafters.kinds import choose_drafters, is_default_target, shipped_head
from outrider.models.store import DEFAULT_MODEL, DEFAULT_WHEEL


def converted(folder: Path, source: str) -> str:
    folder.mkdir()
    (folder / "outrider.json").write_text(json.dumps({"source": source}))
    return str(folder)


def test_the_default_target_is_drafted_for_by_its_head_and_n_grams(head: Path) -> None:
    notices: list[str] = []
    chosen = choose_drafters(DraftOptions(), notify=notices.append)
    assert chosen.speculative_algorithm == ("EAGLE3", "NGRAM") and not notices
    assert chosen.speculative_draft_model_path == str(head) and chosen.target_model_path == DEFAULT_MODEL


def test_a_folder_counts_as_the_default_target_by_what_it_was_converted_from(head: Path, tmp_path: Path) -> None:
    same, other = converted(tmp_path / "a", DEFAULT_WHEEL.requirement), converted(tmp_path / "b", "another==1")
    assert is_default_target("smollm2") and is_default_target(same)
    assert shipped_head(same) == head and shipped_head(other) is None
    (head / "model.safetensors").unlink()
    assert shipped_head(same) is None


def test_without_a_head_n_grams_draft_alone_and_the_reason_is_said(head: Path, tmp_path: Path) -> None:
    notices: list[str] = []
    chosen = choose_drafters(DraftOptions(), str(tmp_path), notices.append)
    (head / "config.json").unlink()
    again = choose_drafters(DraftOptions(), DEFAULT_MODEL, notices.append)
    assert chosen.speculative_algorithm == again.speculative_algorithm == ("NGRAM",)
    assert str(tmp_path) in notices[0] and str(head.parent) in notices[1]


def test_what_is_said_about_drafting_holds(head: Path) -> None:
    given = DraftOptions(speculative_algorithm=("NGRAM",))
    assert choose_drafters(given) == given
    with pytest.raises(ConfigError, match="--speculative-algorithm"):
        choose_drafters(DraftOptions(speculative_draft_model_path="X"))
    for gpus in (0, 1, 2):
        with pytest.raises(ConfigError, match="--speculative-algorithm"):
            draft_for(DraftOptions(speculative_draft_model_path="X"), VerifyOptions(), gpus, print)


def test_the_only_gpu_is_left_to_verify(head: Path) -> None:
    notices: list[str] = []
    assert draft_for(DraftOptions(), VerifyOptions(), 1, notices.append).speculative_algorithm == ("NGRAM",) and notices
    assert draft_for(DraftOptions(), VerifyOptions(), 2, notices.append).speculative_algorithm == ("EAGLE3", "NGRAM")
    assert draft_for(DraftOptions(), VerifyOptions(device="cpu"), 1, notices.append).speculative_draft_model_path


def test_a_draft_that_chooses_knows_verify_s_target() -> None:
    linked = link({"draft": DraftOptions(), "verify": VerifyOptions(model="there")})
    assert isinstance(linked["draft"], DraftOptions) and linked["draft"].target_model_path == "there"
    named = link({"draft": DraftOptions(target_model_path="here"), "verify": VerifyOptions(model="there")})
    assert isinstance(named["draft"], DraftOptions) and named["draft"].target_model_path == "here"
