"""Services as Kubernetes runs them: pods with their own addresses, behind names, rolled out one by one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.chaos.names import NameServer
from outrider.cli.child import Child, LineSink
from outrider.cli.cluster import MODULES, service_env
from outrider.config.base import options_to_argv, options_to_env
from outrider.config.service import ServiceOptions

START_SECONDS = 180.0
PORTS = {"gateway": 50051, "verify": 50052, "draft": 50053}
METRICS_PORTS = {"gateway": 9101, "verify": 9102, "draft": 9103}
REST_PORT = 8000


@dataclass(frozen=True)
class Waits:
    """Kubernetes' waiting times, in seconds; as in deploy/kubernetes, but shorter."""

    before_stop: float = 3.0
    """preStop: from leaving the name to SIGTERM."""
    ready: float = 3.0
    """minReadySeconds: from a pod's readiness to the next pod's turn."""
    unready: float = 3.0
    """From a pod's death until it leaves the name: the time that probes take to notice."""


class Pod:
    """One process of a service, at its own address."""

    def __init__(self, kind: str, options: ServiceOptions, folder: Path, on_line: LineSink, address: str) -> None:
        changes: dict[str, Any] = {
            "address": f"{address}:{PORTS[kind]}",
            "metrics_address": f"{address}:{METRICS_PORTS[kind]}",
            "ready_file": str(folder / f"{kind}-{address}.json"),
        }
        if kind == "gateway":
            changes["rest_address"] = f"{address}:{REST_PORT}"
        self.kind = kind
        self.address = address
        self.options: ServiceOptions = replace(options, **changes)
        self.child = Child(f"{kind} {address}", MODULES[kind], Path(changes["ready_file"]), on_line)

    async def start(self) -> None:
        """Start the process, and wait until it serves. Raises ServiceFailedError."""
        env = {**service_env(self.kind, os.environ), **options_to_env(self.options)}
        self.child.start(options_to_argv(self.options), env)
        await asyncio.to_thread(self.child.wait_ready, START_SECONDS, threading.Event())

    async def end(self) -> int:
        """Ask the process to drain and end. Return its exit code, or the signal that had to end it."""
        self.child.terminate()
        if not await asyncio.to_thread(self.child.wait, self.options.drain_seconds + 10):
            self.child.kill()
        code = self.child.poll()
        return -9 if code is None else code


class Deployment:
    """The pods of a service, and the name that ready pods are found by."""

    def __init__(
        self,
        name: str,
        names: NameServer,
        make: Callable[[str], Pod],
        network: str,
        waits: Waits,
        surge: bool,
    ) -> None:
        """`make` makes a pod at an address of `network` ("127.0.1"). With `surge`, new pods come before old ones go."""
        self.pods: list[Pod] = []
        self.exit_codes: list[int] = []
        """Exit codes of pods that were asked to end."""
        self.name = name
        self._names = names
        self._make = make
        self._addresses = (f"{network}.{number}" for number in count(1))
        self._waits = waits
        self._surge = surge

    async def scale(self, size: int) -> None:
        """Start pods until there are `size`, and wait until all are ready."""
        await asyncio.gather(*(self._add() for _ in range(size - len(self.pods))))

    async def roll(self) -> None:
        """Replace every pod, one after the other."""
        for pod in tuple(self.pods):
            if not self._surge:
                await self._retire(pod)
            await self._add()
            await asyncio.sleep(self._waits.ready)
            if self._surge:
                await self._retire(pod)

    async def lose(self, pod: Pod) -> None:
        """Kill a pod. It leaves the name when probes have noticed, and another pod is started."""
        self.pods.remove(pod)
        await asyncio.to_thread(pod.child.kill)
        await asyncio.sleep(self._waits.unready)
        self._names.remove(self.name, pod.address)
        await self._add()
        await asyncio.sleep(self._waits.ready)

    async def end(self) -> None:
        """End all pods."""
        await asyncio.gather(*(self._end(pod) for pod in tuple(self.pods)))

    def kill(self) -> None:
        """End all processes at once, whatever they are doing."""
        for pod in self.pods:
            pod.child.kill()

    async def _add(self) -> None:
        pod = self._make(next(self._addresses))
        self.pods.append(pod)
        await pod.start()
        self._names.add(self.name, pod.address)

    async def _retire(self, pod: Pod) -> None:
        self._names.remove(self.name, pod.address)
        await asyncio.sleep(self._waits.before_stop)
        await self._end(pod)

    async def _end(self, pod: Pod) -> None:
        self.exit_codes.append(await pod.end())
        self.pods.remove(pod)
