"""Options that every service has."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config.base import option
from outrider.logs import LEVELS


@dataclass(frozen=True)
class ServiceOptions:
    """Options of a service. A service's own options inherit them and set the default addresses."""

    address: str = option("127.0.0.1:0", "Address of the gRPC door: host:port (port 0 takes a free one) or unix:/path.")
    metrics_address: str = option("", "Address of the Prometheus page, host:port; empty turns it off.")
    ready_file: str = option("", "File that is written, with the addresses really bound, when the service serves.")
    log_level: str = option("INFO", "Least important lines to log.", choices=LEVELS)
    drain_seconds: float = option(
        20.0, "Seconds that running requests get to finish after SIGTERM.", minimum=0, maximum=3600
    )
