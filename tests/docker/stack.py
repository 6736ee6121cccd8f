"""compose.yaml on a real container engine: built, started, looked into, taken down."""

from __future__ import annotations

import http.server
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OURS = ("gateway", "verify", "draft")
SERVICES = (*OURS, "prometheus")
MINUTES = 60


def engine_reason() -> str:
    """Why nothing can be run here; empty if it can."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        return "no container engine answers"
    return "" if compose_command() else "docker compose is not installed"


@cache
def compose_command() -> list[str]:
    for command in (["docker", "compose"], ["docker-compose"]):
        if (
            shutil.which(command[0])
            and not subprocess.run([*command, "version"], capture_output=True, check=False).returncode
        ):
            return command
    return []


def run(*command: str, env: dict[str, str] | None = None, check: bool = True, minutes: float = 5) -> str:
    """What the command printed; its words are in the error if it fails."""
    result = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=minutes * MINUTES, check=False
    )
    if check and result.returncode:
        raise AssertionError(
            f"{' '.join(command)} exited {result.returncode}:\n{result.stdout}\n{result.stderr}"[-6000:]
        )
    return result.stdout


def wait_until(happened: Callable[[], object], what: str, minutes: float = 3) -> None:
    """Look again and again; AssertionError if it does not happen."""
    deadline, pause = time.monotonic() + minutes * MINUTES, threading.Event()
    while not happened():
        assert time.monotonic() < deadline, f"not within {minutes:g} minutes: {what}"
        pause.wait(0.1)


class Stack:
    """A profile as a project of its own, on free ports: the CPU's."""

    def __init__(self, env: dict[str, str]) -> None:
        self.suffix = ""
        """Of the names of our services in the profile."""
        self.project = f"outrider-test-{secrets.token_hex(3)}"
        self._env = {**os.environ, **env, "OUTRIDER_REST_PORT": "0", "OUTRIDER_GRPC_PORT": "0"}
        changes = ["docker/compose.secrets.yaml", str(HERE.relative_to(ROOT) / "compose.test.yaml")]
        files = [word for file in ("compose.yaml", *changes) for word in ("-f", file)]
        self._base = [*compose_command(), *files, "-p", self.project]
        self._command = [*self._base, "--profile", "cpu"]

    def without_gpus(self, profile: str, folder: Path) -> Stack:
        """Another profile of the same project, which reserves no GPUs and runs the images of this one."""
        content = yaml.safe_load(run(*self._base, "--profile", profile, "config", env=self._env))
        for service in content["services"].values():
            for key in ("deploy", "build"):
                service.pop(key, None)
        file = folder / f"{profile}.yaml"
        file.write_text(yaml.safe_dump(content))
        twin = Stack({})
        twin.project, twin.suffix, twin._env = self.project, f"-{profile}", self._env
        twin._command = [*compose_command(), "-f", str(file), "-p", self.project, "--profile", profile]
        return twin

    def compose(self, *arguments: str, minutes: float = 5, check: bool = True) -> str:
        return run(*self._command, *arguments, env=self._env, minutes=minutes, check=check)

    def up(self) -> None:
        """Build, fetch the model into its volume over the host's network, and start."""
        self.compose("build", *SERVICES, minutes=30)
        self.compose("up", "--no-start", *SERVICES)
        mount, image = f"{self.project}_models:/var/lib/outrider", self._env["OUTRIDER_VERIFY_IMAGE"]
        pull = ["--network", "host", "-v", mount, "--read-only", "--tmpfs", "/tmp", "--entrypoint", "outrider", image]
        run("docker", "run", "--rm", *pull, "models", "pull", minutes=20)
        self.compose("up", "-d", *SERVICES, minutes=20)
        wait_until(lambda: self.health("gateway") == "healthy", "the gateway is healthy")

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", check=False)

    def container(self, service: str) -> str:
        return self.compose("ps", "-a", "-q", self.name(service)).split()[0]

    def name(self, service: str) -> str:
        """What the profile calls a service."""
        return service + (self.suffix if service in OURS else "")

    def inspect(self, service: str) -> dict[str, Any]:
        (found,) = json.loads(run("docker", "inspect", self.container(service)))
        assert isinstance(found, dict)
        return found

    def health(self, service: str) -> str:
        return str(self.inspect(service)["State"].get("Health", {}).get("Status", ""))

    def inside(self, service: str, *command: str, check: bool = True) -> str:
        return run("docker", "exec", self.container(service), *command, check=check).strip()

    def published(self, service: str, port: int) -> str:
        """host:port at which a port can be reached from here."""
        return self.compose("port", self.name(service), str(port)).strip()

    @cached_property
    def _prometheus(self) -> str:
        """Its container's own address: it is not published."""
        networks = self.inspect("prometheus")["NetworkSettings"]["Networks"].values()
        return str(next(network["IPAddress"] for network in networks))

    def prometheus(self, path: str, **query: str) -> Any:
        """`data` of an answer of Prometheus' HTTP API."""
        url = f"http://{self._prometheus}:9090/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def value(self, expression: str) -> float:
        """The value of an expression that gives one number; -1 for none."""
        result = self.prometheus("query", query=expression)["result"]
        return float(result[0]["value"][1]) if result else -1.0


@contextmanager
def torch_source(folder: Path) -> Iterator[dict[str, str]]:
    """Variables that tell the build where torch comes from.

    That is TORCH_INDEX, or PyTorch's own index; where neither can be had, a page that serves the wheel which pip here
    finds for the installed torch.
    """
    if os.environ.get("TORCH_INDEX"):
        yield {"TORCH_INDEX": os.environ["TORCH_INDEX"]}
        return
    try:
        urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=10).close()
        yield {"TORCH_INDEX": CPU_INDEX}
        return
    except (urllib.error.URLError, TimeoutError):
        pass
    import torch

    wheels = folder / "torch"
    download = ["-m", "pip", "download", "--no-deps", "--dest", str(wheels), f"torch=={torch.__version__}"]
    run(sys.executable, *download, minutes=20)
    handler = partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"TORCH_INDEX": f"http://127.0.0.1:{server.server_port}", "TORCH_HOST": "127.0.0.1"}
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
