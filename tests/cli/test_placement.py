"""Where a draft model runs: `--draft-placement` of `outrider up`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import placement
from outrider.cli.placement import Placed, is_colocated, num_gpus, place_draft_model, place_drafts
from outrider.config.draft import BLOCK_ALGORITHMS, DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError

HEAD = DraftOptions(
    speculative_algorithm=("EAGLE3", "NGRAM"),
    speculative_draft_model_path="head",
    speculative_draft_model_revision="r1",
    speculative_num_steps=5,
    speculative_eagle_topk=8,
    speculative_token_map="map.json",
    branch_length=20,
)
CPU_HEAD = replace(HEAD, branch_length=DraftOptions().branch_length)
"""Nothing that a draft service alone has."""
NGRAMS = DraftOptions(speculative_algorithm=("NGRAM",))


def placed(draft: DraftOptions, where: str = "auto", gpus: int = 1, **verify: Any) -> Placed:
    return place_drafts(VerifyOptions(**verify), draft, where, gpus, lambda text: None)


def test_the_model_s_options_move_to_verify_and_n_grams_stay() -> None:
    found = placed(HEAD)
    assert found.verify == VerifyOptions(
        speculative_algorithm=("EAGLE3", "NGRAM"),
        speculative_draft_model_path="head",
        speculative_draft_model_revision="r1",
        speculative_num_steps=5,
        speculative_eagle_topk=8,
        speculative_token_map="map.json",
    )
    assert found.draft == DraftOptions(speculative_algorithm=("NGRAM",), branch_length=20)
    notices: list[str] = []
    alone = place_drafts(VerifyOptions(), replace(HEAD, speculative_algorithm=("EAGLE3",)), "auto", 1, notices.append)
    assert alone.verify == replace(found.verify, speculative_algorithm=("EAGLE3",)) and alone.draft is None
    assert notices == ["a draft model inside rounds runs without a draft service: --branch-length has no effect"]


@pytest.mark.parametrize(("visible", "count"), [("0,1", 2), ("0,-1,1", 1), ("-1,0", 0), ("", 0), (" 1 ", 1)])
def test_what_stands_behind_an_invalid_gpu_is_not_counted(
    visible: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_gpus() == count


def test_auto_takes_the_round_on_one_gpu_and_the_split_on_two() -> None:
    for gpus, wanted in ((1, True), (2, False)):
        assert is_colocated(VerifyOptions(), HEAD, "auto", gpus) == wanted
    # A target that two GPUs share leaves none.
    for gpus, wanted in ((2, True), (3, False)):
        assert is_colocated(VerifyOptions(tensor_parallel_size=2), HEAD, "auto", gpus) == wanted
    for name in BLOCK_ALGORITHMS:
        assert is_colocated(VerifyOptions(), replace(HEAD, speculative_algorithm=(name,)), "auto", 1)
    assert is_colocated(VerifyOptions(), HEAD, "colocated", 2)
    assert not is_colocated(VerifyOptions(), HEAD, "remote", 1)
    assert not is_colocated(VerifyOptions(lockstep=True), HEAD, "auto", 1)
    for backend, wanted in (("mixed", True), ("flashinfer", False)):
        assert is_colocated(VerifyOptions(attention_backend=backend), HEAD, "auto", 1) == wanted
    assert not is_colocated(VerifyOptions(), replace(HEAD, device="cuda:0"), "auto", 1)
    assert not is_colocated(VerifyOptions(), NGRAMS, "auto", 1)
    assert placed(HEAD, "remote").draft == HEAD


def test_a_remote_draft_model_takes_the_gpu_behind_verify_s(tmp_path: Path) -> None:
    for ranks, gpus, device in ((1, 2, "cuda:1"), (2, 2, "auto"), (2, 4, "cuda:2")):
        verify = VerifyOptions(tensor_parallel_size=ranks)
        assert place_draft_model(HEAD, verify, tmp_path, gpus).device == device


def test_on_a_cpu_verify_has_all_that_drafts_if_that_is_asked_for() -> None:
    for gpus, options in ((0, {}), (1, {"device": "cpu"})):
        found = placed(CPU_HEAD, "colocated", gpus, **options)
        assert found.draft is None
        assert found.verify.speculative_algorithm == ("EAGLE3", "NGRAM")
        assert found.verify.speculative_draft_model_path == "head"
    alone = placed(NGRAMS, "colocated", 0)
    assert alone.draft is None and alone.verify.speculative_algorithm == ("NGRAM",)
    assert placed(CPU_HEAD, "remote", 0).verify == VerifyOptions()


def test_auto_takes_verify_s_process_on_a_cpu_of_few_cores(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = replace(CPU_HEAD, speculative_algorithm=("DSPARK",))
    for cores, inside in ((1, True), (2, True), (4, False), (64, False)):
        monkeypatch.setattr(placement, "num_cores", lambda cores=cores: cores)
        for draft in (CPU_HEAD, block, DraftOptions()):
            assert (placed(draft, gpus=0).draft is None) == inside
    monkeypatch.setattr(placement, "num_cores", lambda: 2)
    # What a draft service is asked for, and what has no model, keeps its service; so does a draft that gets a GPU.
    for draft in (HEAD, NGRAMS, replace(CPU_HEAD, address="127.0.0.1:7000"), replace(CPU_HEAD, device="cpu")):
        assert placed(draft, gpus=0).draft == draft
    assert placed(replace(CPU_HEAD, watchdog_timeout=60), gpus=0).draft is None, "verify has it, too"
    assert placed(CPU_HEAD, device="cpu").draft == CPU_HEAD
    for options in ({"lockstep": True}, {"no_speculation": True}):
        assert placed(CPU_HEAD, gpus=0, **options).draft == CPU_HEAD


def test_the_head_that_ships_drafts_inside_rounds_of_its_target(head: Path, tmp_path: Path) -> None:
    found = placed(DraftOptions())
    assert found.verify.speculative_algorithm == ("EAGLE3", "NGRAM")
    assert found.verify.speculative_draft_model_path == str(head)
    assert found.draft is not None and found.draft.speculative_algorithm == ("NGRAM",)
    other = placed(DraftOptions(), model=str(tmp_path))
    assert other.verify.speculative_algorithm == () and other.draft is not None
    assert other.draft.speculative_algorithm == ("NGRAM",)


def test_naive_eagle_runs_inside_rounds_alone() -> None:
    naive = replace(HEAD, speculative_algorithm=("NAIVE_EAGLE",))
    for gpus in (1, 2):
        assert placed(naive, gpus=gpus).verify.speculative_algorithm == ("NAIVE_EAGLE",)
    for where, gpus in (("remote", 1), ("auto", 0)):
        with pytest.raises(ConfigError, match=r"^--speculative-algorithm: NAIVE_EAGLE .*--draft-placement colocated"):
            placed(naive, where, gpus)


@pytest.mark.parametrize(
    ("draft", "verify", "gpus", "message"),
    [
        (HEAD, {}, 0, r"^--draft-placement: colocated has no draft service on a CPU, but --branch-length of one"),
        (replace(CPU_HEAD, address="127.0.0.1:0"), {}, 0, r"^--draft-placement: .* but --draft-address of one"),
        (HEAD, {"device": "cpu"}, 1, r"^--draft-placement: .* --branch-length"),
        (replace(HEAD, speculative_algorithm=("NAIVE_EAGLE",), branch_length=18), {}, 0, "'NAIVE_EAGLE' is not known"),
        (HEAD, {"lockstep": True}, 1, r"^--lockstep: .*--draft-placement remote"),
        (NGRAMS, {}, 1, r"^--draft-placement: .* NGRAM has none; give"),
        (replace(HEAD, speculative_algorithm=("EAGLE3", "STANDALONE")), {}, 1, "EAGLE3,STANDALONE are models"),
        (replace(HEAD, speculative_algorithm=("MEDUSA",)), {}, 1, "'MEDUSA' is not known; use one of DFLASH"),
        (replace(HEAD, speculative_num_steps=17), {}, 1, r"^--speculative-num-steps: 17 is above 16"),
        (DraftOptions(speculative_draft_model_path="X"), {}, 1, "--speculative-algorithm"),
    ],
)
def test_what_cannot_be_had_is_said(draft: DraftOptions, verify: dict[str, Any], gpus: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        placed(draft, "colocated", gpus, **verify)
