"""Prometheus' and Grafana's files: what they ask for is there, and Prometheus understands it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from exported import asked, exported

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "docker" / "prometheus"
GRAFANA = ROOT / "docker" / "grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))

DATASOURCE_FIELDS = (
    "name uid type access url orgId user database basicAuth basicAuthUser withCredentials isDefault editable version"
)
PROVIDER_FIELDS = "name orgId folder folderUid type disableDeletion allowUiUpdates updateIntervalSeconds options"
PROVISIONED = [
    ("datasources", "datasources", {*DATASOURCE_FIELDS.split(), "jsonData", "secureJsonData"}),
    ("dashboards", "providers", {*PROVIDER_FIELDS.split()}),
]
"""Of Grafana's reference of provisioning: folders, what their files list, and the fields of an entry."""

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels(path: Path) -> Iterator[dict[str, Any]]:
    for panel in json.loads(path.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def expressions() -> dict[str, str]:
    """Every expression of dashboards and alerts, by where it stands."""
    found = {rule["alert"]: rule["expr"] for rule in alerts()}
    for path in DASHBOARDS:
        for panel in panels(path):
            for target in panel["targets"]:
                found[f"{path.name}: {panel['title']} {target['refId']}"] = target["expr"]
    return found


def test_every_name_in_dashboards_and_alerts_is_one_that_a_service_exports() -> None:
    known = exported()
    unknown = {place: missing for place, text in expressions().items() if (missing := asked(text) - known)}
    assert unknown == {}


def test_the_dashboard_shows_what_an_operator_looks_for() -> None:
    shown = set().union(*(asked(text) for text in expressions().values()))
    assert {
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:generation_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "outrider_verify_accept_length_sum",
        "outrider_verify_hit_rounds_total",
        "outrider_verify_hold_seconds_total",
        "outrider_verify_host_gap_seconds_bucket",
        "outrider_verify_healthy_drafts",
        "outrider_verify_kv_pages_used",
        "outrider_verify_preemptions_total",
        "outrider_verify_fallback_rounds_total",
        "outrider_verify_resting_rounds_total",
        "outrider_gateway_errors_total",
    } <= shown


def run_promtool(*arguments: str) -> None:
    result = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
def test_prometheus_takes_its_configuration_and_rules() -> None:
    run_promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))


@needs_promtool
def test_each_alert_fires_for_its_fault_and_none_in_good_order() -> None:
    run_promtool("test", "rules", str(Path(__file__).parent / "alerts_test.yml"))


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    cases = (Path(__file__).parent / "alerts_test.yml").read_text()
    assert [rule["alert"] for rule in alerts() if f'alertname="{rule["alert"]}"' not in cases] == []


def test_each_alert_says_how_bad_it_is_and_what_it_means() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), rule["alert"]
        assert rule["annotations"]["summary"] and rule["annotations"]["description"], rule["alert"]


@needs_promtool
def test_prometheus_parses_every_expression_of_the_dashboards(tmp_path: Path) -> None:
    rules = [
        {"record": f"outrider:case:{number}", "expr": text.replace("$__rate_interval", "1m")}
        for number, text in enumerate(expressions().values())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    run_promtool("check", "rules", str(file))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_is_what_grafana_loads(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    assert dashboard["uid"] and dashboard["title"] and dashboard["schemaVersion"] >= 39 and dashboard["id"] is None
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24 and place["h"] >= 1
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
    for panel in panels(path):
        assert panel["type"] in ("timeseries", "stat", "bargauge") and panel["title"] and panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": datasource()["uid"]}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_grafana_s_own_types_know_every_field_of_a_dashboard(path: Path) -> None:
    plugins, encoder, types = (
        pytest.importorskip(f"grafana_foundation_sdk.{name}")
        for name in ("cog.plugins", "cog.encoder", "models.dashboard")
    )
    plugins.register_default_plugins()
    source = json.loads(path.read_text())
    read = json.loads(encoder.JSONEncoder().encode(types.Dashboard.from_json(source)))
    # The id is Grafana's to give; everything else must come back as it was, where unknown fields are lost.
    assert list(lost(source, read)) == ["/id"]


def lost(written: Any, read: Any, place: str = "") -> Iterator[str]:
    """Places whose value Grafana's types have not kept."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            yield from lost(value, read[key], f"{place}/{key}") if key in read else [f"{place}/{key}"]
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for index, (one, other) in enumerate(zip(written, read, strict=True)):
            yield from lost(one, other, f"{place}/{index}")
    elif written != read:
        yield place


def datasource() -> dict[str, Any]:
    (found,) = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert isinstance(found, dict)
    return found


def test_grafana_is_provisioned_with_the_prometheus_and_the_folder_that_compose_gives_it() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert datasource()["type"] == "prometheus" and datasource()["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "outrider.yml").read_text())
    assert provider["apiVersion"] == 1
    (folder,) = (entry["options"]["path"] for entry in provider["providers"])
    assert f"./docker/grafana/dashboards:{folder}:ro" in services["grafana"]["volumes"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in [f"{folder}/{path.name}" for path in DASHBOARDS]


@pytest.mark.parametrize(("folder", "key", "known"), PROVISIONED)
def test_provisioning_has_no_field_that_grafana_does_not_read(folder: str, key: str, known: set[str]) -> None:
    for path in (GRAFANA / "provisioning" / folder).iterdir():
        content = yaml.safe_load(path.read_text())
        assert path.suffix == ".yml" and content["apiVersion"] == 1
        assert content.keys() <= {"apiVersion", "prune", "deleteDatasources", key}
        for entry in content[key]:
            assert entry["name"] and entry["type"] and entry.keys() <= known


def test_every_service_is_scraped_where_its_image_serves_metrics() -> None:
    jobs = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    found = {job["job_name"]: job["dns_sd_configs"][0] for job in jobs if "dns_sd_configs" in job}
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    for name, port in (("gateway", 9101), ("verify", 9102), ("draft", 9103)):
        # An address of a name is one replica: two behind one target would be taken for one that restarts all the time.
        assert found[name] == {"names": [name], "type": "A", "port": port, "refresh_interval": "5s"}
        assert f"OUTRIDER_METRICS_ADDRESS=0.0.0.0:{port}" in dockerfile
