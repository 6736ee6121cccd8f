"""The CPU profile on a real engine: it answers, survives its draft, is closed where it should be, and is measured."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from exported import asked
from stack import OURS, SERVICES, Stack, engine_reason, run, torch_source, wait_until
from test_monitoring import expressions

from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3600)]

LIST = "Repeat this list three times:\n- red apples\n- brown eggs\n- rye bread\n- fresh milk\n- honey\n- salt"
MODEL = "SmolLM2-135M-Instruct"
API_KEY = "a-key-of-the-test"
IMAGES = {f"OUTRIDER_{name.upper()}_IMAGE": f"outrider-test-{name}" for name in OURS}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if reason := engine_reason():
        pytest.skip(reason)
    models, keys, options = (tmp_path_factory.mktemp(name) for name in ("models", "secrets", "options"))
    for name, text in (("api_key", API_KEY), ("service_token", "a-token-of-the-test")):
        (keys / name).write_text(f"{text}\n")
    for name, text in (("gateway", "OUTRIDER_ALLOWED_HOSTS=llm.example.org"), ("verify", ""), ("draft", "")):
        (options / f"{name}.env").write_text(f"{text}\n")
    # Greedy text is compared: in float32 it does not depend on the draft in any bit.
    env = {**IMAGES, "OUTRIDER_DTYPE": "float32", "OUTRIDER_MAX_TOTAL_TOKENS": "8192"}
    env |= {"OUTRIDER_MODELS": str(models), "OUTRIDER_SECRETS": str(keys), "OUTRIDER_OPTIONS": str(options)}
    with torch_source(tmp_path_factory.mktemp("wheels")) as source:
        running = Stack({**env, **source})
        try:
            running.up()
            yield running
        finally:
            running.down()


def request(max_tokens: int) -> gateway_pb2.GatewayServiceGenerateRequest:
    return gateway_pb2.GatewayServiceGenerateRequest(
        chat=gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role="user", content=LIST)]),
        sampling=common_pb2.SamplingParams(temperature=0),
        max_tokens=max_tokens,
        ignore_eos=True,
    )


def by_grpc(stack: Stack, max_tokens: int) -> Iterator[Any]:
    """The messages of one answer."""
    with grpc.insecure_channel(stack.published("gateway", 50051)) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        metadata = (("authorization", f"Bearer {API_KEY}"),)
        yield from stub.Generate(request(max_tokens), timeout=300, metadata=metadata)


def text_of(messages: Iterator[Any]) -> str:
    return "".join(message.text for message in messages)


def by_http(stack: Stack, path: str, body: dict[str, Any] | None = None, key: str = API_KEY) -> bytes:
    """What the REST door answers."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    call = urllib.request.Request(f"http://{stack.published('gateway', 8000)}{path}", data, headers)
    with urllib.request.urlopen(call, timeout=300) as response:
        content: bytes = response.read()
    return content


def by_rest(stack: Stack, max_tokens: int) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": LIST}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    answer = json.loads(by_http(stack, "/v1/chat/completions", body))
    assert isinstance(answer, dict)
    return answer


def counted(stack: Stack) -> float:
    """Generated tokens as the gateway's own page has them."""
    lines = by_http(stack, "/metrics").decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))


def test_both_doors_answer_with_the_same_text(stack: Stack) -> None:
    answer = by_rest(stack, 32)
    assert answer["usage"]["completion_tokens"] == 32
    assert text_of(by_grpc(stack, 32)) == answer["choices"][0]["message"]["content"] != ""


def test_without_the_secrets_no_door_opens(stack: Stack) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        by_http(stack, "/v1/models", key="another")
    with refused.value as answer:
        assert answer.code == 401
    call = "from outrider.v1 import verify_pb2 as m, verify_pb2_grpc as s; import grpc; "
    call += "s.VerifyServiceStub(grpc.insecure_channel('verify:50052')).GetInfo(m.VerifyServiceGetInfoRequest())"
    with pytest.raises(AssertionError, match="UNAUTHENTICATED"):
        stack.inside("draft", "python", "-c", call)
    for name in OURS:
        assert "of-the-test" not in json.dumps(stack.inspect(name)["Config"])


def test_options_of_a_file_reach_their_service(stack: Stack) -> None:
    url = f"http://{stack.published('gateway', 8000)}/v1/models"
    for host, code in (("llm.example.org", 200), ("elsewhere.example.org", 421)):
        call = urllib.request.Request(url, headers={"Host": host, "Authorization": f"Bearer {API_KEY}"})
        try:
            with urllib.request.urlopen(call, timeout=60) as response:
                assert response.status == code
        except urllib.error.HTTPError as refused:
            with refused:
                assert refused.code == code


def test_the_services_call_themselves_healthy(stack: Stack) -> None:
    for name in OURS:
        wait_until(lambda name=name: stack.health(name) == "healthy", f"{name} is healthy")  # type: ignore[misc]


@pytest.mark.parametrize("name", SERVICES)
def test_no_container_can_do_what_it_need_not(stack: Stack, name: str) -> None:
    host = stack.inspect(name)["HostConfig"]
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["Privileged"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    status = dict(line.split(":", 1) for line in stack.inside(name, "cat", "/proc/1/status").splitlines())
    assert "0" not in status["Uid"].split() and "0" not in status["Gid"].split()
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0 and status["NoNewPrivs"].strip() == "1"
    stack.inside(name, "sh", "-c", "! touch /etc/written && ! touch /opt/written && touch /tmp/written")


def test_only_the_gateway_can_be_reached_from_outside_and_on_loopback_alone(stack: Stack) -> None:
    for name in SERVICES:
        ports = stack.inspect(name)["NetworkSettings"]["Ports"]
        bound = {port: [entry["HostIp"] for entry in entries] for port, entries in ports.items() if entries}
        expected = {"8000/tcp": ["127.0.0.1"], "50051/tcp": ["127.0.0.1"]} if name == "gateway" else {}
        assert bound == expected, name


def test_the_gateway_s_image_has_no_torch_and_no_other_service(stack: Stack) -> None:
    for module in ("torch", "kernels", "verify_service", "draft_service", "pip"):
        command = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is not None)"
        stack.inside("gateway", "python", "-c", command)
    size, base = (
        int(run("docker", "image", "inspect", image, "--format", "{{.Size}}"))
        for image in (IMAGES["OUTRIDER_GATEWAY_IMAGE"], "python:3.11-slim-bookworm")
    )
    assert size - base < 200_000_000


def test_an_answer_goes_on_when_its_draft_is_killed_and_speculation_comes_back(stack: Stack) -> None:
    undisturbed = text_of(by_grpc(stack, 150))
    messages, text, killed = by_grpc(stack, 150), "", False
    for message in messages:
        text += message.text
        if not killed and len(text) > 40:
            run("docker", "kill", "--signal", "KILL", stack.container("draft"))
            killed = True
    assert killed and text == undisturbed
    assert not stack.inspect("draft")["State"]["Running"]
    assert text_of(by_grpc(stack, 16)) and stack.health("gateway") == "healthy"
    wait_until(lambda: stack.value("sum(outrider_verify_healthy_drafts)") == 0, "Prometheus sees the draft's loss")
    wait_until(lambda: stack.value('up{job="draft"}') != 1, "Prometheus does not reach the draft")
    stack.compose("start", "draft")
    wait_until(lambda: stack.value("sum(outrider_verify_healthy_drafts)") == 1, "Prometheus sees the draft again")
    answer = by_rest(stack, 150)
    assert answer["usage"]["outrider"]["accepted_tokens"] > 0
    assert answer["choices"][0]["message"]["content"] == undisturbed


def test_both_engines_meet_on_a_line_in_the_volume_that_they_share(stack: Stack) -> None:
    assert "its engine is spoken to directly" in run("sh", "-c", f"docker logs {stack.container('verify')} 2>&1")
    sockets = stack.inside("draft", "ls", "/var/cache/outrider").split()
    assert len([name for name in sockets if name.startswith("outrider-")]) == 1


def test_prometheus_has_the_figures_of_what_was_served(stack: Stack) -> None:
    before = counted(stack)
    assert by_rest(stack, 24)["usage"]["completion_tokens"] == 24
    assert counted(stack) == before + 24
    wait_until(lambda: stack.value("sum(vllm:generation_tokens_total)") == before + 24, "Prometheus has the tokens")
    assert stack.value('sum(up{job=~"gateway|verify|draft"})') == 3
    assert stack.value("sum(outrider_verify_accepted_tokens_total)") > 0
    assert stack.value("sum(outrider_verify_fallback_rounds_total)") > 0
    assert stack.value("sum(outrider_draft_nodes_grown_total)") > 0


def test_prometheus_knows_every_name_of_the_dashboards_and_answers_every_expression(stack: Stack) -> None:
    names = set(stack.prometheus("label/__name__/values"))
    # Series with labels are there once something was counted under them.
    late = {"outrider_gateway_errors_total", "outrider_verify_declines_total"}
    for place, text in expressions().items():
        assert asked(text) - names - late == set(), place
        stack.prometheus("query", query=text.replace("$__rate_interval", "1m"))


def test_prometheus_watches_our_alerts(stack: Stack) -> None:
    groups = stack.prometheus("rules")["groups"]
    rules = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    assert "OutriderVerifyDown" in rules and set(rules.values()) <= {"ok", "unknown"}


def test_a_stopped_gateway_ends_its_answers_first(stack: Stack) -> None:
    messages = by_grpc(stack, 100)
    next(messages)
    stack.compose("stop", "gateway")
    assert list(messages)[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert stack.inspect("gateway")["State"]["ExitCode"] == 0
    stack.compose("stop", "verify", "draft")
    assert [stack.inspect(name)["State"]["ExitCode"] for name in ("verify", "draft")] == [0, 0]


def answers(stack: Stack) -> bool:
    """Whether the gateway has a verify service."""
    try:
        text_of(by_grpc(stack, 1))
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE
        return False
    return True


@pytest.mark.parametrize("profile", ["gpu1", "gpu2"])
def test_but_for_its_gpus_a_gpu_profile_runs_and_either_half_may_end_alone(
    stack: Stack, profile: str, tmp_path: Path
) -> None:
    stack.compose("stop", *OURS)
    twin = stack.without_gpus(profile, tmp_path)
    names = {name: twin.name(name) for name in OURS}
    try:
        twin.compose("up", "-d", *names.values(), minutes=20)
        wait_until(lambda: twin.health("gateway") == "healthy", "the gateway is healthy")
        text = text_of(by_grpc(twin, 24))
        for kind in ("ipc", "pid"):
            gateway, verify, draft = (twin.inside(name, "readlink", f"/proc/self/ns/{kind}") for name in OURS)
            assert verify == draft != gateway
        for name in ("draft", "verify"):
            run("docker", "kill", "--signal", "KILL", twin.container(name))
            if name == "draft":
                assert text_of(by_grpc(twin, 24)) == text
            twin.compose("start", names[name])
            wait_until(lambda name=name: twin.health(name) == "healthy", f"{name} is healthy")  # type: ignore[misc]
        # The engine says "healthy" of a moment ago; the gateway looks for its verify service every second or two.
        wait_until(lambda: answers(twin), "the gateway has found its verify service again")
        assert text_of(by_grpc(twin, 24)) == text
    finally:
        twin.compose("rm", "--stop", "--force", *names.values(), "namespaces", check=False)


def test_nothing_is_left_behind(stack: Stack) -> None:
    stack.down()
    for kind in (["ps", "-a"], ["volume", "ls"], ["network", "ls"]):
        listing = run("docker", *kind, "--format", "{{json .}}")
        assert stack.project not in listing
