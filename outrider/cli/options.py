"""The services' options as options of `outrider up`, `demo` and `chat`.

A name that only one service has stays as it is (--match-type). One that several have takes the service's name in
front (--verify-threads), except those that mean the same everywhere (--log-level), which then hold for all, and those
of the model, which are the target's (--device; the draft's is --draft-device).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from outrider.cli.wiring import LINKS, OPTION_TYPES, SERVICES
from outrider.config.base import ENV_PREFIX, option_rows, parse_options
from outrider.config.compat import translate
from outrider.config.service import ServiceOptions
from outrider.errors import ConfigError

SHARED = ("log_level", "drain_seconds", "lockstep")
TARGETS = ("device", "dtype", "attention_backend", "disable_cuda_graph", "max_total_tokens", "mem_fraction_static")
"""Options of a model that verify and draft have; without a service's name they are verify's."""
# What the cluster decides: where services report, and who talks to whom.
HIDDEN = {(name, "ready_file") for name in SERVICES} | {(name, field) for name, field, _ in LINKS}


MAX_TOKENS_LIMIT = 2**32 - 1
MAX_SEED = 2**64 - 1


def whole_number(minimum: int, maximum: int) -> Callable[[str], int]:
    """A type for argparse: integers that the message's field can hold, both ends included."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if not minimum <= number <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum} to {maximum}")
        return number

    return parse


def number(minimum: float, maximum: float) -> Callable[[str], float]:
    """A type for argparse: finite numbers, both ends included."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {minimum:g} to {maximum:g}")
        return value

    return parse


def given_service_flags(given: argparse.Namespace) -> list[str]:
    """The services' options that the command line holds, as the user spells them."""
    return [name.removeprefix("service") for name in vars(given) if name.startswith("service--")]


@dataclass(frozen=True)
class ServiceFlag:
    """A service's option as `outrider up` spells it."""

    flag: str
    service: str
    field: str
    is_bool: bool
    help: str
    default: str

    @property
    def own_flag(self) -> str:
        """As the service itself spells it."""
        return "--" + self.field.replace("_", "-")


def service_flags() -> list[ServiceFlag]:
    """Every option of every service that a user may set, in the order of the services."""
    names = Counter(field.name for kind in OPTION_TYPES.values() for field in fields(kind))
    # The gateway's verify_tls_ca is not the tls_ca of verify.
    taken = {f"{service}_{name}" for name, count in names.items() if count > 1 for service in SERVICES}
    flags = []
    for service in SERVICES:
        kind = OPTION_TYPES[service]
        for field, row in zip(fields(kind), option_rows(kind), strict=True):
            if (service, field.name) in HIDDEN:
                continue
            targets = service == "verify" and field.name in TARGETS
            plain = (names[field.name] == 1 and field.name not in taken) or field.name in SHARED or targets
            flag = row.flag if plain else f"--{service}-{row.flag.removeprefix('--')}"
            default = "a unix socket" if field.name == "address" and service != "gateway" else row.default
            flags.append(ServiceFlag(flag, service, field.name, field.type == "bool", row.help, default))
    return flags


def in_our_words(argv: Sequence[str]) -> list[str]:
    """A command line whose options of other engines are ours; warns of those that change nothing.

    Raises ConfigError for those that cannot be had.
    """
    known = [flag.flag for flag in service_flags()]
    return translate(argv, known, lambda text: print(f"outrider: warning: {text}", file=sys.stderr))


def add_service_options(parser: argparse.ArgumentParser) -> None:
    """Declare the services' options, a group for each service."""
    groups = {name: parser.add_argument_group(f"{name} service") for name in SERVICES}
    shared = parser.add_argument_group("all services")
    declared = set()
    for flag in service_flags():
        if flag.flag in declared:
            continue
        declared.add(flag.flag)
        group = shared if flag.field in SHARED else groups[flag.service]
        group.add_argument(
            flag.flag,
            dest=f"service{flag.flag}",
            metavar="VALUE",
            default=argparse.SUPPRESS,
            help=f"{flag.help} Default: {flag.default or 'empty'}.".replace("%", "%%"),
            **({"nargs": "?", "const": "true"} if flag.is_bool else {}),  # type: ignore[arg-type]
        )


def parse_service_options(given: argparse.Namespace, env: Mapping[str, str] | None = None) -> dict[str, ServiceOptions]:
    """Options of each service, from what add_service_options has parsed and from the environment.

    An environment variable counts only where one service alone, or all of them alike, have the option; in the others'
    place stands the flag with the service's name. Raises ConfigError, which names the option as the user spells it.
    """
    env = os.environ if env is None else env
    return {name: _parse_one(name, vars(given), env) for name in SERVICES}


def _parse_one(service: str, given: Mapping[str, str], env: Mapping[str, str]) -> ServiceOptions:
    flags = [flag for flag in service_flags() if flag.service == service]
    argv = [f"{flag.own_flag}={given[f'service{flag.flag}']}" for flag in flags if f"service{flag.flag}" in given]
    legal = {ENV_PREFIX + flag.field.upper() for flag in flags if flag.flag == flag.own_flag}
    try:
        return parse_options(
            OPTION_TYPES[service], argv, prog=service, env={name: env[name] for name in legal if name in env}
        )
    except ConfigError as error:
        message = error.message
        for flag in flags:
            if flag.flag != flag.own_flag and message.startswith(f"{flag.own_flag}:"):
                message = flag.flag + message.removeprefix(flag.own_flag)
        raise ConfigError(message) from error
