"""What both doors share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gateway.core.catalogue import Catalogue, GatewayModel
from gateway.core.engine import Engine
from gateway.core.gate import Allowance, Gate, Ticket
from gateway.core.metrics import GatewayMetrics
from gateway.core.router import Router
from outrider.errors import OutriderError, UnavailableError


class Gateway:
    """The parts of one gateway."""

    def __init__(
        self, catalogue: Catalogue, router: Router, gate: Gate, metrics: GatewayMetrics, allowance: Allowance
    ) -> None:
        self.catalogue = catalogue
        self.router = router
        self.gate = gate
        self.metrics = metrics
        self.allowance = allowance
        self.engine = Engine(router, metrics)

    @property
    def ready(self) -> bool:
        """Whether a request would be served now."""
        return self.router.ready and not self.gate.draining

    @property
    def model(self) -> GatewayModel:
        """The served model. Raises UnavailableError while no verify service is there to run it."""
        model = self.catalogue.model
        if not self.router.ready:
            raise UnavailableError("no verify service is ready; try again shortly", code="verify_unavailable")
        return model

    @contextmanager
    def enter(self, door: str) -> Iterator[Ticket]:
        """Lets a request in and counts how it fails. Raises OverloadedError or UnavailableError."""
        with self.counted(door), self.gate.enter() as ticket:
            yield ticket

    @contextmanager
    def counted(self, door: str) -> Iterator[None]:
        """Counts how a request fails."""
        try:
            yield
        except OutriderError as error:
            self.count_error(door, error)
            raise
        except Exception:
            self.metrics.errors.labels(door, "internal_error").inc()
            raise

    def count_error(self, door: str, error: OutriderError) -> None:
        """Counts a request that was refused or failed."""
        self.metrics.errors.labels(door, error.code).inc()

    async def render_metrics(self) -> bytes:
        """The page for a scraper."""
        try:
            name = self.catalogue.model.name
        except UnavailableError:
            name = ""
        return await self.metrics.render(name, self.router, self.gate)
