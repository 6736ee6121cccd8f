"""What is asked of a drafter that is not named is refused, or told."""

from __future__ import annotations

import pytest

from outrider.config.draft import DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError


@pytest.mark.parametrize("names", [("NGRAM",), ()])
def test_a_draft_model_without_its_drafter_is_refused(names: tuple[str, ...]) -> None:
    """It would draft nothing, and nobody would be told."""
    verify = VerifyOptions(speculative_algorithm=names, speculative_draft_model_path="head", device="cpu")
    with pytest.raises(ConfigError, match="--speculative-algorithm"):
        verify.check()
    if names:
        draft = DraftOptions(speculative_algorithm=names, speculative_draft_model_path="head")
        with pytest.raises(ConfigError, match=r"--speculative-draft-model-path: NGRAM has no model; .* EAGLE3"):
            draft.check()
    for algorithm in (("EAGLE3",), ("EAGLE3", "NGRAM")):
        DraftOptions(speculative_algorithm=algorithm, speculative_draft_model_path="head").check()


def test_options_that_no_drafter_reads_are_found() -> None:
    def unused(*names: str) -> str:
        return DraftOptions(speculative_algorithm=names, capacity=5000, draft_ahead="never", dtype="float32").unused()

    assert unused("NGRAM") == "--draft-ahead: without effect with drafters NGRAM"
    assert unused("EAGLE3") == "--capacity: without effect with drafters EAGLE3"
    assert unused("EAGLE3", "NGRAM") == unused("AUTO") == ""
