"""compose.yaml says what it promises, for every profile, without an engine."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.cli.cluster import OPTION_TYPES
from outrider.config.base import parse_options
from outrider.config.service import door_tls, peer_tls

ROOT = Path(__file__).resolve().parents[2]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
OURS = {name: name.partition("-")[0] for name in SERVICES if name.partition("-")[0] in OPTION_TYPES}
PROFILES = {"cpu": "", "gpu1": "-gpu1", "gpu2": "-gpu2", "gpu-tp2": "-gpu-tp2"}
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


def by_default(value: object) -> str:
    """What a value is where no variable is set."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", str(value))


def environment(name: str) -> dict[str, str]:
    """What the container gets where no variable is set."""
    return {key: by_default(value) for key, value in SERVICES[name]["environment"].items()}


def test_each_profile_has_its_three_services_and_cpu_has_the_dashboards_too() -> None:
    for profile, suffix in PROFILES.items():
        members = {name for name, service in SERVICES.items() if profile in service["profiles"]}
        extra = {"prometheus", "grafana"} if profile == "cpu" else {"namespaces"}
        assert members == {f"gateway{suffix}", f"verify{suffix}", f"draft{suffix}"} | extra
    observers = {name for name, service in SERVICES.items() if "observability" in service["profiles"]}
    assert observers == {"prometheus", "grafana"}


@pytest.mark.parametrize("name", SERVICES)
def test_no_container_has_rights_that_it_does_not_need(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "user", "devices"} & service.keys()
    if name in OURS:
        stage = DOCKERFILE.split(f" AS {OURS[name]}\n")[1].split("\nFROM ")[0]
        assert "\nUSER outrider\n" in stage


def test_only_the_gateway_and_the_dashboards_are_published_and_on_loopback() -> None:
    published = {name: service.get("ports", []) for name, service in SERVICES.items()}
    assert {name for name, ports in published.items() if ports} == {
        "gateway",
        "gateway-gpu1",
        "gateway-gpu2",
        "gateway-gpu-tp2",
        "grafana",
    }
    for ports in published.values():
        for port in ports:
            assert re.match(r"\$\{OUTRIDER_(GRAFANA_)?BIND:-127\.0\.0\.1\}:", port)


@pytest.mark.parametrize("suffix", PROFILES.values())
def test_the_gateway_waits_for_a_healthy_verify_but_only_for_a_started_draft(suffix: str) -> None:
    assert SERVICES[f"gateway{suffix}"]["depends_on"] == {
        f"verify{suffix}": {"condition": "service_healthy"},
        f"draft{suffix}": {"condition": "service_started"},
    }


@pytest.mark.parametrize("suffix", PROFILES.values())
def test_services_find_all_replicas_of_each_other_by_name(suffix: str) -> None:
    for name, peer, port in (("gateway", "verify", 50052), ("verify", "draft", 50053)):
        kind = OPTION_TYPES[name]
        addresses = getattr(parse_options(kind, [], env=environment(f"{name}{suffix}")), peer)
        assert addresses == (f"dns:///{peer}:{port}",)
        assert SERVICES[f"{peer}{suffix}"]["networks"]["inner"]["aliases"] == [peer]


@pytest.mark.parametrize("name", OURS)
def test_a_service_is_given_longer_to_end_than_it_takes_to_drain(name: str) -> None:
    options = parse_options(OPTION_TYPES[OURS[name]], [], env=environment(name))
    grace = by_default(SERVICES[name]["stop_grace_period"])
    assert float(grace.removesuffix("s")) >= options.drain_seconds + 10


@pytest.mark.parametrize("name", OURS)
def test_what_the_containers_are_told_are_options_of_their_service(name: str) -> None:
    kind = OPTION_TYPES[OURS[name]]
    known = {f"OUTRIDER_{field.upper()}" for field in kind.__dataclass_fields__}
    assert set(environment(name)) <= known


@pytest.mark.parametrize("name", OURS)
def test_any_option_can_be_given_in_a_file_and_none_is_by_default(name: str) -> None:
    (file,) = SERVICES[name]["env_file"]
    assert file == f"${{OUTRIDER_OPTIONS:-./docker/options}}/{OURS[name]}.env"
    lines = (ROOT / "docker" / "options" / f"{OURS[name]}.env").read_text().splitlines()
    example = lines[0].rpartition(" ")[2]
    assert all(line.startswith("#") for line in lines)
    field, _, value = example.removeprefix("OUTRIDER_").lower().partition("=")
    assert str(getattr(parse_options(OPTION_TYPES[OURS[name]], [], env=dict([example.split("=")])), field)) != ""
    assert value and f"OUTRIDER_{field.upper()}" not in environment(name)


def test_with_tls_every_door_has_it_and_each_end_between_services_shows_a_certificate() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.tls.yaml").read_text())["services"]
    assert services.keys() == OURS.keys()
    for name, service in services.items():
        role, env = OURS[name], service["environment"]
        assert [by_default(volume) for volume in service["volumes"]] == ["./docker/secrets/tls:/run/tls:ro"]
        health = {key: env[key] for key in env if key.startswith("OUTRIDER_HEALTH_")}
        options: Any = parse_options(
            OPTION_TYPES[role], [], env={**environment(name), **{k: v for k, v in env.items() if k not in health}}
        )
        door = door_tls(options)
        assert door is not None and (door.cert, door.key) == (f"/run/tls/{role}.pem", f"/run/tls/{role}.key")
        assert bool(door.ca) == (role != "gateway") and health["OUTRIDER_HEALTH_TLS_CA"] == "/run/tls/ca.pem"
        # A door that asks for certificates asks its own health check, too.
        assert health.get("OUTRIDER_HEALTH_TLS_CERT", "") == (door.cert if door.ca else "")
        for peer in {"gateway": ["verify"], "verify": ["draft"], "draft": []}[role]:
            way = peer_tls(options, peer)
            assert way is not None and (way.cert, way.key, way.ca) == (door.cert, door.key, "/run/tls/ca.pem")
            assert way.name == peer


@pytest.mark.parametrize("file", ["compose.secrets.yaml", "compose.hub.yaml"])
def test_secrets_are_files_for_services_that_there_are(file: str) -> None:
    content = yaml.safe_load((ROOT / "docker" / file).read_text())
    for name, service in content["services"].items():
        known = {f"OUTRIDER_{field.upper()}" for field in OPTION_TYPES[OURS[name]].__dataclass_fields__}
        for variable, path in service["environment"].items():
            assert variable in known | {"HF_TOKEN_PATH"}
            assert path.removeprefix("/run/secrets/") in service["secrets"]
    assert all(set(secret) == {"file"} for secret in content["secrets"].values())


@pytest.mark.parametrize("suffix", ["-gpu1", "-gpu2", "-gpu-tp2"])
def test_draft_and_verify_share_what_cuda_ipc_needs_and_each_outlives_the_other(suffix: str) -> None:
    for name in (f"verify{suffix}", f"draft{suffix}"):
        assert SERVICES[name]["ipc"] == SERVICES[name]["pid"] == "service:namespaces"
    assert SERVICES["namespaces"]["ipc"] == "shareable"


def test_device_ids_come_from_variables() -> None:
    def device(name: str) -> str:
        (found,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        return str(found["device_ids"])

    assert device("verify-gpu2") == "['${OUTRIDER_VERIFY_GPU:-0}']"
    assert device("draft-gpu2") == "['${OUTRIDER_DRAFT_GPU:-1}']"
    assert device("verify-gpu-tp2") == "['${OUTRIDER_VERIFY_GPU:-0}', '${OUTRIDER_VERIFY_GPU2:-1}']"
    assert environment("verify-gpu-tp2")["OUTRIDER_TENSOR_PARALLEL_SIZE"] == "2"
    assert device("verify-gpu1") == device("verify-gpu2") and "deploy" not in SERVICES["draft-gpu1"]


def test_images_of_a_checkout_under_a_strict_umask_can_be_read_by_their_user(tmp_path: Path) -> None:
    commands = re.findall(r"&& (find /opt/outrider .*)", DOCKERFILE)
    assert len(commands) == len(OPTION_TYPES) and len(set(commands)) == 1
    inner = tmp_path / "package" / "inner"
    inner.mkdir(parents=True)
    file = inner / "module.py"
    file.touch(0o600)
    for folder in (inner, inner.parent):
        folder.chmod(0o700)
    words = shlex.split(commands[0].replace("/opt/outrider", str(tmp_path)))
    subprocess.run(words, check=True, timeout=60)
    assert [path.stat().st_mode & 0o777 for path in (inner.parent, inner, file)] == [0o755, 0o755, 0o644]


def test_the_guide_names_every_option_that_compose_sets_without_a_variable() -> None:
    guide = (ROOT / "docs" / "deploy.md").read_text()
    found = re.search(r"; nor have ([^.]*), which `compose.yaml` sets", guide)
    assert found is not None
    named = set(re.findall(r"`(OUTRIDER_\w+)`", found[1]))
    table = set(re.findall(r"`(OUTRIDER_\w+)`", "".join(line for line in guide.splitlines() if line.startswith("|"))))
    given = [(key, str(value)) for name in OURS for key, value in SERVICES[name]["environment"].items()]
    variable = {key for key, value in given if table & set(re.findall(r"\$\{(\w+)", value))}
    assert {key for key, _ in given} <= variable | named
    assert named <= {key for key, _ in given} - table


def test_every_variable_is_in_the_deployment_guide() -> None:
    guide = (ROOT / "docs" / "deploy.md").read_text()
    files = [ROOT / "compose.yaml", *(ROOT / "docker").glob("compose.*.yaml")]
    variables = {name for file in files for name in re.findall(r"\$\{(\w+)", file.read_text())}
    assert sorted(name for name in variables if f"`{name}`" not in guide) == []
