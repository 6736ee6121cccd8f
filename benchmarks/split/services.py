"""The services of the split benchmark: verify stays up, the draft changes from case to case."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from outrider.cli.cluster import Cluster
from outrider.config.draft import DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.metrics import MetricsPage

CONNECT_SECONDS = 30.0
PREPARE_SECONDS = 180.0
"""Most seconds until a draft that takes features gets them: verify captures graphs that store them first."""
_HEALTHY = "outrider_verify_healthy_drafts"
_WAITING = "outrider_verify_drafts_waiting_for_features"
_PENDING = "outrider_verify_graphs_pending"

Lines = Callable[[str, str], None]


class StartedTarget:
    """Verify and gateway. Verify dials one address for each drafter, so that it does not mix up what it learns of them.

    An address is a link to the socket of the draft service that serves at the time, or to none.
    """

    def __init__(self, options: VerifyOptions, drafters: Sequence[str], on_line: Lines) -> None:
        """`drafters` are the names of the drafters to dial."""
        self._folder = tempfile.TemporaryDirectory(prefix="split-")
        self._links = {drafter: Path(self._folder.name) / f"{number}.sock" for number, drafter in enumerate(drafters)}
        addresses = tuple(f"unix:{link}" for link in self._links.values())
        options = replace(options, draft=addresses)
        self.cluster = Cluster(services=("verify", "gateway"), verify=options, on_line=on_line)
        self.start_seconds = 0.0
        self._others = 0.0

    def start(self) -> None:
        """Start both, and wait until they serve. Raises ServiceFailedError."""
        start = time.perf_counter()
        self.cluster.__enter__()
        self.start_seconds = time.perf_counter() - start

    def close(self) -> None:
        """End both services."""
        self.cluster.close()
        self._folder.cleanup()

    def page(self) -> MetricsPage:
        """Return verify's metrics now."""
        return MetricsPage.read(self.cluster.metrics_url("verify"))

    def connect(self, drafter: str, draft: StartedDraft) -> None:
        """Let a draft service serve, with features if it takes any. Raises TimeoutError if this takes too long."""
        link = self._links[drafter]
        link.unlink(missing_ok=True)
        # On a CPU, a drafter in verify's own process counts as healthy, too.
        self._others = self.page().gauges.get(_HEALTHY, 0.0)
        link.symlink_to(draft.cluster.address("draft").removeprefix("unix:"))
        self._wait(lambda page: page.gauges.get(_HEALTHY, 0.0) > self._others, "connect to the draft")
        # Earlier requests would be answered without the draft, and compete with graph captures.
        what = "store features for the draft"
        self._wait(lambda page: not page.gauges.get(_WAITING) and not page.gauges.get(_PENDING), what, PREPARE_SECONDS)

    def disconnect(self, drafter: str) -> None:
        """Wait until verify has noticed that the draft service is gone."""
        self._links[drafter].unlink(missing_ok=True)
        self._wait(lambda page: page.gauges.get(_HEALTHY) == self._others, "lose the draft")

    def _wait(self, reached: Callable[[MetricsPage], bool], what: str, seconds: float = CONNECT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not reached(self.page()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"verify did not {what} within {seconds:.0f} s")
            time.sleep(0.05)

    def __enter__(self) -> StartedTarget:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class StartedDraft:
    """A draft service on a socket of its own."""

    def __init__(self, options: DraftOptions, on_line: Lines) -> None:
        self.cluster = Cluster(services=("draft",), draft=options, on_line=on_line)
        self.start_seconds = 0.0

    def start(self) -> None:
        """Start, and wait until it serves. Raises ServiceFailedError."""
        start = time.perf_counter()
        self.cluster.__enter__()
        self.start_seconds = time.perf_counter() - start

    def page(self) -> MetricsPage:
        """Return the draft service's metrics now."""
        return MetricsPage.read(self.cluster.metrics_url("draft"))

    @property
    def pid(self) -> int:
        """Process id of the draft service."""
        return self.cluster.draft.pid

    def close(self) -> None:
        """End the service."""
        self.cluster.close()


def start_together(services: Sequence[StartedTarget | StartedDraft]) -> list[Exception | None]:
    """Start all services at once. Return each one's error, or None."""

    def start(service: StartedTarget | StartedDraft) -> Exception | None:
        try:
            service.start()
        except Exception as error:
            return error
        return None

    if not services:
        return []
    with ThreadPoolExecutor(len(services)) as pool:
        return list(pool.map(start, services))
