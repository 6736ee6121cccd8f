"""What verify's own options say of a draft model inside rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.models.drafters.kinds import shipped_head
from verify_service.engine.loading import named_draft

HEAD = VerifyOptions(speculative_algorithm=("EAGLE3",), speculative_draft_model_path="head")
TARGET = Path("target")


def test_a_named_draft_model_is_told_of_the_target_and_n_grams_are_left_out() -> None:
    for names in (("EAGLE3",), ("EAGLE3", "NGRAM")):
        found = named_draft(replace(HEAD, speculative_algorithm=names), TARGET)
        assert found is not None and found.speculative_algorithm == ("EAGLE3",)
        assert (found.speculative_draft_model_path, found.target_model_path) == ("head", "target")


def test_nothing_drafts_inside_rounds_without_a_model() -> None:
    for names in ((), ("NGRAM",)):
        assert named_draft(VerifyOptions(speculative_algorithm=names), TARGET) is None
    assert named_draft(replace(HEAD, no_speculation=True), TARGET) is None


def test_auto_takes_the_head_that_ships_for_the_target(tmp_path: Path) -> None:
    automatic = VerifyOptions(speculative_algorithm=("AUTO",))
    found, head = named_draft(automatic, TARGET), shipped_head(automatic.model)
    assert found is not None and found.speculative_algorithm == ("EAGLE3",)
    assert found.speculative_draft_model_path == str(head)
    assert named_draft(replace(automatic, model=str(tmp_path)), TARGET) is None


def test_two_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="EAGLE3,STANDALONE are models"):
        replace(HEAD, speculative_algorithm=("EAGLE3", "STANDALONE")).check()
