"""What a verify service refuses before it looks for its model, or before it reads any weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_service import tiny_folder, tiny_options

from outrider.cache.kv import zeros
from outrider.config.draft import DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.device import out_of_memory
from outrider.errors import ConfigError
from outrider.models.drafters.kinds import check_drafter
from outrider.models.drafters.loader import load_draft_model
from verify_service.engine.loading import load
from verify_service.main import main


@pytest.fixture
def restored_log() -> Iterator[None]:
    """A service sets up the log of its process, which here is that of all tests."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--deterministic --accept-threshold-acc=0.5", "--deterministic: lossy acceptance depends on what is drafted"),
        ("--deterministic --attention-backend=flashinfer", "--attention-backend: flashinfer has no deterministic mode"),
        (
            "--attention-backend=flashinfer --speculative-algorithm=EAGLE3 --speculative-draft-model-path=nosuch",
            "--attention-backend: flashinfer plans rounds on the host, which does not know the trees that EAGLE3 grows",
        ),
        ("--kv-cache-dtype=fp8_e4m3 --attention-backend=mixed", "--kv-cache-dtype: fp8_e4m3 needs a GPU"),
        ("--device=cpu --speculative-algorithm=NAIVE_EAGLE", "NAIVE_EAGLE drafts inside rounds on a GPU"),
        ("--device=cpu --lockstep --speculative-algorithm=NGRAM", "--lockstep: NGRAM has no model"),
        ("--speculative-algorithm=EAGLE3,NEXTN", "EAGLE3,NEXTN are models and do not run together"),
        ("--ready-file=nowhere/ready", "--ready-file: cannot write nowhere/ready"),
        ("--address=unix:nowhere/verify.sock", "--address: the folder nowhere does not exist"),
        ("--draft-auth-token=a\u00e9", "--draft-auth-token holds a space or a character beyond ASCII"),
        ("--auth-token=a\u00e9", "--auth-token holds a space or a character beyond ASCII"),
    ],
)
def test_options_are_refused_before_the_model_is_looked_for(
    wrong: str, message: str, restored_log: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model=nosuch", "--address=127.0.0.1:0", "--metrics-address=", *wrong.split()]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert message in line


def test_a_model_that_is_not_there_is_told_by_its_option() -> None:
    with pytest.raises(ConfigError, match=r"^--model: there is no model 'nosuch'"):
        load(VerifyOptions(model="nosuch", device="cpu"))
    for algorithm in ("STANDALONE", "NAIVE_EAGLE"):
        draft = DraftOptions(speculative_algorithm=(algorithm,), speculative_draft_model_path="nosuch")
        with pytest.raises(ConfigError, match=r"^--speculative-draft-model-path: there is no model 'nosuch'"):
            check_drafter(draft, Path())
    with pytest.raises(ConfigError, match=r"^--target-model-path: there is no model 'nosuch'"):
        check_drafter(DraftOptions(speculative_algorithm=("NEXTN",), target_model_path="nosuch"), Path())
    head = str(Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct-EAGLE3")
    draft = DraftOptions(
        speculative_algorithm=("EAGLE3",), speculative_draft_model_path=head, target_model_path="nosuch", device="cpu"
    )
    with pytest.raises(ConfigError, match=r"^--target-model-path: there is no model 'nosuch'"):
        load_draft_model(draft)


def test_memory_that_a_machine_has_not_is_told_with_the_fix() -> None:
    with (
        pytest.raises(ConfigError, match=r"this machine has no memory for the cache: .*; lower it"),
        out_of_memory("the cache", "lower it"),
    ):
        zeros((1 << 60,), torch.uint8, torch.device("cpu"))


def test_a_device_is_refused_before_the_model_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="--device: cuda:99 does not exist"):
        load(VerifyOptions(model="nosuch", device="cuda:99"))


def test_what_the_cpu_has_not_is_refused_where_the_device_was_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.device.torch.cuda.is_available", lambda: False)
    options = VerifyOptions(model="nosuch", kv_cache_dtype="fp8_e4m3")
    options.check()
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype: fp8_e4m3 needs a GPU .* this is --device cpu"):
        load(options)


def test_a_tokenizer_that_is_none_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        load(tiny_options(folder))
