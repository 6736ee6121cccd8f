"""An assertion on the device in the middle of a round, for real: in processes of their own, whose context it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_harness import VOCAB, small_model
from device_fault import TEST_SECONDS, check_device_fault
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(TEST_SECONDS)]


def test_a_cuda_error_in_a_round_is_a_clear_status_and_a_new_start(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    small_model(folder, "Llama", 64)
    Tokenizer(WordLevel({f"word{number}": number for number in range(VOCAB)}, unk_token="word0")).save(
        str(folder / "tokenizer.json")
    )
    check_device_fault(folder, tmp_path, "cuda")
