from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from outrider.cli import placement
from outrider.cli.cluster import Cluster
from outrider.cli.main import main
from outrider.cli.terminal import make_console
from outrider.config.draft import DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import count_of
from outrider.models.drafters.kinds import shipped_head
from outrider.v1 import gateway_pb2_grpc
from outrider_tools.cli.doctor import _drafts, _place, running_clusters, show
from outrider_tools.doctor import Finding, Level, machine
from outrider_tools.doctor.machine import check_devices, check_disk, check_models, run_probe
from outrider_tools.doctor.services import (
    ServiceEndpoint,
    check_doors,
    check_exposure,
    check_services,
    listener_of,
)

pytestmark = pytest.mark.xdist_group("live")

ELSEWHERE = [f"--{name}-address=127.0.0.1:0" for name in ("gateway", "verify", "draft")]
ELSEWHERE += ["--rest-address=127.0.0.1:0", "--verify-metrics-address=", "--draft-metrics-address="]


@pytest.fixture(scope="module", autouse=True)
def probes() -> Iterator[None]:
    """Start the process that looks at torch, GPUs and models once for each model and draft that it is asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "run_probe", cache(run_probe))
        yield


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, str]]]:
    code = main(["doctor", "--json", *words])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (code == 0)
    return code, report["findings"]


def of(findings: list[dict[str, str]], check: str) -> list[tuple[str, str]]:
    return [(found["level"], found["text"]) for found in findings if found["check"] == check]


def words(findings: list[Finding], level: Level) -> str:
    return "\n".join(f"{found.check}: {found.text} -> {found.fix}" for found in findings if found.level is level)


def test_running_services_are_asked_and_measured(live: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    addresses = [f"--{name}-address={live.address(name)}" for name in ("gateway", "verify", "draft")]
    rest = f"--rest-address={live.address('gateway', 'rest_address')}"
    code, found = doctor(capsys, "--skip-models", "--running", *ELSEWHERE, *addresses, rest)
    assert code == 0, found
    assert of(found, "gateway") == [("ok", f"{live.gateway_address}: serves tiny (context 256)")]
    ((level, text),) = of(found, "verify")
    assert level == "ok" and "tiny, float32" in text and "1 healthy draft" in text and "drafts" not in text
    ((level, text),) = of(found, "draft")
    assert level == "ok" and "ngram" in text and "1 session, " in text
    assert len(of(found, "round trip")) == 3 and all("median" in text for _, text in of(found, "round trip"))
    rest_taken = ("ok", f"{rest.replace('=', ' ')}: taken by a running gateway, process {live.gateway.pid}")
    assert rest_taken in of(found, "port"), "the REST door has no gRPC health"
    assert sum("taken by a running" in text for _, text in of(found, "port")) == 4


def test_a_slow_round_trip_costs_a_miss_at_the_draft_alone(
    live: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("outrider_tools.doctor.services.SLOW_LOCAL_MS", 0.0)
    addresses = [f"--{name}-address={live.address(name)}" for name in ("gateway", "verify", "draft")]
    _, found = doctor(capsys, "--skip-models", "--running", *ELSEWHERE, *addresses)
    fixes = {one["text"].split()[0]: one["fix"] for one in found if one["check"] == "round trip"}
    assert fixes == {
        "gateway": "look at load and network",
        "verify": "look at load and network",
        "draft": "a miss costs a round trip: look at load and network",
    }


async def test_a_gateway_s_missing_key_is_told_by_its_name() -> None:
    class Refusing(gateway_pb2_grpc.GatewayServiceServicer):
        async def ListModels(self, request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong bearer token")

    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(Refusing(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    found, _ = await check_services([ServiceEndpoint("gateway", address)], True, 3.0)
    await server.stop(None)
    (finding,) = (one for one in found if one.check == "gateway")
    assert finding.fix == "set OUTRIDER_API_KEY or --api-key-file"


async def test_all_services_behind_a_name_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    named = ServiceEndpoint("verify", f"dns:///localhost:{port}")
    plain = ServiceEndpoint("verify", f"127.0.0.1:{port}")
    found, serving = await check_services([named, plain], True, 3.0)
    await server.stop(None)
    assert list(serving) == [plain.address] and "is a URL" not in str(found)

    async def unknown(host: str, port: int) -> tuple[str, ...]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("outrider_tools.doctor.services.look_up", unknown)
    for must_run, level in ((True, Level.PROBLEM), (False, Level.NOTE)):
        (finding,) = (await check_services([named], must_run, 3.0))[0]
        assert finding.level is level and "cannot be looked up: Name or service not known" in finding.text


def test_ports_that_a_running_service_has_are_not_free_for_another_one(
    live: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    doors = [f"--gateway-address={live.gateway_address}", f"--rest-address={live.address('gateway', 'rest_address')}"]
    _, found = doctor(capsys, "--skip-models", *doors)
    taken = [one for one in found if "taken by a running gateway" in one["text"]]
    assert [one["level"] for one in taken] == ["warning", "warning"]
    assert all("outrider up --ephemeral" in one["fix"] and "--running" in one["fix"] for one in taken)
    wrong = f"--verify-metrics-address={live.address('gateway', 'rest_address')}"
    code, found = doctor(capsys, "--skip-models", "--running", *ELSEWHERE, wrong)
    ((level, text),) = [one for one in of(found, "port") if one[1].startswith("--verify-metrics-address")]
    assert (code, level) == (1, "problem") and f"gateway of Outrider has it, process {live.gateway.pid}" in text


def test_no_draft_service_is_looked_for_where_verify_has_all_that_drafts(
    live: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    addresses = [f"--{name}-address={live.address(name)}" for name in ("gateway", "verify")]
    addresses += ["--rest-address=127.0.0.1:0", "--verify-metrics-address="]
    code, found = doctor(capsys, "--skip-models", "--running", "--draft-placement=colocated", *addresses)
    assert (code, of(found, "draft")) == (0, []), found
    asked = ["--draft-placement=colocated", "--draft=127.0.0.1:1"]
    code, found = doctor(capsys, "--skip-models", "--running", *asked, *addresses)
    assert (code, of(found, "draft")[0][0]) == (1, "problem"), "it was named"


def test_what_outrider_up_runs_is_found(
    live: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert running_clusters() == {}
    for folder, gateway in (("outrider-lives", live.gateway_address), ("outrider-was-killed", "127.0.0.1:1")):
        (tmp_path / folder).mkdir()
        for name in ("gateway", "verify", "draft"):
            address = gateway if name == "gateway" else live.address(name)
            rest = live.address("gateway", "rest_address") if name == "gateway" else ""
            addresses = {"address": address, "metrics_address": rest, "rest_address": rest}
            (tmp_path / folder / f"{name}.json").write_text(json.dumps(addresses))
    code, found = doctor(capsys, "--skip-models", "--running")
    assert of(found, "gateway") == [("ok", f"{live.gateway_address}: serves tiny (context 256)")]
    assert [level for name in ("verify", "draft") for level, _ in of(found, name)] == ["ok", "ok"], (code, found)
    assert "is --rest-address's too" not in str(found), "the door that has the metrics' page is no second one"
    ((level, text),) = of(found, "running")
    assert level == "ok" and f"in {tmp_path / 'outrider-lives'}: " in text
    assert f"gateway {live.gateway_address}" in text and f"verify {live.address('verify')}" in text
    (tmp_path / "outrider-lives" / "draft.json").unlink()
    _, found = doctor(capsys, "--skip-models", "--running")
    assert of(found, "draft") == [] and "--draft" not in str(found)
    code, found = doctor(capsys, "--running", "--model=nosuch")
    assert code == 0 and {"placement", "target", "draft model", "options"}.isdisjoint(one["check"] for one in found)
    assert of(found, "cpu"), "the machine is looked at; what these options would start does not run"
    _, found = doctor(capsys, "--skip-models")
    assert of(found, "gateway")[0][0] == "ok", "it runs, whether it must or not"
    assert of(found, "running")[0][0] == "ok", "nobody has named it"
    shutil.copytree(tmp_path / "outrider-lives", tmp_path / "outrider-lives-too")
    for folder, seconds in (("outrider-lives", 2**30), ("outrider-lives-too", 2**30 + 9)):
        os.utime(tmp_path / folder, (seconds, seconds))
    _, found = doctor(capsys, "--skip-models", "--running")
    ((level, text),) = of(found, "running")
    assert level == "note"
    assert text.startswith(f"2 clusters run here; this looks at the newest, in {tmp_path}/outrider-lives-too: ")
    assert text.endswith(f"; not at {tmp_path}/outrider-lives (gateway {live.gateway_address})")
    _, found = doctor(capsys, "--skip-models", *ELSEWHERE)
    assert of(found, "running") == [], "addresses were named"


def test_a_draft_service_that_up_would_not_run_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    doors = ["--gateway-address=127.0.0.1:0", "--rest-address=127.0.0.1:0", "--verify=127.0.0.1:1"]
    for cores, missed in ((2, 0), (8, 1)):
        monkeypatch.setattr(placement, "num_cores", lambda cores=cores: cores)
        code, found = doctor(capsys, "--skip-models", "--running", *doors)
        assert code == 1 and len(of(found, "draft")) == missed
        assert ("--draft-address" in str(found)) is bool(missed)


def test_what_up_would_refuse_is_a_problem_and_doors_that_nobody_named_are_not_looked_at(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    doors = ["--gateway-address=127.0.0.1:0", "--rest-address=127.0.0.1:0", "--draft-placement=remote"]
    code, found = doctor(capsys, "--skip-models", *doors, "--branch-length=12")
    assert (code, of(found, "verify"), of(found, "draft")) == (1, [], [])
    assert not [text for _, text in of(found, "port") if text.startswith(("--verify-address", "--draft-address"))]
    ((level, text),) = of(found, "options")
    assert level == "problem" and text.startswith("--branch-length: 12 leaves no room behind a match")
    _, found = doctor(capsys, "--skip-models", *doors, f"--verify-address=unix:{tmp_path}/verify.sock")
    assert of(found, "verify") == [("note", f"unix:{tmp_path}/verify.sock: does not run, or cannot be reached")]
    assert of(found, "draft") == []
    _, found = doctor(capsys, "--skip-models", "--running", *doors)
    assert of(found, "verify")[0][0] == of(found, "draft")[0][0] == "problem", "they should run there"


def test_a_model_that_is_not_there_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, *ELSEWHERE, "--verify=", "--draft=", "--model=nosuch", "--draft-placement=remote")
    assert (code, sum("there is no model 'nosuch'" in one["text"] for one in found)) == (1, 1), found


def test_a_file_that_several_checks_read_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, "--skip-models", *ELSEWHERE, "--verify=", "--draft=", "--api-key-file=/none")
    assert (code, sum("--api-key-file: /none cannot be read" in one["text"] for one in found)) == (1, 1), found


def test_services_that_should_run_and_do_not_are_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = ["--verify=127.0.0.1:1", "--draft="]
    code, found = doctor(capsys, "--skip-models", *ELSEWHERE, *nowhere)
    assert code == 0 and of(found, "verify") == [("note", "127.0.0.1:1: does not run, or cannot be reached")]
    code, found = doctor(capsys, "--skip-models", "--running", *ELSEWHERE, *nowhere)
    assert code == 1 and of(found, "verify")[0][0] == "problem"


def test_a_taken_port_and_who_has_it_are_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = {"gateway": GatewayOptions(address=f"127.0.0.1:{port}", rest_address="127.0.0.1:0")}
        text = words(list(check_doors(options, {})), Level.PROBLEM)
    assert f"--gateway-address 127.0.0.1:{port}: Address already in use; process " in text
    assert words(list(check_doors(options, {})), Level.PROBLEM) == ""


def test_who_has_a_port_is_told_by_its_address() -> None:
    listen = "import socket, sys; s = socket.create_server((sys.argv[1], int(sys.argv[2]))); print(flush=True); input()"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", listen, "127.0.0.2", str(port)], **pipes) as other:
            assert other.stdout is not None and other.stdin is not None and other.stdout.readline()
            holders = [listener_of(f"{host}:{port}") for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3")]
            everywhere = listener_of(f"0.0.0.0:{port}")
            other.stdin.close()
    assert holders == [os.getpid(), other.pid, 0]
    assert everywhere in holders[:2]
    with socket.create_server(("0.0.0.0", 0)) as taken:
        assert listener_of(f"127.0.0.3:{taken.getsockname()[1]}") == os.getpid()


def test_an_address_of_another_machine_is_not_looked_at_but_nothing_could_start_there() -> None:
    options = {"gateway": GatewayOptions(address="192.0.2.1:50051", rest_address="")}
    (finding,) = check_doors(options, {}, must_run=True)
    assert finding.level is Level.NOTE and "not an address of this machine" in finding.text
    (finding,) = check_doors(options, {})
    assert (finding.level, finding.fix) == (Level.PROBLEM, "use an address of this machine")


def test_a_running_service_without_the_door_that_was_named_is_a_problem(
    live: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as once:
        unused = f"127.0.0.1:{once.getsockname()[1]}"
    doors = [f"--{name}-address={live.address(name)}" for name in ("gateway", "verify", "draft")]
    code, found = doctor(capsys, "--skip-models", "--running", *ELSEWHERE, *doors, f"--rest-address={unused}")
    assert (code, of(found, "port")[-1]) == (1, ("problem", f"--rest-address {unused}: nobody listens there")), found


def test_a_name_whose_first_address_this_machine_lacks_is_free_where_a_service_could_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("192.0.2.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: hosts)
    options = {"gateway": GatewayOptions(address="localhost:0", rest_address="")}
    assert words(list(check_doors(options, {})), Level.PROBLEM) == ""


def test_one_port_for_two_doors_is_a_problem() -> None:
    options = {"gateway": GatewayOptions(address="127.0.0.1:4711", rest_address="127.0.0.1:4711")}
    assert "--rest-address 127.0.0.1:4711 is --gateway-address's too" in words(
        list(check_doors(options, {})), Level.PROBLEM
    )


def test_doors_that_others_can_reach_without_key_or_tls_are_warned_of(tmp_path: Path) -> None:
    key = tmp_path / "api.keys"
    key.write_text("secret\n")
    key.chmod(0o644)
    options = {
        "gateway": GatewayOptions(address="0.0.0.0:50051", api_key_file=key, tls_cert="c.pem", tls_key="c.key"),
        "verify": VerifyOptions(address="[::]:50052", metrics_address="0.0.0.0:9102"),
        "draft": DraftOptions(address="10.0.0.1:50053", auth_token="x"),
    }
    text = words(list(check_exposure(options)), Level.WARNING)
    assert "--gateway-address" not in text
    assert "--verify-address [::]:50052 can be reached from other machines without a key and without TLS" in text
    assert "-> set --verify-auth-token-file and --verify-tls-cert and --verify-tls-key (" in text
    assert "--draft-address 10.0.0.1:50053 can be reached from other machines without TLS" in text
    assert "--verify-metrics-address" in text
    assert f"{key} can be read by other users -> chmod 600" in text
    key.chmod(0o600)
    assert "chmod" not in words(list(check_exposure(options)), Level.WARNING)
    (fine,) = check_exposure({"gateway": GatewayOptions()})
    assert fine.level is Level.OK


def look(target: Path, draft: DraftOptions | None = None) -> str:
    """What the probe finds wrong, without a process of its own."""
    from outrider_tools.doctor.probe import check_models  # imports torch

    found = check_models(str(target), replace(draft, target_model_path=str(target)) if draft else None)
    return "\n".join(f"{one['check']}: {one['text']}" for one in found if one["level"] != "ok")


def test_a_head_of_another_target_is_refused_as_the_loader_refuses_it(tiny_model: Path) -> None:
    head = shipped_head("smollm2")
    assert head is not None
    options = DraftOptions(speculative_algorithm=("EAGLE3",), speculative_draft_model_path=str(head))
    assert f"{head}: the head takes features of hidden size 576, the target's is 32" in look(tiny_model, options)


def test_the_tokenizer_is_told_by_the_digest_that_verify_tells(tiny_model: Path) -> None:
    from outrider.models.store_folder import hash_tokenizer
    from outrider_tools.doctor.probe import check_models  # imports torch

    (target,) = check_models(str(tiny_model), None)
    assert target["text"].endswith(f", tokenizer {hash_tokenizer(tiny_model)[:12]}")


def test_another_tokenizer_is_refused_as_the_handshake_refuses_it(tiny_model: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(tiny_model, tmp_path / "draft")
    same = DraftOptions(speculative_algorithm=("STANDALONE",), speculative_draft_model_path=str(draft))
    assert look(tiny_model, same) == ""
    tokenizer = draft / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps(content) + "\n")
    assert look(tiny_model, same) == ""
    content["added_tokens"].append({"id": 300, "content": "<other>", "special": True})
    tokenizer.write_text(json.dumps(content))
    assert "handshake: hello.token_ids_hash: verify has" in look(tiny_model, same)


def test_a_target_without_a_tensor_is_told_before_weights_are_read(tiny_model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    assert "missing from the checkpoint" in look(broken)


def test_gpus_that_do_not_reach_each_other_and_full_ones_are_warned_of() -> None:
    gib = 2**30
    gpu = {"name": "H200", "capability": [9, 0], "free": 130 * gib, "total": 140 * gib}
    answer = {"torch": {"cuda": "13.0"}, "gpus": [gpu, gpu | {"free": gib}], "peers": [[True, False], [False, True]]}
    found = list(check_devices(answer, VerifyOptions(), DraftOptions()))
    assert "1: H200, 1.0 of 140.0 GiB free" in words(found, Level.WARNING)
    assert "no direct access between GPUs 0-1" in words(found, Level.WARNING)
    assert "0: H200" in words(found, Level.OK)
    found = list(check_devices(answer, VerifyOptions(tensor_parallel_size=2, device="cuda:1"), DraftOptions()))
    assert "--device cuda:1 with --tensor-parallel-size 2 needs 3 GPUs" in words(found, Level.PROBLEM)


@pytest.mark.parametrize(("capability", "fix"), [([8, 9], "written for Hopper"), ([7, 5], "try --device cpu")])
def test_gpus_of_other_generations_are_warned_of(capability: list[int], fix: str) -> None:
    gpu = {"name": "other", "capability": capability, "free": 1, "total": 1}
    answer = {"torch": {"cuda": "13.0"}, "gpus": [gpu], "peers": [[True]]}
    (found,) = (one for one in check_devices(answer, VerifyOptions(), DraftOptions()) if one.level is Level.WARNING)
    assert "0: other" in found.text and fix in found.fix


def test_a_gpu_that_is_asked_for_and_not_there_is_a_problem() -> None:
    cpu: dict[str, Any] = {"cuda": "", "version": "2", "machine": "x86_64", "cpu": "AVX2", "cpu_flags": ["avx2"]}
    cpu["cpu_dtype"] = ["float32", "it has no AVX"]
    answer: dict[str, Any] = {"torch": cpu, "gpus": [], "peers": []}
    found = list(check_devices(answer, VerifyOptions(device="cuda:1"), DraftOptions()))
    assert "torch sees none, and --device cuda:1 asks for one" in words(found, Level.PROBLEM)
    assert "it has no AVX" in words(found, Level.WARNING)
    cpu["cpu_dtype"] = ["bfloat16", "this CPU has AVX2"]
    found = list(check_devices(answer, VerifyOptions(), DraftOptions()))
    assert "models run in bfloat16 (this CPU has AVX2)" in words(found, Level.OK)


def test_a_cache_that_cannot_be_written_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "file" / "cache"))
    (found,) = check_disk()
    assert found.level is Level.PROBLEM and "OUTRIDER_HOME" in found.fix


def test_a_package_out_of_its_range_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["grpcio>=1", "numpy<1", "no-such-package>=2", "triton>=3 ; extra == 'cuda'"]
    monkeypatch.setattr(machine, "requires", lambda name: wanted)
    text = words(list(machine.check_packages()), Level.PROBLEM)
    assert "numpy is " in text and "no-such-package is not installed" in text
    assert "grpcio" not in text and "triton" not in text


def test_a_model_that_is_not_here_is_told_and_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    part = tmp_path / "models" / "SmolLM2-135M-Instruct"
    part.mkdir(parents=True)
    (part / "config.json").write_text("{}")  # the rest was lost: `outrider up` would fetch it anew
    for name in ("SmolLM2-135M-Instruct", "owner/name"):
        found = check_models(VerifyOptions(model=name), DraftOptions())
        assert f"{name} is not here yet -> outrider models pull {name}" in words(found, Level.WARNING)
        assert words(found, Level.PROBLEM) == "" and not (tmp_path / "empty").exists()
        assert "cpu: " in words(found, Level.OK) + words(found, Level.WARNING), "the process that looks has answered"


def test_lines_for_people_name_level_check_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--skip-models", *ELSEWHERE, "--verify=127.0.0.1:1", "--draft=", "--running"]) == 1
    out = capsys.readouterr().out
    assert "problem verify         127.0.0.1:1: " in out and "-> start it" in out and out.endswith("problem\n")


def test_the_draft_model_of_verify_s_rounds_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.cli.main import make_parser

    findings: list[Finding] = []
    draft = DraftOptions(speculative_algorithm=("EAGLE3", "NGRAM"), speculative_draft_model_path="head")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert make_parser().parse_args(["doctor"]).draft_placement == "auto"

    def place(draft: DraftOptions, where: str, **verify: Any) -> DraftOptions | None:
        placed = _place(VerifyOptions(**verify), draft, where, findings)
        return None if placed is None else _drafts(placed)

    found = place(draft, "auto", model="smollm2")
    assert found is not None and found.speculative_algorithm == ("EAGLE3", "NGRAM")
    assert found.speculative_draft_model_path == "head" and found.target_model_path == "smollm2"
    assert findings[0].level is Level.OK and "EAGLE3 drafts inside verify's rounds" in findings[0].text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(placement, "num_cores", lambda: 8)
    assert place(draft, "auto") == draft
    found = place(draft, "colocated")
    assert found is not None and found.speculative_algorithm == ("EAGLE3", "NGRAM")
    assert findings[-1].level is Level.OK and "EAGLE3, NGRAM drafts in verify's process" in findings[-1].text
    assert place(replace(draft, branch_length=20), "colocated") is None
    assert findings[-1].level is Level.PROBLEM and "--draft-placement" in findings[-1].text


@pytest.mark.parametrize("more", [(), ("--skip-models",)])
def test_a_placement_that_cannot_be_had_is_told_once(more: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--draft-placement=colocated", "--device=cpu", "--capacity=5000", "--speculative-algorithm=NGRAM"]
    assert main(["doctor", "--json", *ELSEWHERE, *words, *more]) == 1
    found = [one["text"] for one in json.loads(capsys.readouterr().out)["findings"] if one["level"] == "problem"]
    assert len([text for text in found if "--draft-placement: colocated has no draft service" in text]) == 1


def test_counts_of_one_are_singular(capsys: pytest.CaptureFixture[str]) -> None:
    show(make_console(color=False), [machine.ok("disk", "free"), machine.problem("port", "taken", "end it")])
    assert capsys.readouterr().out.endswith("1 ok, 0 notes, 0 warnings, 1 problem\n")
    assert (count_of(0, "entry", "entries"), count_of(1, "entry", "entries")) == ("0 entries", "1 entry")
