from __future__ import annotations

import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from outrider.cli.main import main, make_parser
from outrider.errors import ConfigError
from outrider.models.drafters.kinds import algorithm_of
from outrider_tools.files import replacing, writing
from outrider_tools.training import run as run_module
from outrider_tools.training.figures import Report
from outrider_tools.training.options import CorpusOptions, RunOptions, TrainerOptions
from outrider_tools.training.prompts import ChatForm, QuestionForm, read_questions
from outrider_tools.training.run import train
from outrider_tools.training.texts import Texts, choose_vocabulary, coverage

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
    output, log = capsys.readouterr()
    assert log.startswith("train: EAGLE3 for ") and "loading " in log.splitlines()[1]
    assert "greedy, all" in output and "t1, writing" in output
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert record["training"]["total_steps"] == 3
    assert [len(found["all"]["rates"]) for found in record["evaluation"]] == [10, 10]
    assert (tmp_path / "head" / "model.safetensors").stat().st_size == record["weight_bytes"]


@pytest.fixture(scope="module")
def earlier(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder."""
    out = tmp_path_factory.mktemp("earlier")
    prompts, asked = out / "prompts.jsonl", out / "asked.jsonl"
    prompts.write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n{"prompt": "Three?"}\n')
    asked.write_text('{"prompt": "Four?"}\n')
    options = replace(OPTIONS, prompts=prompts, eval_prompts=asked, eval_temperatures=(0.0,))
    train(tiny_folder, out, torch.device("cpu"), options, Report(StringIO()))
    return out


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes as long as a small training."""
    monkeypatch.setattr(run_module, "find_spec", lambda name: None)


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("kind", ["EAGLE", "nextn", "Standalone"])
def test_smoke_run_of_every_kind_on_the_text_of_an_earlier_run(
    earlier: Path, tiny_folder: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--model", str(tiny_folder), "--out", str(tmp_path), "--smoke", "--device", "cpu"]
    words += [
        "--algorithm",
        kind,
        "--text",
        str(earlier),
        "--eval-prompts",
        str(earlier / "asked.jsonl"),
        "--steps",
        "2",
        *(["--layers", "2"] if kind == "Standalone" else []),
    ]
    assert main(words) == 0
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["algorithm"] == kind.upper()
    first = json.loads((earlier / "training.json").read_text())
    assert record["answers"] == first["answers"] and record["questions_given"] == 3
    corpus = record["options"]["corpus"]
    assert {name: corpus[name] for name in first["options"]["corpus"]} == first["options"]["corpus"]
    assert algorithm_of(tmp_path) == kind.upper()
    window = json.loads((tmp_path / "config.json").read_text()).get("draft_window_size")
    assert window == (OPTIONS.corpus.answer_tokens if kind == "EAGLE" else None), "that of the text, not of a smoke run"
    assert not (tmp_path / "work" / "texts.safetensors").exists()
    capsys.readouterr()
    other = "EAGLE3" if kind == "EAGLE" else "EAGLE"
    sizes = ["--draft-vocab-size", "150", "--feature-layers", "1,2,3"] if other == "EAGLE3" else []
    assert main([*words[: words.index("--steps") + 2], "--algorithm", other, *sizes]) == 2
    assert f"another --algorithm ({kind.upper()}, not {other})" in capsys.readouterr().err


@pytest.mark.usefixtures("no_plots")
def test_texts_are_counted_without_those_that_are_evaluated_with(
    earlier: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "One?"}\n')
    options = replace(OPTIONS, text=earlier, eval_prompts=asked, eval_temperatures=(0.0,))
    train(tiny_folder, tmp_path, torch.device("cpu"), options, Report(StringIO()))
    record, first = (json.loads((out / "training.json").read_text()) for out in (tmp_path, earlier))
    assert record["answers"] < first["answers"]
    assert sum(record["beginnings"].values()) == record["answers"]


def test_the_card_has_the_numbers_of_the_record(earlier: Path) -> None:
    card, record = (earlier / "README.md").read_text(), json.loads((earlier / "training.json").read_text())
    found = record["evaluation"][0]["all"]
    rates = " | ".join(f"{rate:.2f}" for rate in found["rates"])
    chain, tree = found["chain"]["accept_length"], found["tree"]["accept_length"]
    for text in (
        "--speculative-algorithm EAGLE3,NGRAM",
        f"| tokens of answers | {record['answer_tokens']} |",
        f"| steps | {record['training']['total_steps']} |",
        f"| device | {record['device']} |",
        f"| last loss | {record['training']['points'][-1]['loss']:.3f} |",
        f"| greedy, accept rate | {rates} |",
        f"| {chain:.2f} | {tree:.2f} |",
        f"learned from text that {record['target']} wrote itself",
    ):
        assert text in card


def test_every_head_with_a_vocabulary_of_its_own_says_how_large_it_is(earlier: Path) -> None:
    record = json.loads((earlier / "training.json").read_text())
    for algorithm, has_own in (("EAGLE3", True), ("DSPARK", True), ("EAGLE", False)):
        rows = run_module._training(record | {"algorithm": algorithm})
        assert any(name == "draft vocabulary" and size.startswith("150 tokens") for name, size in rows) == has_own


def test_plots_are_drawn_beside_the_card(earlier: Path, no_plots: None, tmp_path: Path) -> None:
    for name in ("training.png", "accept_rate.png"):
        assert (earlier / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in (earlier / "README.md").read_text()
    output = StringIO()
    assert run_module.write_plots({}, tmp_path, Report(output)) == []
    assert "matplotlib is not installed" in output.getvalue()


def test_a_folder_that_cannot_be_made_is_told(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out: .*/file/work cannot be written: "):
        train(tiny_folder, tmp_path / "file", torch.device("cpu"), OPTIONS, Report(StringIO()))


def test_text_of_nowhere_or_of_another_target_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    device, report = torch.device("cpu"), Report(StringIO())
    options = replace(OPTIONS, text=tmp_path)
    with pytest.raises(ConfigError, match=r"holds no texts\.safetensors"):
        train(tiny_folder, tmp_path / "a", device, options, report)
    with pytest.raises(ConfigError, match=r"--prompts .*: no text is generated with --text"):
        train(tiny_folder, tmp_path / "a", device, replace(options, prompts=tmp_path / "q"), report)
    Texts.join([[1]], [[5000]]).save(tmp_path / "texts.safetensors")
    (tmp_path / "texts.json").write_text('{"held_out": [[5]]}')
    with pytest.raises(ConfigError, match="holds token 5000, and the target has 259"):
        train(tiny_folder, tmp_path / "b", device, options, report)


@pytest.mark.usefixtures("no_plots")
def test_stages_that_are_done_are_not_done_again(tiny_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n')
    options = replace(OPTIONS, prompts=prompts, eval_temperatures=(0.0,))
    device = torch.device("cpu")

    def run(out: str) -> tuple[str, str]:
        output = StringIO()
        train(tiny_folder, tmp_path / out, device, options, Report(output))
        return output.getvalue(), (tmp_path / out / "model.safetensors").read_bytes().hex()

    output, weights = run("a")
    assert "answers: " in output
    again, same = run("a")
    assert "answers: " not in again and same == weights
    assert run("b")[1] == weights


@pytest.mark.usefixtures("no_plots")
def test_text_and_state_of_another_target_or_other_questions_are_not_gone_on_with(
    tiny_folder: Path, tmp_path: Path
) -> None:
    prompts, other = tmp_path / "questions.jsonl", tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"] += 0.1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    options = replace(OPTIONS, prompts=prompts, eval_temperatures=(0.0,))

    def output_of(folder: Path, question: str, options: RunOptions = options) -> str:
        output = StringIO()
        prompts.write_text(json.dumps({"prompt": question}) + "\n")
        try:
            train(folder, tmp_path / "out", torch.device("cpu"), options, Report(output))
        except ConfigError as error:
            output.write(error.message)
        return output.getvalue()

    assert "answers: " in output_of(tiny_folder, "One?")
    assert "answers: " not in output_of(tiny_folder, "One?")
    text = tmp_path / "out" / "work" / "texts.safetensors"
    made = text.read_bytes()
    more = replace(options, corpus=replace(options.corpus, tokens=301))
    for output, name in (
        (output_of(tiny_folder, "Two?"), "another questions"),
        (output_of(other, "One?"), "another target"),
        (output_of(tiny_folder, "One?", more), "another tokens (300, not 301)"),
    ):
        assert f"is text that was made with {name}" in output and "answers: " not in output
    assert text.read_bytes() == made
    for path in text.parent.glob("texts.*"):
        path.unlink()
    assert "a training with another text" in output_of(tiny_folder, "Two?")


def test_processes_without_a_gpu_each_are_refused(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--model", str(tiny_folder), "--out", str(tmp_path / "out"), "--device", "cpu", "--gpus", "4"]
    assert main(words) == 2
    assert "--gpus 4: on a CPU one process trains; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--learning-rate", "0"),
        ("--muon-learning-rate", "-1"),
        ("--minutes", "nan"),
        ("--text-minutes", "-1"),
        ("--temperatures", "x"),
        ("--temperatures", "-1"),
        ("--average", "1"),
        ("--decay", "inf"),
        ("--opened", "2"),
        ("--feature-weight", "nan"),
    ],
)
def test_numbers_out_of_bounds_are_told_at_once(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser(["train"]).parse_args(["train", "--out", "nowhere", f"{option}={value}"])
    assert f"argument {option}: '{value}' is not a number from" in capsys.readouterr().err


def _refused(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["train", "--model", str(folder), "--smoke", "--device", "cpu", *words]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_folder_of_other_files_is_left_alone(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    before = {path.name: path.read_bytes() for path in other.iterdir() if path.is_file()}
    assert "holds a model that no training has written" in _refused(tiny_folder, capsys, "--out", str(other))
    (other / "work").mkdir()
    assert "--out: is the folder of --model" in _refused(other, capsys, "--out", str(other))
    assert before == {path.name: path.read_bytes() for path in other.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "3", "--minutes", "1"), "--minutes: cannot be combined with --steps"),
        (("--optimizer", "adamw", "--muon-learning-rate", "1"), "--muon-learning-rate: --optimizer adamw"),
        (("--text", "t", "--tokens", "7"), "--tokens: no text is generated with --text t"),
        (("--text", "nowhere", "--num-rows", "4"), "--text nowhere: holds no texts.safetensors"),
    ],
)
def test_what_would_change_nothing_is_refused_and_leaves_no_folder(
    words: tuple[str, ...], message: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head"
    assert message in _refused(tiny_folder, capsys, "--out", str(out), *words)
    assert not out.exists()


def test_a_full_disk_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    with (
        pytest.raises(ConfigError, match=r"--out: .*state cannot be written: .*No space left"),
        writing("--out", path),
        replacing(path) as part,
    ):
        part.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert list(tmp_path.iterdir()) == []


def test_questions_that_are_evaluated_with_are_not_trained_on(tiny_folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text('{"prompt": "Both?"}\n')
    options = RunOptions(prompts=tmp_path / "a", eval_prompts=tmp_path / "b")
    with pytest.raises(ConfigError, match="1 prompt for both training and evaluation"):
        train(tiny_folder, tmp_path / "head", torch.device("cpu"), options, Report(StringIO()))


def test_questions_that_cannot_be_read_are_told_by_their_option(tiny_folder: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    for option, options in (
        ("--prompts", RunOptions(prompts=nowhere)),
        ("--eval-prompts", RunOptions(eval_prompts=nowhere)),
    ):
        with pytest.raises(ConfigError, match=f"^{option}: {nowhere} cannot be read"):
            train(tiny_folder, tmp_path / "head", torch.device("cpu"), options, Report(StringIO()))


def test_a_chat_is_cut_where_the_users_words_stand(tiny_folder: Path) -> None:
    form = ChatForm(tiny_folder)
    words = form.tokenizer.encode("Hello?", add_special_tokens=False).ids
    assert form.before + words + form.after == form.ask("Hello?")
    assert form.before[0] == 1 and form.tokenizer.decode(form.before) == "user\n"


HEADED = (
    "{{ bos_token }}{% if messages[0]['role'] != 'system' %}<|im_start|>system\nOur own.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Folds the system message into the user's first words.
FOLDED = "[INST] {% for message in messages %}{{ message['content'] }} {% endfor %}[/INST]"
DEAF = "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] }}{% endif %}{% endfor %}:"


def form_of(tiny_folder: Path, folder: Path, template: Any) -> ChatForm:
    """Of the tiny target with another chat template, and a token that begins every text."""
    folder.mkdir()
    tokenizer = json.loads((tiny_folder / "tokenizer.json").read_text())
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"chat_template": template, "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatForm(folder)


def test_a_chat_begins_behind_any_system_message_and_behind_none(tiny_folder: Path, tmp_path: Path) -> None:
    form = form_of(tiny_folder, tmp_path / "headed", HEADED)

    def prompt_of(form: QuestionForm) -> str:
        assert form.ask(form.words("Who?")) == form.ask("Who?")
        return form.tokenizer.decode(form.ask("Who?"), skip_special_tokens=False)

    bos, turn = "<|endoftext|>", "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(form) == f"{bos}<|im_start|>system\nOur own.<|im_end|>\n{turn}"
    assert prompt_of(form.with_system("Be brief.")) == f"{bos}<|im_start|>system\nBe brief.<|im_end|>\n{turn}"
    assert prompt_of(form.with_system("")) == bos + turn
    assert prompt_of(form.raw()) == bos + "Who?"
    header = form.system_form().before
    assert form.tokenizer.decode(header, skip_special_tokens=False) == f"{bos}<|im_start|>system\n"


def test_a_template_is_rendered_as_the_gateway_does(tiny_folder: Path, tmp_path: Path) -> None:
    chat = (
        "{% for message in messages %}{% generation %}{{ {'<&>': 1} | tojson }}{{ message['content'] }}"
        "{% endgeneration %}{% endfor %}{{ strftime_now('%%') }}"
    )
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": chat}]
    form = form_of(tiny_folder, tmp_path / "named", named)
    assert form.tokenizer.decode(form.ask("Who?")) == '{"<&>": 1}Who?%'
    with pytest.raises(ConfigError, match="the chat template cannot be rendered: "):
        form_of(tiny_folder, tmp_path / "wrong", "{{ messages[0]['content'] + 1 }}")
    with pytest.raises(ConfigError, match="has no chat template"):
        form_of(tiny_folder, tmp_path / "none", None)


def test_templates_that_cannot_begin_otherwise_say_so(tiny_folder: Path, tmp_path: Path) -> None:
    folded, deaf = (form_of(tiny_folder, tmp_path / name, text) for name, text in (("a", FOLDED), ("b", DEAF)))
    with pytest.raises(ConfigError, match="does not part a system message from the user's words"):
        folded.with_system("")
    with pytest.raises(ConfigError, match=r"leaves out the system message 'Be brief\.'"):
        deaf.with_system("Be brief.")


def test_damaged_questions_are_named(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"question": "b"}\n')
    with pytest.raises(ConfigError, match=r"line 3: neither a prompt nor turns"):
        read_questions(path)


def test_a_line_of_questions_ends_with_a_newline_alone(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "one\u2028two\u0085three"}\r\n{"prompt": "b"}\n', "utf-8")
    assert len(read_questions(path)) == 2


def test_vocabulary_holds_the_most_frequent_tokens_of_answers() -> None:
    texts = Texts.join([[1, 1, 1, 1], [1]], [[7, 7, 9, 9, 9, 4], [9]])
    chosen = choose_vocabulary(texts, 12, 4, always=[2])
    assert chosen.tolist() == [2, 4, 7, 9]
    assert coverage(texts, np.array([2, 9]), 12) == pytest.approx(4 / 7)
    assert choose_vocabulary(texts, 12, 6).tolist() == [0, 1, 2, 4, 7, 9]
    with pytest.raises(ConfigError, match="13 of the target's 12"):
        choose_vocabulary(texts, 12, 13)


@pytest.mark.usefixtures("no_plots")
def test_a_run_goes_on_from_an_earlier_runs_head(
    earlier: Path,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "DRAFT_VOCAB_SIZE", 100)
    words = ["train", "--model", str(tiny_folder), "--out", str(tmp_path), "--smoke", "--device", "cpu"]
    words += ["--text", str(earlier), "--eval-prompts", str(earlier / "asked.jsonl"), "--steps", "2"]
    more = ["--hit-weight", "0.5", "--output-dtype", "float8_e4m3"]
    assert main([*words, "--init-from", str(earlier), *more]) == 0
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["options"]["draft_vocab_size"] == 150 and record["options"]["feature_layers"] == [1, 2, 3]
    assert record["options"]["trainer"]["hit_weight"] == 0.5
    card = (tmp_path / "README.md").read_text()
    assert (
        f"| begun as | {earlier.name} |" in card and f"Training started from {earlier.name}, which has a text" in card
    )
    own, first = (load_file(folder / "model.safetensors") for folder in (tmp_path, earlier))
    assert own["lm_head.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(own["d2t"], first["d2t"]) and not torch.equal(own["fc.weight"], first["fc.weight"])
    torch.testing.assert_close(own["fc.weight"], first["fc.weight"], rtol=0.2, atol=0.1)
    frequent = json.loads((tmp_path / "frequent_tokens.json").read_text())
    assert len(frequent) == 100 and set(frequent) <= set((own["d2t"] + torch.arange(150)).tolist())
    assert not (earlier / "frequent_tokens.json").exists(), "its vocabulary is not larger than that of CPUs"
    capsys.readouterr()
    assert main([*words, "--init-from", str(tmp_path / "nothing")]) == 2
