from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
from safetensors.torch import load_file
from torch.multiprocessing.spawn import spawn, start_processes
from training_world import make_head

from outrider.errors import ConfigError
from outrider_tools.training import parallel
from outrider_tools.training.parallel import run_ranks
from outrider_tools.training.prompts import ChatForm, all_openings
from outrider_tools.training.target import TargetModel
from outrider_tools.training.texts import Texts
from outrider_tools.training.trainer import Trainer


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> Iterator[None]:
    """Ranks on CPUs are forks of one process, which has imported what takes long: else each would.

    The first optimizer of a process imports torch._dynamo.
    """
    modules = ("outrider_tools.training.corpus", "outrider_tools.training.trainer", "torch._dynamo")
    multiprocessing.set_forkserver_preload([*modules])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "spawn", partial(start_processes, start_method="forkserver"))
        yield


@pytest.fixture(scope="module")
def two_ranks(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have left what they learned and what text they made."""
    out = tmp_path_factory.mktemp("two_ranks")
    run_ranks(2, "cpu", "ranks:train_and_make_texts", tiny_folder, out)
    return out


def test_two_ranks_learn_what_one_process_learns_from_both_batches(target: TargetModel, two_ranks: Path) -> None:
    first, second = (load_file(two_ranks / f"{rank}.safetensors") for rank in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    texts, options = ranks.texts_and_options(target, together=True)
    head = make_head(target)
    Trainer(ranks.Calibrated(target, head, options), texts, options).run()
    start = make_head(target).state_dict()
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-3, atol=2e-4)
        if name == "fc.weight":
            # The comparison means something: training has moved it further than the tolerance.
            assert (tensor - start[name]).abs().mean() > 2e-3
    assert (two_ranks / "state.safetensors").exists()


def test_ranks_share_the_making_of_text_and_all_get_all_of_it(tiny_folder: Path, two_ranks: Path) -> None:
    names = [f"{turn}-{rank}" for turn in range(2) for rank in range(2)]
    assert len({(two_ranks / f"made-{name}.safetensors").read_bytes() for name in names}) == 1
    assert len({(two_ranks / f"held-{name}.json").read_bytes() for name in names}) == 1
    held_out = json.loads((two_ranks / "held-0-1.json").read_text())
    texts, form = Texts.load(two_ranks / "made-0-0.safetensors"), ChatForm(tiny_folder)
    prompts = [texts.sequence(number)[: texts.prompt_lens[number]].tolist() for number in range(len(texts))]
    assert held_out and not any(form.before + question + form.after in prompts for question in held_out)
    # Given ones are asked once each, whichever rank had them.
    assert all(prompts.count(form.ask(f"What is {number}?")) == 1 for number in range(5))
    openings = [form.before + form.words(text) for text in all_openings()]
    assert any(prompt[: len(opening)] == opening for prompt in prompts for opening in openings)
    assert not list(two_ranks.glob("texts.?.safetensors"))


@pytest.mark.multi_gpu
def test_the_first_rank_waits_for_those_that_are_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "spawn", spawn)
    run_ranks(2, "cuda", "ranks:wait_for_late_ones", tmp_path)
    assert len(list(tmp_path.glob("late-*"))) == 20


def test_a_failing_rank_ends_all_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank 1 has had enough"):
        run_ranks(2, "cpu", "ranks:fail_on_one", tmp_path)
    assert not multiprocessing.active_children()
    for path in tmp_path.glob("pid-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
    assert len(list(tmp_path.glob("pid-*"))) == 2


def test_a_killed_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "spawn", spawn)  # as users start them
    with pytest.raises(ConfigError, match="process 1 of 2 was ended by SIGKILL"):
        run_ranks(2, "cpu", "ranks:die_on_one", tmp_path)
    assert not multiprocessing.active_children()
