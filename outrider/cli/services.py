"""From the options on the command line to a cluster that may start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from rich.console import Console

from outrider.cli.child import LineSink
from outrider.cli.cluster import Cluster
from outrider.config.draft import DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.service import ServiceOptions
from outrider.config.verify import VerifyOptions
from outrider.models.store import resolve_model


def make_cluster(
    options: Mapping[str, ServiceOptions], console: Console, on_line: LineSink, *, fixed_ports: bool, supervise: bool
) -> Cluster:
    """A cluster with these options, not started yet; its model is fetched first, with progress on stderr.

    `on_line` takes the services' log lines; what befalls them is told on `console`.
    Raises ConfigError when there is no such model.
    """
    verify = cast(VerifyOptions, options["verify"])
    resolve_model(verify.model)
    return Cluster(
        gateway=cast(GatewayOptions, options["gateway"]),
        verify=verify,
        draft=cast(DraftOptions, options["draft"]),
        fixed_ports=fixed_ports,
        supervise=supervise,
        on_line=on_line,
        on_event=lambda text: console.print(f"outrider: {text}", soft_wrap=True),
    )
