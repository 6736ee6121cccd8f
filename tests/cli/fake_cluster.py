"""Clusters of programs that only stand in for services."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil

from outrider.cli.cluster import Cluster
from outrider.config.draft import DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.verify import VerifyOptions

FAKES = Path(__file__).parent / "fakes"


class FakeCluster(Cluster):
    """A cluster of fake services that keeps what it is told; FAKE_* variables come as keyword arguments."""

    def __init__(self, modes: dict[str, str] | None = None, **arguments: Any) -> None:
        self.lines: list[tuple[str, str]] = []
        self.events: list[str] = []
        environment = {f"FAKE_{name.upper()}": mode for name, mode in (modes or {}).items()}
        defaults: dict[str, Any] = {
            "gateway": GatewayOptions(drain_seconds=1),
            "verify": VerifyOptions(drain_seconds=1),
            "draft": DraftOptions(drain_seconds=1),
            "start_seconds": 30,
        }
        super().__init__(
            **{**defaults, **arguments},
            modules=dict.fromkeys(("draft", "verify", "gateway"), "fake_service"),
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join([str(FAKES), str(FAKES.parents[2])])},
            on_line=lambda name, line: self.lines.append((name, line)),
            on_event=self.events.append,
        )


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
