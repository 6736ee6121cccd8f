from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.cli.main import main
from outrider.errors import ConfigError
from outrider.training.corpus import CorpusOptions
from outrider.training.prompts import ChatForm, read_questions
from outrider.training.report import Report
from outrider.training.run import RunOptions, train_eagle3
from outrider.training.texts import Texts
from outrider.training.trainer import TrainerOptions
from outrider.training.vocabulary import choose_vocabulary, coverage

OPTIONS = RunOptions(
    draft_vocab_size=150,
    feature_layers=(1, 2, 3),
    eval_new_tokens=12,
    corpus=CorpusOptions(
        tokens=300, invented=12, question_tokens=40, answer_tokens=40, held_out=2, num_rows=8, question_temperature=3.0
    ),
    trainer=TrainerOptions(steps=4, batch_tokens=256, unroll=2),
)


def test_smoke_run_from_the_command_line(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"What is {n} + {n}?"}) + "\n" for n in range(6)))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"turns": ["Who are you?", "Why?"], "category": "writing"}) + "\n")
    words = ["train", "--model", str(tiny_folder), "--out", str(tmp_path / "head"), "--smoke", "--device", "cpu"]
    words += ["--prompts", str(prompts), "--eval-prompts", str(held_out), "--draft-vocab-size", "150"]
    assert main([*words, "--feature-layers", "1,2,3", "--steps", "3"]) == 0
    assert "accept length, tree" in capsys.readouterr().out
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert record["training"]["total_steps"] == 3
    assert len(record["evaluation"]["rates"]) == 10
    assert (tmp_path / "head" / "model.safetensors").stat().st_size == record["weight_bytes"]


def test_stages_that_are_done_are_not_done_again(tiny_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n')
    options = RunOptions(**{**{name: getattr(OPTIONS, name) for name in OPTIONS.__slots__}, "prompts": prompts})
    device = torch.device("cpu")

    def run(out: str) -> tuple[str, str]:
        told = StringIO()
        train_eagle3(tiny_folder, tmp_path / out, device, options, Report(told))
        return told.getvalue(), (tmp_path / out / "model.safetensors").read_bytes().hex()

    told, weights = run("a")
    assert "answers: " in told
    again, same = run("a")
    assert "answers: " not in again and same == weights
    assert run("b")[1] == weights


def test_questions_that_are_evaluated_with_are_not_trained_on(tiny_folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text('{"prompt": "Both?"}\n')
    options = RunOptions(prompts=tmp_path / "a", eval_prompts=tmp_path / "b")
    with pytest.raises(ConfigError, match="1 prompts are both trained on and evaluated with"):
        train_eagle3(tiny_folder, tmp_path / "head", torch.device("cpu"), options, Report(StringIO()))


def test_a_chat_is_cut_where_the_users_words_stand(tiny_folder: Path) -> None:
    form = ChatForm(tiny_folder)
    words = form.tokenizer.encode("Hello?", add_special_tokens=False).ids
    assert form.before + words + form.after == form.ask("Hello?")
    assert form.before[0] == 1 and form.tokenizer.decode(form.before) == "user\n"


def test_damaged_questions_are_named(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"question": "b"}\n')
    with pytest.raises(ConfigError, match=r"line 3: neither a prompt nor turns"):
        read_questions(path)


def test_vocabulary_holds_the_most_frequent_tokens_of_answers() -> None:
    texts = Texts.join([[1, 1, 1, 1], [1]], [[7, 7, 9, 9, 9, 4], [9]])
    chosen = choose_vocabulary(texts, 12, 4, always=[2])
    assert chosen.tolist() == [2, 4, 7, 9]
    assert coverage(texts, np.array([2, 9]), 12) == pytest.approx(4 / 7)
    assert choose_vocabulary(texts, 12, 6).tolist() == [0, 1, 2, 4, 7, 9]
    with pytest.raises(ConfigError, match="13 of the target's 12"):
        choose_vocabulary(texts, 12, 13)
