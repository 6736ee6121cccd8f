from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

import outrider.cli.options as options_module
from outrider.cli.cluster import SHARED, service_flags
from outrider.cli.main import COMMANDS, main, make_parser
from outrider.cli.options import (
    COMMON_FLAGS,
    make_cluster,
    parse_service_options,
    translate_argv,
)
from outrider.cli.placement import place_draft_model
from outrider.cli.terminal import make_console
from outrider.cli.up import port_hint
from outrider.config.base import parse_options
from outrider.config.draft import DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.models.fields import read_json


@cache
def parser() -> argparse.ArgumentParser:
    return make_parser()


def parse(*words: str) -> argparse.Namespace:
    return parser().parse_args(["up", *words])


def test_every_option_of_a_service_goes_through_under_one_name() -> None:
    flags = [flag for flag in service_flags() if flag.option.name not in SHARED]
    assert len({flag.flag for flag in flags}) == len(flags)
    for flag in flags:
        assert parse(f"{flag.flag}=1")


def test_names_that_several_services_have_take_the_service_in_front() -> None:
    given = parse("--match-type", "PROB", "--verify-threads=3", "--log-level", "DEBUG", "--no-speculation")
    options = parse_service_options(given, env={})
    assert options["draft"] == DraftOptions(match_type="PROB", log_level="DEBUG")
    assert options["verify"] == VerifyOptions(threads=3, log_level="DEBUG", no_speculation=True)
    assert options["gateway"] == GatewayOptions(log_level="DEBUG")


def test_options_of_a_model_are_the_target_s_and_those_of_drafting_the_draft_s() -> None:
    line = (
        "up --device cuda:0 --draft-device=cuda:1 --dtype bfloat16 --lockstep --speculative-algorithm STANDALONE "
        "--speculative-draft-model-path X --speculative-num-steps 3 --speculative-accept-threshold-single 0.9 "
        "--speculative-draft-attention-backend triton --speculative-ngram-branch-length 20"
    )
    words = translate_argv(shlex.split(line))
    options = parse_service_options(make_parser().parse_args(words), env={"OUTRIDER_MEM_FRACTION_STATIC": "0.5"})
    assert options["verify"] == VerifyOptions(
        device="cuda:0", dtype="bfloat16", lockstep=True, accept_threshold_single=0.9, mem_fraction_static=0.5
    )
    assert options["draft"] == DraftOptions(
        device="cuda:1",
        lockstep=True,
        speculative_algorithm=("STANDALONE",),
        speculative_draft_model_path="X",
        speculative_num_steps=3,
        branch_length=20,
    )


def test_an_option_that_cannot_be_had_ends_the_command_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--speculative-draft-model-quantization", "fp8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "outrider: error: --speculative-draft-model-quantization fp8: a draft is quantized as its own"
    )


def test_addresses_models_and_devices_that_are_wrong_are_told_at_once_and_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        doors = [f"--rest-address={address}", f"--verify-metrics-address={address}", "--draft-metrics-address=nowhere"]
        draft = ["--draft-placement=remote", "--speculative-algorithm=EAGLE3", "--speculative-draft-model-path=none"]
        draft.append("--draft-device=cdua:1")
        assert main(["up", "--ephemeral", *doors, "--model=nosuch", "--device=gpu", *draft]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 7, lines
        assert lines[0].startswith("outrider: error: --draft-metrics-address: 'nowhere' is not an address")
        assert lines[1].startswith(f"--verify-metrics-address: cannot bind port {address.partition(':')[2]}")
        assert lines[2].startswith(f"--rest-address: {address} is also the address of --verify-metrics-address")
        assert lines[3].startswith("--device: 'gpu' is no device") and lines[4].startswith("--draft-device: 'cdua:1'")
        assert lines[5].startswith("--model: there is no model 'nosuch'")
        assert lines[6].startswith("--speculative-draft-model-path: there is no model 'none'")
        (tmp_path / "config.json").write_text("{}")
        assert main(["up", "--ephemeral", doors[0], f"--model={tmp_path}"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2 and "has no weights" in lines[1], "a folder is looked at, nothing is fetched"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        draft = ["--speculative-algorithm=EAGLE3,NGRAM", "--speculative-draft-model-path=none"]
        assert main(["up", "--ephemeral", doors[0], *draft]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2 and "there is no model 'none'" in lines[1], "a head inside rounds, n-grams beside"


def test_nothing_is_said_of_drafts_before_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--ephemeral", "--model=nosuch"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("outrider: error: --model: there is no model 'nosuch'")


def test_a_mistake_in_the_environment_is_told_by_the_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("OUTRIDER_MODEL", "nosuch"), ("OUTRIDER_DEVICE", "gpu")):
        monkeypatch.setenv(name, value)
    assert main(["up", "--ephemeral"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("outrider: error: OUTRIDER_DEVICE (environment): 'gpu' is no device")
    assert second.startswith("OUTRIDER_MODEL (environment): there is no model 'nosuch'")
    assert main(["up", "--ephemeral", "--model=other", "--device=cpu"]) == 2
    assert "error: --model: there is no model 'other'" in capsys.readouterr().err
    # Told only when it is fetched, which nothing is here.
    monkeypatch.setenv("OUTRIDER_MODEL", "owner/nosuch")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["up", "--ephemeral", "--device=cpu"]) == 2
    assert "error: OUTRIDER_MODEL (environment): owner/nosuch could not be fetched" in capsys.readouterr().err


def test_ways_to_other_ports_are_those_of_what_would_start(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        door = f"--rest-address=127.0.0.1:{taken.getsockname()[1]}"
        assert main(["up", "--ephemeral", door, "--model=nosuch"]) == 2
        error = capsys.readouterr().err.removeprefix("outrider: error: ")
    assert "cannot bind" in error and "add --ephemeral" not in error
    ways = "\nFor free ports add --ephemeral."
    assert port_hint(error, [], parse()) == ways and port_hint(error, [], parse("--ephemeral")) == ""
    assert port_hint(error, [], parse(door)) == "", "that port would stay as it is"
    assert port_hint(error, ["verify"], parse()).startswith(f"{ways}\nTo choose ports: --verify-address, ")


def test_a_context_that_the_model_has_not_is_told_with_the_other_mistakes(
    capsys: pytest.CaptureFixture[str], model_path: Path
) -> None:
    wrong = ["--device=gpu", f"--model={model_path}"]
    assert main(["up", "--ephemeral", *wrong, "--context-length=999999"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("outrider: error: --device: 'gpu'"), lines
    limit = read_json(model_path / "config.json")["max_position_embeddings"]
    assert lines[1] == (
        f"--context-length: 999999 is over the {limit} positions of the model (max_position_embeddings in its "
        "config.json); lower it, or leave it out to have them all"
    )
    assert main(["up", "--ephemeral", *wrong, "--context-length=512", "--max-total-tokens=512"]) == 2
    assert "--context-length: 512 is over the 433 tokens that the KV cache has room for" in capsys.readouterr().err


CONTRADICTIONS = [
    (["--deterministic", "--attention-backend=flashinfer"], "--attention-backend: flashinfer has no deterministic"),
    (["--deterministic", "--attention-backend=mixed"], "--attention-backend: flashinfer has no deterministic mode"),
    (["--kv-cache-dtype=fp8_e4m3", "--attention-backend=flashinfer"], "--kv-cache-dtype: fp8_e4m3 needs a GPU and"),
    (["--kv-cache-dtype=fp8_e4m3", "--device=cpu"], "--kv-cache-dtype: fp8_e4m3 needs a GPU and"),
    (["--deterministic", "--accept-threshold-acc=0.5"], "--deterministic: lossy acceptance depends on what is drafted"),
    (
        ["--tensor-parallel-size=3", "--attention-backend=mixed"],
        "--attention-backend: ranks need triton",
    ),
    (
        ["--attention-backend=flashinfer", "--dtype=float32"],
        "--attention-backend: flashinfer runs bfloat16",
    ),
    (["--device=tpu"], "--device: 'tpu' is no device"),
]


@pytest.mark.parametrize(("wrong", "text"), CONTRADICTIONS)
def test_options_that_contradict_each_other_are_refused_alike_by_all_that_take_them(
    wrong: list[str], text: str, capsys: pytest.CaptureFixture[str], model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    model = f"--model={model_path}"
    lines = []
    for command in (["up", "--ephemeral"], ["plan"]):
        assert main([*command, model, *wrong]) == 2
        lines.append(next(line for line in capsys.readouterr().err.splitlines() if text in line))
    main(["doctor", "--json", "--skip-models", model, *wrong])
    found = [one["text"] for one in json.loads(capsys.readouterr().out)["findings"] if one["level"] == "problem"]
    assert [line.removeprefix("outrider: error: ") for line in lines] == 2 * [next(one for one in found if text in one)]
    with pytest.raises(ConfigError, match=re.escape(text)):
        parse_options(VerifyOptions, [model, *wrong], env={}).check()


def test_a_size_that_the_target_cannot_be_divided_by_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    wrong = [f"--model={model_path}", "--tensor-parallel-size=2"]
    for command in (["up", "--ephemeral"], ["plan"]):
        assert main([*command, *wrong]) == 2
        assert "--tensor-parallel-size: num_attention_heads 9 cannot be divided among 2" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert main(["up", "--ephemeral", f"--model={model_path}", "--tensor-parallel-size=3"]) == 2
    message = "--tensor-parallel-size: 3 ranks from --device auto on need 3 GPUs; this machine has 2 GPUs"
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for visible, flag, message in (("", "--device=cuda:9", "has no GPU"), ("0", "--draft-device=cuda:1", "has 1 GPU,")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert main(["up", "--ephemeral", f"--model={model_path}", flag]) == 2
        assert f"{flag.replace('=', ': ')} does not exist; this machine {message}" in capsys.readouterr().err


def test_a_draft_service_s_own_options_are_named_as_the_user_spells_them(
    capsys: pytest.CaptureFixture[str], model_path: Path
) -> None:
    wrong = ["--draft-placement=remote", "--draft-device=gpu"]
    assert main(["up", "--ephemeral", f"--model={model_path}", *wrong]) == 2
    assert "error: --draft-device: 'gpu' is no device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--verify-engine-cpus=abc", "--verify-engine-cpus: 'abc' is no list of cores"),
        ("--draft-engine-cpus=99999", "--draft-engine-cpus: '99999' names core 99999"),
        (
            "--rest-address=unix:/tmp/x",
            "--rest-address: 'unix:/tmp/x' is not an address; use host:port with a port from",
        ),
        ("--verify-metrics-address=unix:/tmp/x", "--verify-metrics-address: 'unix:/tmp/x' is not an address"),
        (
            f"--gateway-address=127.0.0.1:{'9' * 5000}",
            "is not an address; use host:port with a port from 0 to 65535, or",
        ),
        ("--max-total-tokens=99999999999999999999", "is above the maximum 2147483647; use 2147483647 or less"),
        ("--served-model-name=\udcff", "the command line: '--served-model-name=\\udcff' is not UTF-8"),
    ],
)
def test_what_a_service_could_not_use_is_one_line(
    wrong: str, message: str, capsys: pytest.CaptureFixture[str], model_path: Path
) -> None:
    assert main(["up", "--ephemeral", f"--model={model_path}", "--draft-placement=remote", wrong]) == 2
    (line, *_) = capsys.readouterr().err.splitlines()
    assert line.startswith("outrider: error: ") and message in line


def test_a_token_map_of_another_kind_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], model_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "map.pt").write_bytes(b"")
    words = ["--draft-placement=remote", "--speculative-algorithm=STANDALONE", f"--model={model_path}"]
    words += [f"--speculative-draft-model-path={model_path}", f"--speculative-token-map={tmp_path}/map.pt"]
    assert main(["up", "--ephemeral", *words]) == 2
    assert "must be .json or .safetensors; for a .pt file: outrider convert" in capsys.readouterr().err


def test_an_empty_address_of_a_gateway_starts_no_services(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--connect", ""]) == 2
    assert "--connect: '' is not an address" in capsys.readouterr().err


def test_a_context_without_room_for_an_answer_is_refused_as_such(
    capsys: pytest.CaptureFixture[str], model_path: Path
) -> None:
    assert main(["up", "--ephemeral", f"--model={model_path}", "--context-length=1"]) == 2
    assert "--context-length: 1 leaves no room for a prompt and an answer; use 2 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("placement", "gpus", "names"),
    [("remote", "", "STANDALONE"), ("colocated", "", "STANDALONE"), ("colocated", "0", "STANDALONE,NGRAM")],
)
def test_a_token_map_that_is_not_there_is_told_before_anything_starts(
    placement: str,
    gpus: str,
    names: str,
    capsys: pytest.CaptureFixture[str],
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    words = [f"--draft-placement={placement}", f"--speculative-algorithm={names}", f"--model={model_path}"]
    words += [f"--speculative-draft-model-path={model_path}", "--speculative-token-map=none.json"]
    assert main(["up", "--ephemeral", *words]) == 2
    assert "--speculative-token-map none.json: no such file" in capsys.readouterr().err


def test_a_local_model_s_config_is_checked_once(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Path] = []
    monkeypatch.setattr(options_module, "check_target", lambda folder, options: checked.append(folder))
    cluster = make_cluster(
        parse(f"--model={model_path}", "--draft-placement=remote"),
        make_console(color=False),
        lambda name, line: None,
        fixed_ports=False,
        supervise=False,
    )
    assert len(checked) == 1
    assert cluster.services == ["draft", "verify", "gateway"]


def test_a_draft_model_is_told_of_its_target_and_gets_a_gpu_of_its_own(tmp_path: Path) -> None:
    draft = DraftOptions(speculative_algorithm=("STANDALONE",), speculative_draft_model_path="X")
    placed = place_draft_model(draft, VerifyOptions(), tmp_path, gpus=2)
    assert (placed.target_model_path, placed.device) == (str(tmp_path), "cuda:1")
    assert place_draft_model(draft, VerifyOptions(), tmp_path, gpus=1).device == "auto"
    assert place_draft_model(draft, VerifyOptions(device="cpu"), tmp_path, gpus=2).device == "auto"
    given = replace(draft, target_model_path="there", device="cuda:0")
    assert place_draft_model(given, VerifyOptions(), tmp_path, gpus=2) == given


def test_a_mistake_is_named_as_the_user_spelled_it() -> None:
    with pytest.raises(ConfigError, match=r"^--verify-threads: '-3' is below"):
        parse_service_options(parse("--verify-threads=-3"), env={})
    with pytest.raises(ConfigError, match=r"^--match-type: 'DFS' is not one of BFS, PROB"):
        parse_service_options(parse("--match-type=DFS"), env={})


def test_the_environment_sets_only_what_is_meant_for_one_service_or_for_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    env = {"OUTRIDER_ADDRESS": "1.2.3.4:1", "OUTRIDER_MATCH_TYPE": "PROB", "OUTRIDER_LOG_LEVEL": "ERROR"}
    options = parse_service_options(parse(), env=env)
    assert options["draft"] == DraftOptions(match_type="PROB", log_level="ERROR")
    assert options["gateway"] == GatewayOptions(log_level="ERROR")
    alike = parse_service_options(parse("--watchdog-timeout=60"), env={})
    assert alike == parse_service_options(parse(), env={"OUTRIDER_WATCHDOG_TIMEOUT": "60"})
    assert (alike["verify"], alike["draft"]) == (VerifyOptions(watchdog_timeout=60), DraftOptions(watchdog_timeout=60))
    warnings = capsys.readouterr().err.splitlines()
    flags = "--draft-address or --verify-address or --gateway-address"
    assert warnings == [f"outrider: warning: OUTRIDER_ADDRESS has no effect here; set {flags}"]


@pytest.mark.parametrize("command", ["up", "chat", "demo"])
def test_an_unknown_option_is_one_line_with_a_suggestion(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        make_parser().parse_args([command, "--mach-type=BFS"])
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["outrider: error: unknown option --mach-type; did you mean --match-type?; see --help"]
    with pytest.raises(SystemExit):
        main(["models", "list", "extra"])
    assert capsys.readouterr().err == "outrider: error: unexpected argument 'extra'; see --help\n"


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and all(f"\n    {command}" in captured.err for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        make_parser().parse_args([command, "--help"])
    assert stopped.value.code == 0
    assert COMMANDS[command] in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["up", "top", "plan"])
def test_ctrl_c_while_a_command_loads_is_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.cli.main._module", load)
    assert main([command]) == 130
    assert capsys.readouterr().err == "outrider: interrupted\n"


@pytest.mark.parametrize("command", ["up", "chat", "demo"])
def test_help_has_each_group_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args([command, "--help-all"])
    assert capsys.readouterr().out.count("all services:") == 1


def test_help_shows_what_people_need_and_help_all_shows_everything(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stopped:
            make_parser().parse_args(["up", flag])
        assert stopped.value.code == 0
        texts.append(capsys.readouterr().out)
    short, whole = (
        {word for line in text.splitlines() for word in re.findall(r"^  (--[\w-]+)", line)} for text in texts
    )
    people = {flag for flags in COMMON_FLAGS.values() for flag in flags}
    assert short == people | {"--no-color", "--ephemeral", "--help-all", "--draft-placement"} and len(people) == 20
    assert whole >= {flag.flag for flag in service_flags()} and "all services:" not in texts[0]
    # A service's own spelling of an option would not be found here; the services' addresses are no options of `up`.
    named = set(re.findall(r"(?<![\w/-])--[a-z][\w-]*", re.sub(r"-\n +", "-", texts[1])))
    assert named - whole == {"--help", "--verify", "--draft"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b"[", r"--model: .*tokenizer_config\.json cannot be read"),
        ("chat_template.jinja", b"{% if", r"--model: /.*/chat_template.jinja: the chat template is not valid"),
        ("chat_template.jinja", b"\xff{{", r"--model: .*chat_template\.jinja cannot be read"),
    ],
)
def test_a_template_that_cannot_be_read_is_told_before_anything_starts(
    name: str, content: bytes, message: str, tmp_path: Path, model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The gateway would wait for a better one, and `outrider up` for the gateway.
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_path.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(content)
    assert main(["up", "--ephemeral", "--device=gpu", f"--model={folder}"]) == 2
    assert re.search(message, capsys.readouterr().err)
    other = ["--tokenizer", str(model_path)]
    assert main(["up", "--ephemeral", "--device=gpu", f"--model={folder}", *other]) == 2
    assert not re.search(message, capsys.readouterr().err)


def test_what_is_no_tokenizer_is_told_before_anything_starts(
    tmp_path: Path, model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in model_path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["up", "--ephemeral", f"--model={tmp_path}"]) == 2
    assert f"error: --model: {tmp_path}/tokenizer.json is not a tokenizer: " in capsys.readouterr().err


def test_another_model_s_tokenizer_is_told_before_anything_starts(
    tmp_path: Path, model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The gateway would wait for a verify service that has it.
    (tmp_path / "tokenizer.json").write_text((model_path / "tokenizer.json").read_text() + "\n")
    assert main(["up", "--ephemeral", f"--model={model_path}", f"--tokenizer={tmp_path}"]) == 2
    assert f"error: --tokenizer: the tokenizer.json of {tmp_path} is not that of the model" in capsys.readouterr().err


def test_weights_whose_download_broke_off_are_told_before_anything_starts(
    tmp_path: Path, model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in model_path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    weights = tmp_path / "model.safetensors"
    weights.unlink()
    with (model_path / "model.safetensors").open("rb") as whole:
        weights.write_bytes(whole.read(1 << 20))
    assert main(["up", "--ephemeral", f"--model={tmp_path}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and f"error: --model: {weights}: cannot be read as safetensors" in captured.err


def test_a_default_model_that_is_not_whole_is_made_anew_not_refused(
    tmp_path: Path, model_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models" / model_path.name
    folder.mkdir(parents=True)
    for file in model_path.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "model.safetensors").unlink()
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    # Where nothing can be fetched, the attempt shows that it was made.
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", ""), ("PIP_CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(name, value)
    assert main(["up", "--ephemeral"]) == 2
    assert "pip could not download" in capsys.readouterr().err
