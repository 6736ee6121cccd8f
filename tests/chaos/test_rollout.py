"""Replicas behind DNS names are replaced under load, and no client notices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos.rollout import LOST, Phase

ROOT = Path(__file__).parents[2]
CALM = {
    "complete": 9,
    "failed": 0,
    "refused": 0,
    "wrong_tokens": 0,
    "rest_complete": 9,
    "rest_failed": 0,
    "rest_wrong": 0,
}


def phase(name: str, *errors: str, **figures: int) -> Phase:
    return Phase(name, 1.0, {**CALM, **figures}, list(errors), 0.1)


def test_only_what_was_lost_with_a_verify_may_fail_and_must_say_so() -> None:
    message = f"UNAVAILABLE: the {LOST} cannot be reached"
    assert phase("verify_rolled").complaints() == []
    assert phase("verify_killed", message, failed=1).complaints() == []
    assert phase("verify_killed", "INTERNAL: oh", failed=1).complaints() == ["verify_killed: 1 failed: INTERNAL: oh"]
    assert phase("verify_rolled", message, failed=1).complaints() == [f"verify_rolled: 1 failed: {message}"]
    assert phase("calm", rest_wrong=1).complaints() and phase("calm", complete=0).complaints()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif("not can_have_own_names()", reason="needs Linux and namespaces")
def test_replicas_are_replaced_one_by_one_under_load_and_no_request_fails(tmp_path: Path) -> None:
    out = tmp_path / "rollout.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.chaos.rollout",
        "--verify=2",
        "--draft=1",
        "--clients=2",
        f"--out={out}",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(out.read_text())
    assert report["complaints"] == [] and set(report["errors"]) <= {"verify_killed"}
    phases = {row["case"].split(" rollout ")[1].split()[0] for row in report["rows"]}
    assert {"verify_rolled", "draft_rolled", "gateway_rolled", "verify_killed"} <= phases
