"""How `outrider up`, `demo` and `chat` spell the services' options: see `outrider.cli.options`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import NamedTuple

from outrider.cli.cluster import LINKS, OPTION_TYPES, SERVICES
from outrider.config.base import Option, describe_options
from outrider.config.verify import VerifyOptions

SHARED = ("log_level", "drain_seconds", "lockstep", "watchdog_timeout")
"""Options that every service that has them gets alike; they take no service's name."""
TARGETS = ("device", "dtype", "disable_cuda_graph", "max_total_tokens", "mem_fraction_static")
"""Options of a model that verify and draft have; without a service's name they are verify's."""
DRAFTING = tuple(field.name for field in fields(VerifyOptions) if field.name.startswith("speculative_"))
"""Options of a draft model that verify and draft have; without a service's name they say what drafts, wherever."""
# What the cluster decides: where services report, who talks to whom, and where a draft model runs.
HIDDEN = (
    {(name, "ready_file") for name in SERVICES}
    | {(name, field) for name, field, _ in LINKS}
    | {("verify", name) for name in DRAFTING}
)


class ServiceFlag(NamedTuple):
    """A service's option as `outrider up` spells it."""

    flag: str
    service: str
    option: Option


@cache
def service_flags() -> Sequence[ServiceFlag]:
    """Every option of every service that a user may set, in the order of the services."""
    names = Counter(field.name for kind in OPTION_TYPES.values() for field in fields(kind))
    # The gateway's verify_tls_ca is not the tls_ca of verify.
    taken = {f"{service}_{name}" for name, count in names.items() if count > 1 for service in SERVICES}
    flags = []
    for service in SERVICES:
        kind = OPTION_TYPES[service]
        for option in describe_options(kind):
            name = option.name
            if (service, name) in HIDDEN:
                continue
            own = name in (TARGETS if service == "verify" else DRAFTING)
            plain = (names[name] == 1 and name not in taken) or name in SHARED or own
            flag = option.flag if plain else f"--{service}-{option.flag.removeprefix('--')}"
            flags.append(ServiceFlag(flag, service, option))
    return flags
