from __future__ import annotations

import argparse
import json
import re
import shlex
import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest
import trustme

import outrider.cli.options as options_module
from outrider.cli.cluster import bind_again, link, place
from outrider.cli.flags import SHARED, service_flags
from outrider.cli.main import COMMANDS, main, make_parser
from outrider.cli.options import (
    PEOPLES,
    door_checks,
    find_faults,
    in_our_words,
    make_cluster,
    parse_service_options,
)
from outrider.cli.placement import place_draft_model
from outrider.cli.terminal import make_console
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
    words = in_our_words(shlex.split(line))
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
        assert len(lines) == 8 and lines[7].startswith("For free ports"), lines
        assert lines[0].startswith("outrider: error: --draft-metrics-address: 'nowhere' is not an address")
        assert lines[1].startswith(f"--verify-metrics-address: cannot bind port {address.partition(':')[2]}")
        assert lines[2].startswith(f"--rest-address: {address} is that of --verify-metrics-address")
        assert lines[3].startswith("--device: 'gpu' is no device") and lines[4].startswith("--draft-device: 'cdua:1'")
        assert lines[5].startswith("--model: there is no model 'nosuch'")
        assert lines[6].startswith("--speculative-draft-model-path: there is no model 'none'")
        (tmp_path / "config.json").write_text("{}")
        assert main(["up", "--ephemeral", doors[0], f"--model={tmp_path}"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 3 and "has no weights" in lines[1], "a folder is looked at, nothing is fetched"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        draft = ["--speculative-algorithm=EAGLE3,NGRAM", "--speculative-draft-model-path=none"]
        assert main(["up", "--ephemeral", doors[0], *draft]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 3 and "there is no model 'none'" in lines[1], "a head inside rounds, n-grams beside"


def test_a_key_file_that_cannot_be_read_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["up", "--ephemeral", f"--api-key-file={tmp_path}/none", "--model=nosuch"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert f"--api-key-file: {tmp_path}/none cannot be read" in lines[-1], lines


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


def test_what_the_gateway_and_tls_would_refuse_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for wrong, said in (
        (["--cors-origins=foo"], "--cors-origins: 'foo' is no origin"),
        (["--api-key-file=none"], "--api-key-file: none cannot be read"),
        (["--proxies=10.0.0.1/8"], "--proxies: 10.0.0.1/8 has host bits set"),
        (["--gateway-tls-cert=none", "--gateway-tls-key=none"], "--gateway-tls-cert: none cannot be read"),
        (["--verify-tls-key=x"], "--verify-tls-key: --verify-tls-cert is not set"),
        (["--gateway-verify-tls-cert=x"], "--gateway-verify-tls-cert: --gateway-verify-tls-key is not set"),
        (["--api-key=a b"], "--api-key holds a space"),
        (["--branch-length=12"], "--branch-length: 12 leaves no room behind a match of --max-match-window-size 12"),
        (["--tokenizer=none"], "--tokenizer: none has no tokenizer.json"),
        (["--gateway-tls-ca=x"], "--gateway-tls-ca: clients can show a certificate over TLS only; set --gateway-tls"),
    ):
        assert main(["up", "--ephemeral", "--draft-placement=remote", "--device=gpu", *wrong]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2 and lines[1].startswith(said), lines


def test_a_door_that_its_own_caller_could_not_open_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for wrong, said in (
        (
            ["--verify-auth-token=x"],
            "--verify-auth-token: the gateway .* set --gateway-verify-auth-token-file",
        ),
        (["--draft-auth-token=x"], "--draft-auth-token: the verify .* set --verify-draft-auth-token-file"),
        (["--verify-tls-cert=x", "--verify-tls-key=x"], "--verify-tls-cert: the gateway .*-verify-tls-ca, too"),
    ):
        assert main(["up", "--ephemeral", "--draft-placement=remote", "--device=gpu", *wrong]) == 2
        assert re.search(said, capsys.readouterr().err), said
    told = ["--verify-auth-token=x", "--gateway-verify-auth-token=x"]
    assert main(["up", "--ephemeral", "--draft-placement=remote", "--device=gpu", *told]) == 2
    assert "auth-token" not in capsys.readouterr().err


def test_both_ends_of_every_link_show_and_trust_certificates_and_tokens_or_neither(tmp_path: Path) -> None:
    """`up` would wait for them until its time is over."""
    files = issued_by(tmp_path)
    cert, ca = [f"--{{}}-tls-{word}={files[word]}" for word in ("cert", "key")], f"--{{}}-tls-ca={files['ca']}"

    def found(*words: str) -> list[str]:
        return find_faults(parse_service_options(parse(*words), env={}), gpus=0)

    def of(prefix: str, *words: str) -> list[str]:
        return [word.format(prefix) for word in words]

    for caller, peer in (("gateway", "verify"), ("verify", "draft")):
        way = f"{caller}-{peer}"
        assert found(*of(peer, *cert, ca), *of(way, ca, *cert)) == []
        assert found(*of(peer, *cert), *of(way, ca)) == []
        assert found(*of(peer, *cert, ca), *of(way, ca)) == [
            f"--{peer}-tls-ca: the {caller} service shows no certificate; set --{way}-tls-cert and --{way}-tls-key, too"
        ]
        assert found(*of(way, ca)) == [
            f"--{way}-tls-ca: the {peer} service has no certificate; set --{peer}-tls-cert and --{peer}-tls-key, too"
        ]
        assert found(*of(peer, *cert)) == [
            f"--{peer}-tls-cert: the {caller} service has nothing to trust there; set --{way}-tls-ca, too"
        ]
        assert found(f"--{peer}-auth-token=x", f"--{way}-auth-token=x") == []
        assert found(f"--{peer}-auth-token=x", f"--{way}-auth-token=y") == [
            f"--{way}-auth-token: the {peer} service takes the tokens of --{peer}-auth-token alone; give it one of them"
        ]


def test_certificates_that_the_other_end_of_a_link_would_not_take_are_told(tmp_path: Path) -> None:
    """`up` would wait for them until its time is over."""
    ours, others, elsewhere = (tmp_path / name for name in ("ours", "others", "elsewhere"))
    hosts = {ours: "localhost", others: "localhost", elsewhere: "example.org"}
    made = {folder: issued_by(folder, host) for folder, host in hosts.items()}

    def files(prefix: str, *words: str, of: Path) -> list[str]:
        return [f"--{prefix}-tls-{word}={made[of][word]}" for word in words]

    for caller, peer in (("gateway", "verify"), ("verify", "draft")):
        way = f"{caller}-{peer}"
        refusal = "would not take the certificate of"
        for door, trust, shown, said in (
            (ours, ours, ours, ""),
            (ours, others, ours, f"--{way}-tls-ca: the {caller} service {refusal} --{peer}-tls-cert: "),
            (ours, ours, others, f"--{peer}-tls-ca: the {peer} service {refusal} --{way}-tls-cert: "),
            (elsewhere, elsewhere, elsewhere, f"--{peer}-tls-name: the {caller} service {refusal} --{peer}-tls-cert: "),
        ):
            words = files(peer, "cert", "key", "ca", of=door)
            words += [*files(way, "ca", of=trust), *files(way, "cert", "key", of=shown)]
            found = find_faults(parse_service_options(parse(*words), env={}), gpus=0)
            assert len(found) == bool(said) and all(said in one for one in found), found
        assert find_faults(parse_service_options(parse(*words, f"--{peer}-tls-name=example.org"), env={}), gpus=0) == []
        words = [*files(peer, "cert", of=ours), *files(peer, "key", of=others), *files(way, "ca", of=ours)]
        (one,) = find_faults(parse_service_options(parse(*words), env={}), gpus=0)
        assert f"--{peer}-tls-cert and --{peer}-tls-key: " in one and "are no pair" in one


@pytest.mark.parametrize(
    ("begins", "ends", "reason"),
    [(None, -1, "certificate has expired"), (1, 2, "certificate is not yet valid")],
)
def test_a_certificate_out_of_its_time_is_to_be_renewed(
    tmp_path: Path, begins: int | None, ends: int, reason: str
) -> None:
    days = [None if at is None else datetime.now(UTC) + timedelta(days=at) for at in (begins, ends)]
    made = issued_by(tmp_path / "made", days=(days[0], days[1]))
    words = [
        *(f"--verify-tls-{word}={made[word]}" for word in ("cert", "key")),
        f"--gateway-verify-tls-ca={made['ca']}",
    ]
    (found,) = find_faults(parse_service_options(parse(*words), env={}), gpus=0)
    assert found == (
        "--verify-tls-cert: the gateway service would not take the certificate of --verify-tls-cert: "
        f"{reason}; renew it, or set the clock right"
    )


def issued_by(
    folder: Path, host: str = "localhost", days: tuple[datetime | None, datetime | None] = (None, None)
) -> dict[str, Path]:
    """PEM files of a certificate, its key, and the certificate that signed it; `days`: its first and last, if given."""
    ca = trustme.CA()
    folder.mkdir(exist_ok=True)
    issued = ca.issue_cert(host, not_before=days[0], not_after=days[1])
    files = {"cert": issued.cert_chain_pems[0], "key": issued.private_key_pem, "ca": ca.cert_pem}
    for word, blob in files.items():
        (folder / word).write_bytes(blob.bytes())
        (folder / word).chmod(0o600)
    return {word: folder / word for word in files}


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


@pytest.mark.parametrize(("wrong", "said"), CONTRADICTIONS)
def test_options_that_contradict_each_other_are_refused_alike_by_all_that_take_them(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str], model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    model = f"--model={model_path}"
    lines = []
    for command in (["up", "--ephemeral"], ["plan"]):
        assert main([*command, model, *wrong]) == 2
        lines.append(next(line for line in capsys.readouterr().err.splitlines() if said in line))
    main(["doctor", "--json", "--skip-models", model, *wrong])
    found = [one["text"] for one in json.loads(capsys.readouterr().out)["findings"] if one["level"] == "problem"]
    assert [line.removeprefix("outrider: error: ") for line in lines] == 2 * [next(one for one in found if said in one)]
    with pytest.raises(ConfigError, match=re.escape(said)):
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
    said = "--tensor-parallel-size: 3 ranks from --device auto on need 3 GPUs; this machine has 2 GPUs"
    assert said in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for visible, flag, said in (("", "--device=cuda:9", "has no GPU"), ("0", "--draft-device=cuda:1", "has 1 GPU,")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert main(["up", "--ephemeral", f"--model={model_path}", flag]) == 2
        assert f"{flag.replace('=', ': ')} is not there; this machine {said}" in capsys.readouterr().err


def test_a_draft_service_s_own_options_are_named_as_the_user_spells_them(
    capsys: pytest.CaptureFixture[str], model_path: Path
) -> None:
    wrong = ["--draft-placement=remote", "--draft-device=gpu"]
    assert main(["up", "--ephemeral", f"--model={model_path}", *wrong]) == 2
    assert "error: --draft-device: 'gpu' is no device" in capsys.readouterr().err


def test_a_socket_that_cannot_be_bound_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], model_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for name, said in (
        ("none/x", f"the folder {tmp_path}/none does not exist"),
        ("file", f"{tmp_path}/file exists and is not a socket"),
    ):
        assert main(["up", "--ephemeral", f"--model={model_path}", f"--verify-address=unix:{tmp_path}/{name}"]) == 2
        assert f"--verify-address: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
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
    wrong: str, said: str, capsys: pytest.CaptureFixture[str], model_path: Path
) -> None:
    assert main(["up", "--ephemeral", f"--model={model_path}", "--draft-placement=remote", wrong]) == 2
    (line, *_) = capsys.readouterr().err.splitlines()
    assert line.startswith("outrider: error: ") and said in line


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


@pytest.mark.parametrize("command", ["demo", "chat"])
def test_a_command_does_not_start_a_gateway_that_it_could_not_speak_to(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, model_path: Path
) -> None:
    files = issued_by(tmp_path)
    tls = [f"--gateway-tls-{word}={files[word]}" for word in ("cert", "key")]
    others = issued_by(tmp_path / "others")
    trusted, strange = (f"--connect-tls-ca={issued['ca']}" for issued in (files, others))
    named, foreign = (
        "--connect-tls-name=localhost",
        [f"--connect-tls-{word}={others[word]}" for word in ("cert", "key")],
    )
    for words, said in (
        (tls, "--connect-tls-ca: --gateway-tls-cert is set; name the"),
        ([trusted], "--connect-tls-ca: the gateway has no certificate"),
        ([*tls, trusted, f"--gateway-tls-ca={files['ca']}"], "--connect-tls-cert: --gateway-tls-ca asks for one"),
        ([*tls, trusted], "--connect-tls-name: this command would not take the certificate of --gateway-tls-cert: "),
        ([*tls, strange], "--connect-tls-ca: this command would not take the certificate of --gateway-tls-cert: "),
        ([*tls, trusted, named, f"--gateway-tls-ca={files['ca']}", *foreign], "--gateway-tls-ca: the gateway service"),
        ([*tls, "--connect-tls-ca=none"], "--connect-tls-ca: none cannot be read"),
    ):
        assert main([command, f"--model={model_path}", "--device=cpu", *words]) == 2
        assert said in capsys.readouterr().err


def test_a_context_without_room_for_an_answer_is_refused_as_such(
    capsys: pytest.CaptureFixture[str], model_path: Path
) -> None:
    assert main(["up", "--ephemeral", f"--model={model_path}", "--context-length=1"]) == 2
    assert "--context-length: 1 is no room for a prompt and an answer; use 2 or more" in capsys.readouterr().err


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
    assert warnings == [f"outrider: warning: OUTRIDER_ADDRESS changes nothing here; set {flags}"]


@pytest.mark.parametrize("command", ["up", "chat", "demo"])
def test_an_unknown_option_is_one_line_with_a_suggestion(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        make_parser().parse_args([command, "--mach-type=BFS"])
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["outrider: error: unknown option --mach-type; did you mean --match-type?; see --help"]
    with pytest.raises(SystemExit):
        main(["models", "list", "extra"])
    assert capsys.readouterr().err == "outrider: error: nothing takes 'extra' here; see --help\n"


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


def test_an_address_that_cannot_be_bound_is_refused_with_its_option() -> None:
    def check(*words: str, fixed_ports: bool = True) -> None:
        free = ["--ephemeral"] if not fixed_ports else []
        others = [f"--{name}=127.0.0.1:0" for name in ("gateway-address", "verify-metrics-address", "rest-address")]
        given = parse(*free, *others, "--draft-metrics-address=127.0.0.1:0", *words)
        for look in door_checks(parse_service_options(given, env={}), fixed_ports):
            look()

    check()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^--rest-address: cannot bind port {port} of 127.0.0.1"):
            check(f"--rest-address=127.0.0.1:{port}", fixed_ports=False)
    with pytest.raises(ConfigError, match=r"^--verify-address: 'nowhere' is not an address"):
        check("--verify-address=nowhere")
    with pytest.raises(ConfigError, match=r"^--gateway-address: 127.0.0.1:9 is that of --verify-metrics-address, too"):
        check("--verify-metrics-address=127.0.0.1:9", "--gateway-address=127.0.0.1:9")


def test_links_and_given_addresses_are_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("w")
    given = {"verify": VerifyOptions(address="0.0.0.0:7000", draft=("far:1",)), "gateway": GatewayOptions()}
    linked = link({name: place(name, options, folder, fixed_ports=True) for name, options in given.items()})
    assert linked["verify"].address == "0.0.0.0:7000"
    assert getattr(linked["verify"], "draft") == ("far:1",)  # noqa: B009
    assert getattr(linked["gateway"], "verify") == ("0.0.0.0:7000",)  # noqa: B009
    assert linked["gateway"].address == GatewayOptions().address


def test_a_restart_binds_what_was_bound() -> None:
    options = GatewayOptions(address="127.0.0.1:0", rest_address="127.0.0.1:0")
    again = bind_again(options, {"address": "127.0.0.1:5", "rest_address": "127.0.0.1:6", "metrics_address": ""})
    assert (again.address, getattr(again, "rest_address")) == ("127.0.0.1:5", "127.0.0.1:6")  # noqa: B009


def test_a_restarted_gateway_opens_no_second_door_where_rest_serves_its_metrics() -> None:
    options = GatewayOptions(rest_address="127.0.0.1:0", metrics_address="")
    again = bind_again(options, {"rest_address": "127.0.0.1:6", "metrics_address": "127.0.0.1:6"})
    assert again.metrics_address == ""


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
    people = {flag for flags in PEOPLES.values() for flag in flags}
    assert short == people | {"--no-color", "--ephemeral", "--help-all", "--draft-placement"} and len(people) == 20
    assert whole >= {flag.flag for flag in service_flags()} and "all services:" not in texts[0]


def test_host_and_port_are_answered_with_the_address_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--host", "0.0.0.0"]) == 2
    assert "--rest-address HOST:PORT for HTTP, --gateway-address HOST:PORT for gRPC" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tokenizer_config.json", b"[", r"--model: .*tokenizer_config\.json cannot be read"),
        ("chat_template.jinja", b"{% if", r"--model: the chat template is not valid"),
        ("chat_template.jinja", b"\xff{{", r"--model: .*chat_template\.jinja cannot be read"),
    ],
)
def test_a_template_that_cannot_be_read_is_told_before_anything_starts(
    name: str, content: bytes, told: str, tmp_path: Path, model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The gateway would wait for a better one, and `outrider up` for the gateway.
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_path.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(content)
    assert main(["up", "--ephemeral", "--device=gpu", f"--model={folder}"]) == 2
    assert re.search(told, capsys.readouterr().err)
    other = ["--tokenizer", str(model_path)]
    assert main(["up", "--ephemeral", "--device=gpu", f"--model={folder}", *other]) == 2
    assert not re.search(told, capsys.readouterr().err)
