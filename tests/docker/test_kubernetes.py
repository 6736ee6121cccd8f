"""deploy/kubernetes is what Kubernetes takes, and fits the services, their images and their metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from exported import asked, exported
from kustomized import LOADER, Manifest, Manifests, documents, kustomized, named

from outrider.cli.cluster import OPTION_TYPES
from outrider.config.base import parse_options
from outrider.config.service import ServiceOptions
from outrider.rpc.peers import PeerAddresses

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
AUTOSCALING = FOLDER / "autoscaling"
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
VERSIONS = ("1.30", kubernetes_validate.latest_version())
PROFILES = {"base": "", "gpu1": "-gpu1", "gpu2": "-gpu2"}
"""Folders, and how the services of Compose's profile end."""


def everything(profile: str) -> Manifests:
    """A profile with all components."""
    found = kustomized(FOLDER / profile)
    for component in ("autoscaling", "secrets"):
        kustomized(FOLDER / component, found)
    return found


def pod(found: Manifests, name: str) -> Manifest:
    spec: Manifest = found["Deployment", name]["spec"]["template"]["spec"]
    return spec


def container(found: Manifests, name: str) -> Manifest:
    (only,) = pod(found, name)["containers"]
    return dict(only)


def environment(found: Manifests, name: str) -> dict[str, str]:
    """What the container's variables are, with limits of 4 CPUs."""
    config = found["ConfigMap", "outrider"]["data"]
    variables = {}
    for entry in container(found, name)["env"]:
        source = entry.get("valueFrom", {})
        assert ("value" in entry) != bool(source)
        if "configMapKeyRef" in source:
            variables[entry["name"]] = config[source["configMapKeyRef"]["key"]]
        else:
            variables[entry["name"]] = entry.get("value", "4")
    return variables


def options(found: Manifests, name: str) -> ServiceOptions:
    return parse_options(OPTION_TYPES[name], [], env=environment(found, name))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_object_fits_the_published_schema(profile: str, version: str) -> None:
    for one in everything(profile).values():
        kubernetes_validate.validate(one, version, strict=True)


def test_the_schemas_are_strict() -> None:
    broken = everything("base")["Deployment", "gateway"]
    broken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("profile", PROFILES)
def test_kustomize_makes_of_it_what_these_tests_look_at(profile: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    mine = tmp_path / "mine"
    mine.mkdir()
    text = {
        "resources": [f"../kubernetes/{profile}"],
        "components": ["../kubernetes/autoscaling", "../kubernetes/secrets"],
    }
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(text))
    command = ["kubectl", "kustomize", str(mine)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    made = {named(one): one for one in yaml.load_all(result.stdout, LOADER)}
    assert sorted_lists(made) == sorted_lists(everything(profile))


def sorted_lists(value: Any) -> Any:
    """Entries of a patch come first in kustomize's lists, and last in ours."""
    if isinstance(value, dict):
        return {key: sorted_lists(one) for key, one in value.items()}
    return (
        sorted(map(sorted_lists, value), key=partial(json.dumps, sort_keys=True)) if isinstance(value, list) else value
    )


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", OPTION_TYPES)
def test_what_containers_are_told_are_options_of_their_service_as_compose_tells_them(profile: str, name: str) -> None:
    variables = environment(everything(profile), name)
    assert set(variables) <= {f"OUTRIDER_{field.upper()}" for field in OPTION_TYPES[name].__dataclass_fields__}
    assert options(everything(profile), name)
    compose = COMPOSE[f"{name}{PROFILES[profile]}"]
    unlike = {key for key in variables if key not in compose["environment"]}
    assert unlike <= {key for key in variables if key.endswith("_FILE")} | {"OUTRIDER_THREADS", "OUTRIDER_DTYPE"}
    image = re.sub(r"\$\{\w+:-(.*)\}", r"\1", compose["image"])
    # Compose has one image for what shares its namespaces; n-grams alone need no GPU's.
    assert container(everything(profile), name)["image"].removesuffix("-cuda") == image.removesuffix("-cuda")


def test_the_guide_s_example_says_where_every_image_comes_from() -> None:
    guide = (ROOT / "docs" / "deploy.md").read_text().split("## Kubernetes")[1]
    example = yaml.safe_load(guide.split("```yaml\n")[1].split("```")[0])
    used = {container(everything(profile), name)["image"] for profile in PROFILES for name in OPTION_TYPES}
    assert {image["name"] for image in example["images"]} == used


@pytest.mark.parametrize("name", OPTION_TYPES)
def test_ports_are_those_that_the_images_bind(name: str) -> None:
    stage = DOCKERFILE.split(f" AS {name}\n")[1].split("\nFROM ")[0]
    bound = {int(port) for port in re.findall(r"OUTRIDER_\w*ADDRESS=0\.0\.0\.0:(\d+)", stage)}
    found = everything("base")
    ports = {port["name"]: port["containerPort"] for port in container(found, name)["ports"]}
    assert set(ports.values()) == bound
    annotations = found["Deployment", name]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["metrics"])
    for kind, service in found:
        if kind == "Service":
            spec = found[kind, service]["spec"]
            if spec["selector"]["app.kubernetes.io/component"] == name:
                assert all(ports[port["targetPort"]] == port["port"] for port in spec["ports"])


@pytest.mark.parametrize(("name", "option", "peer"), [("gateway", "verify", "verify"), ("verify", "draft", "draft")])
def test_peers_are_found_behind_a_headless_service(name: str, option: str, peer: str) -> None:
    found = everything("base")
    (address,) = getattr(options(found, name), option)
    assert PeerAddresses([address], f"--{option}", seconds=1)
    host, _, port = address.removeprefix("dns:///").partition(":")
    service = found["Service", host]["spec"]
    assert service["clusterIP"] == "None" and service["ports"][0]["port"] == int(port)
    assert service["selector"] == found["Deployment", peer]["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("name", OPTION_TYPES)
def test_a_pod_leaves_its_name_then_drains_and_then_ends(name: str) -> None:
    found = everything("base")
    command, seconds = container(found, name)["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    followers = [options(found, one).dns_seconds for one in ("gateway", "verify")]  # type: ignore[attr-defined]
    # A look-up, and before it 5 seconds in the cluster's cache.
    assert int(seconds) >= max(followers) + 5
    assert found["Deployment", name]["spec"]["minReadySeconds"] >= max(followers) + 5
    grace = pod(found, name)["terminationGracePeriodSeconds"]
    assert grace >= int(seconds) + options(found, name).drain_seconds + 10


def test_probes_ask_what_the_services_answer() -> None:
    found = everything("base")
    for name, port in (("verify", 50052), ("draft", 50053)):
        probes = container(found, name)
        assert all(
            probes[kind]["grpc"] == {"port": port} for kind in ("startupProbe", "readinessProbe", "livenessProbe")
        )
        startup = probes["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 900, "as the images' health check has it"
    gateway = container(found, "gateway")
    routes = set(re.findall(r'Route\("([^"]+)"', (ROOT / "gateway" / "http" / "info.py").read_text()))
    assert gateway["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    # Ready is a gateway only with a verify replica, and nobody is helped by ending it because there is none.
    assert gateway["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert {"/ready", "/health"} <= routes


@pytest.mark.parametrize("name", OPTION_TYPES)
def test_no_container_has_rights_that_it_does_not_need(name: str) -> None:
    found = everything("gpu2")
    spec = pod(found, name)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert f"--uid {spec['securityContext']['runAsUser']} " in DOCKERFILE
    assert container(found, name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in container(found, name)["volumeMounts"]} == volumes


@pytest.mark.parametrize("name", OPTION_TYPES)
def test_disruptions_and_autoscalers_mean_the_pods_that_there_are(name: str) -> None:
    found = everything("base")
    deployment = found["Deployment", name]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    budget = found["PodDisruptionBudget", name]["spec"]
    assert budget["selector"]["matchLabels"] == labels
    scaler = found["HorizontalPodAutoscaler", name]["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    assert scaler["minReplicas"] > budget["maxUnavailable"] and "replicas" not in deployment
    assert kustomized(FOLDER / "base")["Deployment", name]["spec"]["replicas"] > budget["maxUnavailable"]


@pytest.mark.parametrize(("profile", "gpus"), [("base", set()), ("gpu1", {"verify"}), ("gpu2", {"verify", "draft"})])
def test_gpus_go_to_the_services_that_compose_gives_one(profile: str, gpus: set[str]) -> None:
    found = everything(profile)
    wanted = {name for name in OPTION_TYPES if "nvidia.com/gpu" in container(found, name)["resources"]["limits"]}
    assert wanted == gpus == {name for name in OPTION_TYPES if container(found, name)["image"].endswith("-cuda")}


def test_autoscalers_ask_for_what_the_adapter_tells_and_that_for_what_services_export() -> None:
    rules = yaml.safe_load((AUTOSCALING / "adapter.yaml").read_text())["rules"]
    recorded = {rule["record"]: rule["expr"] for rule in recording_rules()}
    known = exported()
    assert [missing for text in recorded.values() if (missing := asked(text) - known)] == []
    series = re.compile(rules["custom"][0]["seriesQuery"].split('__name__=~"')[1].split('"')[0])
    of_pods = {name for name in known if series.fullmatch(name)}
    external = {rule["name"]["as"] for rule in rules["external"]}
    assert all(rule["seriesQuery"].partition("{")[0] in recorded for rule in rules["external"])
    wanted: dict[str, set[str]] = {"pods": set(), "external": set()}
    for one in documents(AUTOSCALING / "autoscalers.yaml"):
        for metric in one["spec"]["metrics"]:
            kind = metric["type"].lower()
            if kind in wanted:
                wanted[kind].add(metric[kind]["metric"]["name"])
    assert wanted == {"pods": of_pods, "external": external}
    assert {"outrider_verify_waiting_requests", "outrider_draft_open_requests"} <= of_pods


def recording_rules() -> list[dict[str, str]]:
    return [
        rule for group in yaml.safe_load((AUTOSCALING / "rules.yaml").read_text())["groups"] for rule in group["rules"]
    ]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_shortfall_of_accept_length_is_what_it_was_over_what_it_is(tmp_path: Path) -> None:
    # From 3 tokens a round to 1.5 after two hours; in the other namespace nobody asks.
    series = {
        'outrider_verify_running_requests{namespace="a", pod="v"}': "1x150",
        'outrider_verify_running_requests{namespace="b", pod="v"}': "0x150",
        'outrider_verify_accept_length_sum{namespace="a", pod="v"}': "0+180x120 21690+90x30",
        'outrider_verify_accept_length_count{namespace="a", pod="v"}': "0+60x150",
    }
    samples = [
        {"labels": f'outrider:accept_length:shortfall{{namespace="{name}"}}', "value": value}
        for name, value in (("a", 2), ("b", 1))
    ]
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": "outrider:accept_length:shortfall", "eval_time": "140m", "exp_samples": samples}],
    }
    file = tmp_path / "test.yml"
    rules = {"rule_files": [str(AUTOSCALING / "rules.yaml")], "evaluation_interval": "1m", "tests": [case]}
    file.write_text(yaml.safe_dump(rules))
    result = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
