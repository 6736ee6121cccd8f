"""Translate a profile of compose.yaml to commands and environments of plain processes on this machine.

Only what a container provides is translated: service names become 127.0.0.1 with a port, paths in volumes and images
become paths here, a reservation of GPUs becomes CUDA_VISIBLE_DEVICES. Users, read-only roots and capabilities are left
out.
"""

from __future__ import annotations

import re
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?:(:?)-([^}]*))?\})")
_ADDRESS = re.compile(r"(?:dns:///)?([A-Za-z0-9_.-]+):(\d+)")
_FROM = re.compile(r"FROM (\S+)(?: AS (\S+))?", re.IGNORECASE)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass
class Image:
    """What an image of docker/Dockerfile defines for a container."""

    env: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    start_period: float = 0.0
    """Seconds in which a failed check does not count."""


@dataclass(frozen=True)
class Planned:
    """A service as a process."""

    name: str
    role: str
    """The Dockerfile's target: gateway, verify or draft."""
    command: list[str]
    env: dict[str, str]
    health: list[str]
    start_period: float
    grace: float
    """Seconds that the service gets to end."""
    waits_for: dict[str, str]
    """Names of services, and the state to wait for: service_started or service_healthy."""
    namespaces: dict[str, str]
    """The services whose "ipc" and "pid" namespaces it uses; no namespaces of its own are made in their place."""


def images(dockerfile: Path) -> dict[str, Image]:
    """Return the images by target."""
    found: dict[str, Image] = {}
    image = Image()
    for line in re.sub(r"\\\n", " ", dockerfile.read_text()).splitlines():
        word, _, rest = line.strip().partition(" ")
        if match := _FROM.match(line):
            base = found.get(match[1], Image())
            image = Image(dict(base.env), list(base.entrypoint), list(base.health), base.start_period)
            found[match[2] or match[1]] = image
        elif word == "ENV":
            image.env |= dict(part.split("=", 1) for part in shlex.split(rest))
        elif word == "ENTRYPOINT":
            image.entrypoint = yaml.safe_load(rest)
        elif word == "HEALTHCHECK":
            options, _, command = rest.partition("CMD ")
            image.health = yaml.safe_load(command)
            image.start_period = _seconds(dict(re.findall(r"--([\w-]+)=(\S+)", options)).get("start-period", "0s"))
    return found


def read_compose(files: Sequence[Path], variables: Mapping[str, str]) -> dict[str, Any]:
    """Merge several Compose files, in order. Output of `docker compose config` is understood, too."""
    content: dict[str, Any] = {}
    for file in files:
        content = _over(content, _interpolate(yaml.safe_load(file.read_text()), variables))
    return content


def plan(content: Mapping[str, Any], profile: str, folder: Path, *, fixed_ports: bool = False) -> dict[str, Planned]:
    """Return the profile's services that are built from docker/Dockerfile, by name, in a valid start order.

    Volumes lie in `folder`; relative paths are below this checkout. With `fixed_ports` each port is the container's.
    """
    built = images(ROOT / "docker" / "Dockerfile")
    services = {
        name: service
        for name, service in content["services"].items()
        if profile in service.get("profiles", ()) and "build" in service
    }
    names = {name: {name, *_aliases(service)} for name, service in services.items()}
    doors = _Doors(names, fixed_ports)
    planned = {}
    for name in _in_order(services):
        service = services[name]
        image = built[service["build"]["target"]]
        places = sorted(_places(service, content.get("secrets", {}), folder), key=lambda pair: -len(pair[0]))
        env = {key: _at(doors.here(name, value), places) for key, value in _environment(service, image).items()}
        env["CUDA_VISIBLE_DEVICES"] = ",".join(_devices(service))
        entrypoint = service.get("entrypoint")
        check = service.get("healthcheck", {})
        planned[name] = Planned(
            name,
            "" if entrypoint else service["build"]["target"],
            _runnable([*(entrypoint or image.entrypoint), *(service.get("command") or ())]),
            env,
            [] if check.get("disable") else _runnable(check.get("test", ["CMD", *image.health])[1:]),
            image.start_period,
            _seconds(service.get("stop_grace_period", "10s")),
            _waits_for(service),
            {kind: str(service[kind]).removeprefix("service:") for kind in ("ipc", "pid") if kind in service},
        )
    return planned


class _Doors:
    """Translates addresses inside the network to addresses of this machine."""

    def __init__(self, names: Mapping[str, set[str]], fixed: bool) -> None:
        self._owner = {alias: name for name, aliases in names.items() for alias in aliases}
        self._fixed = fixed
        self._ports: dict[tuple[str, str], int] = {}

    def here(self, name: str, value: str) -> str:
        """Return a value of the service's environment with addresses of this machine."""

        def translate(match: re.Match[str]) -> str:
            owner = name if match[1] == "0.0.0.0" else self._owner.get(match[1])
            return match[0] if owner is None else f"127.0.0.1:{self._port(owner, match[2])}"

        parts = value.split(",")
        return ",".join(_ADDRESS.sub(translate, part) if _ADDRESS.fullmatch(part) else part for part in parts)

    def _port(self, owner: str, port: str) -> int:
        taken = set(self._ports.values())
        while (owner, port) not in self._ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                free = int(port) if self._fixed else probe.getsockname()[1]
            if free not in taken or self._fixed:
                self._ports[owner, port] = free
        return self._ports[owner, port]


def _environment(service: Mapping[str, Any], image: Image) -> dict[str, str]:
    given = service.get("environment") or {}
    if isinstance(given, list):
        given = dict(entry.split("=", 1) for entry in given)
    from_files: dict[str, str] = {}
    for entry in service.get("env_file") or ():
        path = ROOT / (entry["path"] if isinstance(entry, dict) else entry)
        lines = [line for line in path.read_text().splitlines() if "=" in line and not line.startswith("#")]
        from_files |= dict(line.split("=", 1) for line in lines)
    merged = {**image.env, **from_files, **given}
    return {key: str(value) for key, value in merged.items() if key != "PATH" and value is not None}


def _places(service: Mapping[str, Any], secrets: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield paths in the container, and the paths here in their place."""
    yield "/opt/outrider", ROOT
    for volume in service.get("volumes", ()):
        parts = volume.split(":") if isinstance(volume, str) else (volume["source"], volume["target"])
        outside, inside = parts[0], parts[1]
        yield inside, ROOT / outside if outside.startswith((".", "/")) else folder / "volumes" / outside
    for secret in service.get("secrets", ()):
        name = secret if isinstance(secret, str) else secret["source"]
        yield f"/run/secrets/{name}", ROOT / secrets[name]["file"]
    for name in ("/var/lib/outrider", "/var/cache/outrider"):
        yield name, folder / service["build"]["target"]


def _at(value: str, places: Sequence[tuple[str, Path]]) -> str:
    """Return a path in the container as a path on this machine, and any other value as it is."""
    for inside, outside in places:
        if value == inside or value.startswith(f"{inside}/"):
            return str(outside.resolve()) + value[len(inside) :]
    return value


def _runnable(command: Sequence[str]) -> list[str]:
    """Return the command with this interpreter, and with the module that docker/outrider runs."""
    first = {"python": [sys.executable], "outrider": [sys.executable, "-m", "outrider.cli"]}
    return [*first.get(command[0], [command[0]]), *command[1:]] if command else []


def _in_order(services: Mapping[str, Any]) -> list[str]:
    found: list[str] = []

    def visit(name: str) -> None:
        for other in _waits_for(services[name]):
            visit(other)
        if name not in found:
            found.append(name)

    for name in services:
        visit(name)
    return found


def _waits_for(service: Mapping[str, Any]) -> dict[str, str]:
    given = service.get("depends_on") or {}
    if isinstance(given, list):
        return dict.fromkeys(given, "service_started")
    return {name: one["condition"] for name, one in given.items()}


def _aliases(service: Mapping[str, Any]) -> list[str]:
    networks = service.get("networks") or {}
    entries = networks.values() if isinstance(networks, dict) else ()
    return [alias for entry in entries for alias in (entry or {}).get("aliases", ())]


def _devices(service: Mapping[str, Any]) -> list[str]:
    reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", ())
    return [device for entry in reserved for device in entry.get("device_ids", ())]


def _interpolate(value: Any, variables: Mapping[str, str]) -> Any:
    """Replace Compose's ${NAME}, ${NAME:-default}, ${NAME-default} and $$ in all texts."""

    def replace(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        found = variables.get(match[2])
        return (match[4] or "") if found is None or (match[3] and not found) else found

    if isinstance(value, dict):
        return {key: _interpolate(one, variables) for key, one in value.items()}
    if isinstance(value, list):
        return [_interpolate(one, variables) for one in value]
    return _VARIABLE.sub(replace, value) if isinstance(value, str) else value


def _over(below: Any, above: Any) -> Any:
    """Merge two values: mappings are merged, lists concatenated, anything else is replaced by `above`."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: _over(below.get(key), one) for key, one in above.items()}}
    return [*below, *above] if isinstance(below, list) and isinstance(above, list) else above


def _seconds(text: str) -> float:
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)(ms|s|m|h)", str(text)))
