"""Which addresses the services of one machine get, how they find each other, and how the cores are shared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import psutil

from outrider.config.draft import AUTO, DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.service import ServiceOptions
from outrider.config.verify import VerifyOptions

# In the order in which they start.
SERVICES = ("draft", "verify", "gateway")
MODULES = {"draft": "draft_service", "verify": "verify_service", "gateway": "gateway"}
OPTION_TYPES: dict[str, type[ServiceOptions]] = {
    "draft": DraftOptions,
    "verify": VerifyOptions,
    "gateway": GatewayOptions,
}
# (service, its option that names the peer, the peer)
LINKS = (("verify", "draft", "draft"), ("gateway", "verify", "verify"))
ADDRESS_FIELDS = ("address", "metrics_address", "rest_address")


@dataclass(frozen=True)
class Wiring:
    """What a cluster chooses where the services' options are left at their defaults.

    Verify and draft get unix sockets in `folder`. All other doors keep the default ports if `fixed_ports`, and
    otherwise take free ones, so that any number of clusters fit on a machine.
    Verify computes on all physical cores.
    """

    folder: Path
    fixed_ports: bool

    def ready_file(self, name: str) -> Path:
        """Where the service reports what it has bound."""
        return self.folder / f"{name}.json"

    def place(self, name: str, options: ServiceOptions) -> ServiceOptions:
        """The options with the choices filled in."""
        changes: dict[str, Any] = {"ready_file": str(self.ready_file(name))}
        for field in _addresses(options):
            if not is_default(options, field):
                continue
            if field == "address" and name != "gateway":
                changes[field] = f"unix:{self.folder / name}.sock"
            elif not self.fixed_ports and getattr(options, field):
                changes[field] = "127.0.0.1:0"
        if isinstance(options, VerifyOptions) and is_default(options, "threads"):
            options = replace(options, threads=num_cores())
        return replace(options, **changes)


def link(options: Mapping[str, ServiceOptions]) -> dict[str, ServiceOptions]:
    """The options with each service told where its peers are, unless it was told so already.

    A service whose peer is not among them is given none.
    """
    linked = dict(options)
    for name, field, peer in LINKS:
        if name in linked and is_default(linked[name], field):
            kind = type(getattr(linked[name], field))
            address = linked[peer].address if peer in linked else ""
            value: Any = address if kind is str else tuple(part for part in (address,) if part)
            linked[name] = replace(linked[name], **{field: value})
    draft, verify = linked.get("draft"), linked.get("verify")
    # A draft that is to choose its drafters must know for whom; n-grams have no tokenizer of their own for grammars.
    chosen = draft.speculative_algorithm if isinstance(draft, DraftOptions) else ()
    if isinstance(draft, DraftOptions) and isinstance(verify, VerifyOptions) and chosen in (AUTO, ("NGRAM",)):
        linked["draft"] = replace(draft, target_model_path=draft.target_model_path or verify.model)
    return linked


def bind_again(options: ServiceOptions, bound: Mapping[str, str]) -> ServiceOptions:
    """The options with which a restarted service takes the addresses that it had before.

    A door that was off stays off, also where another one serves in its place (the gateway's REST door has /metrics).
    """
    changes: dict[str, Any] = {
        field: bound[field] for field in _addresses(options) if getattr(options, field) and bound.get(field)
    }
    return replace(options, **changes)


def is_default(options: object, name: str) -> bool:
    """Whether the option was left as its class declares it."""
    return any(getattr(options, name) == field.default for field in fields(options) if field.name == name)  # type: ignore[arg-type]


def _addresses(options: ServiceOptions) -> list[str]:
    return [field.name for field in fields(options) if field.name in ADDRESS_FIELDS]


def num_cores() -> int:
    """Physical cores that this process may use, or OMP_NUM_THREADS where that is set."""
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed))


def service_env(name: str, base: Mapping[str, str]) -> dict[str, str]:
    """Environment of a service: numerical libraries use all cores in verify and one elsewhere; idle threads sleep.

    Threads that spin while they wait take the cores from the service that works.
    """
    threads = str(num_cores()) if name == "verify" else "1"
    return {
        **base,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": base.get("OMP_WAIT_POLICY", "passive"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
