"""Other projects' clients against the three services: each must work, and scores must not depend on speculation.

for name in frameworks instructor litellm pydantic-ai; do
    python -m venv environments/$name
    environments/$name/bin/pip install -r benchmarks/serving/client_requirements/$name.txt
done
python -m venv environments/clients && environments/clients/bin/pip install -r requirements-clients.txt
python -m benchmarks.serving.clients --environments environments --out benchmarks/results/clients_cpu.json

The services run in float32, once with drafts and once without; client_checks.py runs the clients. lm-eval's
local-completions must give the same scores and the same samples, bit by bit, both times. Exit code 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from outrider.cli.cluster import Cluster
from outrider.config.verify import VerifyOptions
from outrider_tools.bench.report import Row, cpu_name, write_report

CHECKS = {
    "openai": "clients",
    "openai-tools": "clients",
    "langchain": "clients",
    "langchain-tools": "clients",
    "pydantic-ai": "pydantic-ai",
    "instructor": "instructor",
    "litellm": "litellm",
    "huggingface-hub": "frameworks",
    "outlines": "frameworks",
    "openai-agents": "frameworks",
    "haystack": "frameworks",
    "load-generator": "clients",
    "health": "clients",
    "lm-eval": "clients",
}
"""Each check, and the environment with its client: clients need different releases of openai."""
PACKAGES = ("torch", "grpcio", "starlette")
WORKER = Path(__file__).with_name("client_checks.py")


def run_check(python: Path, check: str, cluster: Cluster) -> tuple[dict[str, Any], dict[str, str], float]:
    """Return a client's findings, the versions of its packages, and its seconds. Raises CalledProcessError."""
    start = time.monotonic()
    command = [str(python), str(WORKER), check, "--rest", cluster.rest_url, "--grpc", cluster.gateway_address]
    # The client must only see its own packages, not those of this environment.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["found"], answer["versions"], time.monotonic() - start


def rows_of(model: str, mode: str, check: str, found: dict[str, Any]) -> list[Row]:
    """Return the figures of one check."""
    case = f"{model} {mode} b1 fp32 greedy, {check}"
    rows = [Row(case, "passed", 1.0, "")]
    for task, scores in found.get("scores", {}).items():
        rows += [Row(f"{case} {task}", name.removesuffix(",none"), value, "") for name, value in scores.items()]
    rows += [Row(case, name, float(value), "") for name, value in found.items() if isinstance(value, int | float)]
    return rows


def main() -> int:
    """Run all checks and write the report. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, required=True, help="folder with the clients' environments")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="model to serve")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    given = parser.parse_args()
    rows: list[Row] = []
    scored: dict[str, dict[str, Any]] = {}
    versions: dict[str, str] = {}
    name = Path(given.model).name.lower()
    for mode in ("ngram", "plain"):
        verify = VerifyOptions(
            model=given.model, dtype="float32", max_total_tokens=16384, no_speculation=mode == "plain"
        )
        with Cluster(verify=verify) as cluster:
            for check, environment in CHECKS.items():
                python = given.environments / environment / "bin" / "python"
                found, used, seconds = run_check(python, check, cluster)
                versions |= used
                rows += rows_of(name, mode, check, found)
                print(f"{mode} {check}: {seconds:.1f} s", flush=True)
                if check == "lm-eval":
                    scored[mode] = found
    same = {kind: scored["ngram"][kind] == scored["plain"][kind] for kind in ("scores", "samples")}
    case = f"{name} ngram b1 fp32 greedy, lm-eval"
    rows += [Row(case, f"{kind}_equal_to_plain", float(equal), "") for kind, equal in same.items()]
    write_report(given.out, "clients", cpu_name(), rows, PACKAGES)
    report = json.loads(given.out.read_text())
    report["versions"] |= dict(sorted(versions.items()))
    given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"scores and samples equal with and without speculation: {same}")
    return 0 if all(same.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
