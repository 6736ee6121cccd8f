"""compose.yaml's profiles as plain processes: what is translated, and that it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stack import compose_command, run

from benchmarks.serving.compose_plan import Planned, plan, read_compose
from outrider.cli.cluster import OPTION_TYPES
from outrider.config.base import parse_options

ROOT = Path(__file__).resolve().parents[2]
SECRETS = Path("docker/compose.secrets.yaml")


def planned(profile: str, folder: Path, *more: Path, **variables: str) -> dict[str, Planned]:
    """By role; the holder of namespaces has none."""
    files = [ROOT / file for file in (Path("compose.yaml"), *more)]
    return {one.role: one for one in plan(read_compose(files, variables), profile, folder).values()}


@pytest.mark.parametrize("profile", ["cpu", "gpu1", "gpu2"])
def test_each_service_is_told_what_its_container_is_told_in_words_of_this_machine(profile: str, tmp_path: Path) -> None:
    variables = {"OUTRIDER_MODELS": str(tmp_path), "OUTRIDER_MODEL": "/models/target", "OUTRIDER_DTYPE": "float32"}
    services = planned(profile, tmp_path / "run", **variables)
    options: dict[str, Any] = {
        role: parse_options(OPTION_TYPES[role], [], env=services[role].env) for role in ("gateway", "verify", "draft")
    }
    for role, module in (("gateway", "gateway"), ("verify", "verify_service"), ("draft", "draft_service")):
        assert services[role].command == [sys.executable, "-m", module]
        assert services[role].health == [sys.executable, "-m", "outrider.cli", "health"]
        assert services[role].start_period == 900 and services[role].grace == 45
        assert services[role].env["OUTRIDER_HOME"] == str(tmp_path / "run" / "volumes" / "models") or role == "gateway"
        assert options[role].drain_seconds == 30 and services[role].env["PYTHONPATH"] == str(ROOT)
    assert options["gateway"].verify == (options["verify"].address,)
    assert options["verify"].draft == (options["draft"].address,)
    assert len({options[role].address for role in options} | {options[role].metrics_address for role in options}) == 6
    assert options["verify"].model == str(tmp_path / "target") == options["draft"].target_model_path
    inside = profile == "gpu1"
    assert options["verify"].dtype == "float32"
    assert options["verify"].speculative_algorithm == (("AUTO",) if inside else ())
    assert options["draft"].speculative_algorithm == (("NGRAM",) if inside else ("AUTO",))
    suffix = "" if profile == "cpu" else f"-{profile}"
    conditions = {f"verify{suffix}": "service_healthy", f"draft{suffix}": "service_started"}
    assert services["gateway"].waits_for == conditions


@pytest.mark.parametrize(
    ("profile", "verify", "draft"), [("cpu", "", ""), ("gpu1", "GPU-a", ""), ("gpu2", "GPU-a", "5")]
)
def test_reserved_gpus_are_those_that_the_process_sees(profile: str, verify: str, draft: str, tmp_path: Path) -> None:
    services = planned(profile, tmp_path, OUTRIDER_VERIFY_GPU="GPU-a", OUTRIDER_DRAFT_GPU="5")
    seen = {role: one.env["CUDA_VISIBLE_DEVICES"] for role, one in services.items() if role}
    assert seen == {"gateway": "", "verify": verify, "draft": draft}


@pytest.mark.parametrize("profile", ["gpu1", "gpu2"])
def test_verify_and_draft_of_a_gpu_profile_enter_what_a_third_one_holds(profile: str, tmp_path: Path) -> None:
    services = plan(read_compose([ROOT / "compose.yaml"], {}), profile, tmp_path)
    assert next(iter(services)) == "namespaces" and services["namespaces"].command[:2] == [sys.executable, "-c"]
    for role in ("verify", "draft"):
        assert services[f"{role}-{profile}"].namespaces == {"ipc": "namespaces", "pid": "namespaces"}
    assert services[f"gateway-{profile}"].namespaces == {}


def test_secrets_are_read_where_they_lie_and_options_come_from_their_files(tmp_path: Path) -> None:
    for name in ("gateway", "verify", "draft"):
        (tmp_path / f"{name}.env").write_text("# of the test\nOUTRIDER_REFLECTION=true\n")
    folders = {"OUTRIDER_SECRETS": str(tmp_path), "OUTRIDER_OPTIONS": str(tmp_path)}
    services = planned("cpu", tmp_path, SECRETS, **folders)
    assert services["gateway"].env["OUTRIDER_API_KEY_FILE"] == str(tmp_path / "api_key")
    assert services["draft"].env["OUTRIDER_AUTH_TOKEN_FILE"] == str(tmp_path / "service_token")
    assert {one.env["OUTRIDER_REFLECTION"] for one in services.values()} == {"true"}


@pytest.mark.skipif("not compose_command()", reason="docker compose is not installed")
@pytest.mark.parametrize("profile", ["cpu", "gpu1", "gpu2"])
def test_what_is_read_is_what_compose_itself_reads(profile: str, tmp_path: Path) -> None:
    files = [ROOT / "compose.yaml", ROOT / SECRETS]
    words = [word for file in files for word in ("-f", str(file))]
    config_file = tmp_path / "compose.yaml"
    config_file.write_text(run(*compose_command(), *words, "--profile", profile, "config"))
    ours = plan(read_compose(files, os.environ), profile, tmp_path, fixed_ports=True)
    assert plan(read_compose([config_file], {}), profile, tmp_path, fixed_ports=True) == ours


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("profile", ["cpu", "gpu2"])
def test_a_profile_runs_as_processes_and_outlives_its_draft(profile: str, model_path: Path, tmp_path: Path) -> None:
    key, out = tmp_path / "api_key", tmp_path / "report.json"
    key.write_text("a-key-of-the-test\n")
    (tmp_path / "service_token").write_text("a-token-of-the-test\n")
    settings = {"OUTRIDER_DTYPE": "float32", "OUTRIDER_MAX_TOTAL_TOKENS": "8192", "OUTRIDER_SECRETS": str(tmp_path)}
    words = ["--profile", profile, "--model", str(model_path), "--max-tokens", "32", "--out", str(out)]
    words += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    words += [word for file in ("compose.yaml", SECRETS) for word in ("--file", str(ROOT / file))]
    command = [sys.executable, "-m", "benchmarks.serving.compose_processes", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    values = {(row["case"].rpartition(" ")[2], row["metric"]): row["value"] for row in report["rows"]}
    assert values[model_path.name, "different_texts"] == 1
    assert values["draft-killed", "outrider_verify_healthy_drafts"] == 0
    assert values["draft-killed", "accept_length"] == 1 < values["draft-runs", "accept_length"]
    assert values["draft-is-back", "outrider_verify_healthy_drafts"] == 1
    assert values["draft-is-back", "vllm:generation_tokens"] == 8 * 32
    assert "a-key-of-the-test" not in out.read_text()
    if profile == "gpu2" and shutil.which("unshare") and " and pid namespaces" in report["namespaces"]:
        assert report["shared_namespaces"] == ["ipc", "pid"]
