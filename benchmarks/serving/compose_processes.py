"""Run a profile of compose.yaml as plain processes, for machines that have GPUs but no container engine.

python -m benchmarks.serving.compose_processes --profile gpu2 --model /models/llama-8b --out report.json

Starts the profile's services, with the same commands, options and health checks (see compose_plan.py), verify and draft
in their own IPC and PID namespaces if this machine allows it. Asks once over REST and once over gRPC, kills the draft,
asks again, starts it anew, asks again, reads the metrics pages, and ends everything as an engine would. The variables
of docs/deploy.md come from the environment and from --set. All answers are to one question, which the draft soon knows:
rates show that it works, not how fast it is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.serving.compose_plan import ROOT, Planned, plan, read_compose
from benchmarks.serving.compose_run import ProfileRun
from outrider.cli.client import Sampling, encode
from outrider.metrics import MetricsPage
from outrider.v1 import gateway_pb2_grpc
from outrider_tools.bench.report import Row, cpu_name, write_report

LIST = "Repeat this list three times:\n- red apples\n- brown eggs\n- rye bread\n- fresh milk\n- honey\n- salt"
SECONDS = 600.0
COUNTED = {
    "gateway": ["vllm:generation_tokens"],
    "verify": [f"outrider_verify_{name}" for name in ("accepted_tokens", "fallback_rounds", "healthy_drafts")],
    "draft": ["outrider_draft_nodes_grown"],
}
"""Counters and gauges to report, by service."""
MAPPED = "features are read from verify's memory"


@dataclass(frozen=True)
class DoorReply:
    """An answer that came through one door."""

    text: str
    tokens: int
    seconds: float
    accept_length: float


class ComposeClient:
    """Asks the gateway at the addresses and with the key of its environment."""

    def __init__(self, gateway: Planned, max_tokens: int) -> None:
        key = gateway.env.get("OUTRIDER_API_KEY_FILE", "")
        self._token = f"Bearer {Path(key).read_text().split()[0]}" if key else ""
        self._env = gateway.env
        self._max_tokens = max_tokens

    def rest(self) -> DoorReply:
        """Ask for a chat completion over REST."""
        url, start = f"http://{self._env['OUTRIDER_REST_ADDRESS']}/v1", time.perf_counter()
        model = self._call(f"{url}/models", None)["data"][0]["id"]
        messages = [{"role": "user", "content": LIST}]
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": self._max_tokens}
        answer = self._call(f"{url}/chat/completions", {**body, "ignore_eos": True})
        usage, text = answer["usage"], answer["choices"][0]["message"]["content"]
        seconds = time.perf_counter() - start
        return DoorReply(text, usage["completion_tokens"], seconds, usage["outrider"]["accept_length"])

    def grpc(self) -> DoorReply:
        """Ask for an answer over gRPC."""
        sampling = Sampling(temperature=0.0, max_tokens=self._max_tokens, ignore_eos=True)
        request = encode(sampling, [("user", LIST)])
        metadata, start = [("authorization", self._token)] if self._token else [], time.perf_counter()
        with grpc.insecure_channel(self._env["OUTRIDER_ADDRESS"], [("grpc.enable_http_proxy", 0)]) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            responses = list(stub.Generate(request, timeout=SECONDS, metadata=metadata))
        usage = responses[-1].usage
        rounds = usage.num_rounds
        accept_length = usage.num_committed_tokens / rounds if rounds else 0.0
        text = "".join(response.text for response in responses)
        return DoorReply(text, usage.completion_tokens, time.perf_counter() - start, accept_length)

    def _call(self, url: str, body: dict[str, Any] | None) -> Any:
        headers = {
            "Content-Type": "application/json",
            **({"Authorization": self._token} if self._token else {}),
        }
        request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return json.load(response)


def measure(running: ProfileRun, max_tokens: int, case: str) -> tuple[list[Row], dict[str, Any]]:
    """Ask and measure everything while the profile runs."""
    rows = [Row(f"{case} {name}", "seconds_to_healthy", value, "s") for name, value in running.healthy_after.items()]
    client, texts = ComposeClient(running.by_role["gateway"], max_tokens), set()
    draft = running.by_role["draft"].name
    for phase in ("warm-up", "draft runs", "draft killed", "draft is back"):
        if phase == "draft killed":
            running.kill(draft)
        elif phase == "draft is back":
            running.start(draft)
            running.wait_healthy(draft)
            running.wait_for("verify has a draft again", lambda: pages(running)["outrider_verify_healthy_drafts"] == 1)
        for door, answer in (("rest", client.rest()), ("grpc", client.grpc())):
            texts.add(answer.text)
            if phase != "warm-up":
                place = f"{case} {door} {phase.replace(' ', '-')}"
                rows.append(Row(place, "tokens_per_second", answer.tokens / answer.seconds, "tokens/s"))
                rows.append(Row(place, "accept_length", answer.accept_length, "tokens"))
        rows += [Row(f"{case} {phase.replace(' ', '-')}", name, value, "") for name, value in pages(running).items()]
    rows.append(Row(case, "different_texts", len(texts), "texts"))
    shared = running.shared_namespaces()
    rows += [Row(case, f"shares_{kind}_namespace", float(kind in shared), "yes or no") for kind in ("ipc", "pid")]
    mapped = MAPPED in running.log(draft).read_text()
    rows.append(Row(case, "features_in_shared_gpu_memory", float(mapped), "yes or no"))
    return rows, {"namespaces": running.namespaces, "shared_namespaces": sorted(shared), "texts": sorted(texts)}


def pages(running: ProfileRun) -> dict[str, float]:
    """Return what Prometheus would see of the running services."""
    found: dict[str, float] = {}
    for role, names in COUNTED.items():
        if running.runs(running.by_role[role].name):
            page = MetricsPage.read(f"http://{running.by_role[role].env['OUTRIDER_METRICS_ADDRESS']}/metrics")
            found |= {name: page.total(name) for name in names}
    return found


def variables(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the variables for compose.yaml."""
    given = {**os.environ, **dict(entry.split("=", 1) for entry in arguments.set)}
    models = {"OUTRIDER_MODEL": arguments.model, "OUTRIDER_DRAFT_MODEL": arguments.draft_model}
    folders = {name: folder.resolve() for name, folder in models.items() if folder is not None}
    if folders:
        root = Path(os.path.commonpath([folder.parent for folder in folders.values()]))
        given["OUTRIDER_MODELS"] = str(root)
        given |= {name: f"/models/{folder.relative_to(root)}" for name, folder in folders.items()}
    return given


@contextmanager
def kept_folder(path: Path | None) -> Iterator[Path]:
    """Yield the folder for volumes and logs: the given one, or one that is removed at the end."""
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        yield path.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="outrider-compose-") as name:
        yield Path(name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the profile. Return exit code 0 if all answers came and every service ended as asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=("cpu", "gpu1", "gpu2"), required=True)
    parser.add_argument("--file", type=Path, action="append", help="Compose files. Default: compose.yaml.")
    parser.add_argument("--model", type=Path, help="Folder of the target. Default: compose.yaml's model.")
    parser.add_argument("--draft-model", type=Path, help="Folder of a draft model or head.")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="A variable of docs/deploy.md."
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--folder", type=Path, help="Volumes and logs stay here. Default: removed at the end.")
    parser.add_argument("--fixed-ports", action="store_true", help="Take the ports that containers have.")
    parser.add_argument("--device-name", default=cpu_name(), help="What the report calls the machine.")
    parser.add_argument("--out", type=Path, help="JSON file to write.")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    content = read_compose(arguments.file or [ROOT / "compose.yaml"], variables(arguments))
    with kept_folder(arguments.folder) as folder:
        planned = plan(content, arguments.profile, folder, fixed_ports=arguments.fixed_ports)
        with ProfileRun(planned, folder) as running:
            name = Path(running.by_role["verify"].env["OUTRIDER_MODEL"]).name
            case = f"compose {arguments.profile} {name}"
            rows, more = measure(running, arguments.max_tokens, case)
        rows += [Row(f"{case} {name}", "exit_code", code, "") for name, code in running.exit_codes.items()]
    for row in rows:
        print(f"{row.case:60} {row.metric:40} {row.value:12.3f} {row.unit}")
    print(f"verify and draft: {more['namespaces']}; shared: {', '.join(more['shared_namespaces']) or 'none'}")
    if arguments.out is not None:
        commands = {one.name: [*one.command] for one in planned.values()}
        packages = ("torch", "triton", "grpcio")
        more |= {"commands": commands}
        write_report(arguments.out, "compose_processes", arguments.device_name, rows, packages, more=more)
    return int(any(running.exit_codes.values()))


if __name__ == "__main__":
    sys.exit(main())
