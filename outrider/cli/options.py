"""The services' options as options of `outrider up`, `demo` and `chat`.

A name that only one service has stays as it is (--match-type). A name that several services have gets the service's
name in front (--verify-threads), with two exceptions: options that mean the same everywhere (--log-level) apply to
all services, and options of the model are the target's (--device; the draft's is --draft-device).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NoReturn, TypeVar, cast

from rich.console import Console

from outrider.cli.child import LineSink
from outrider.cli.cluster import (
    ADDRESS_FIELDS,
    LINKS,
    OPTION_TYPES,
    SERVICES,
    SHARED,
    Cluster,
    ServiceFlag,
    flag_names,
    is_default,
    service_flags,
)
from outrider.cli.placement import NGRAM, PLACEMENTS, Placed, num_gpus, place_draft_model, place_drafts
from outrider.cli.terminal import print_steadily
from outrider.config.base import add_option, read_options
from outrider.config.compat import translate
from outrider.config.draft import DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.service import PeerServiceOptions, ServiceOptions, TlsFiles, door_tls, peer_tls, peer_token
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError, count_of, under
from outrider.host.worker import check_cores
from outrider.models.cuts import check_target
from outrider.models.drafters.kinds import check_drafter
from outrider.models.store import converted_default, given_folder, is_hub_id, resolve_model
from outrider.models.store_folder import count_tokens, hash_tokenizer, shard_paths, tensor_shapes
from outrider.rpc.lifecycle import with_variable
from outrider.rpc.server import check_free
from outrider.rpc.tls import CertificateRefusal, find_refusal, load_material
from outrider.rpc.transport import split_host_port, unix_path

COMMON_FLAGS = {
    "model": ("--model", "--served-model-name", "--device", "--dtype", "--context-length", "--deterministic"),
    "speculation": ("--speculative-algorithm", "--speculative-draft-model-path", "--draft-device", "--no-speculation"),
    "memory and load": ("--mem-fraction-static", "--max-total-tokens", "--max-running-requests", "--verify-threads"),
    "clients": ("--rest-address", "--gateway-address", "--api-key-file", "--gateway-tls-cert", "--gateway-tls-key"),
    "log": ("--log-level",),
}
"""The options that `--help` shows, by subject; `--help-all` also shows the others, by service."""
_TLS_WORDS = ("ca", "cert", "name")
MAX_TOKENS_LIMIT = 2**32 - 1
MAX_SEED = 2**64 - 1
NumberT = TypeVar("NumberT", int, float)


def whole_number(minimum: int, maximum: int) -> Callable[[str], int]:
    """Return an argparse type for integers in this range, both ends included."""
    return _within(int, minimum, maximum, f"a whole number from {minimum} to {maximum}")


def number(minimum: float, maximum: float) -> Callable[[str], float]:
    """Return an argparse type for finite numbers in this range, both ends included."""
    return _within(float, minimum, maximum, f"a number from {minimum:g} to {maximum:g}")


def _within(kind: type[NumberT], minimum: float, maximum: float, what: str) -> Callable[[str], NumberT]:
    def parse(text: str) -> NumberT:
        try:
            value = kind(text)
        except ValueError:
            value = kind(minimum - 1)
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


def add_connect_tls_options(group: argparse._ActionsContainer, *former: str) -> None:
    """Declare the options for TLS to a gateway; `peer_tls(arguments, "connect")` reads them.

    `former`: further prefixes under which the options are accepted.
    """
    for word, text in (
        ("ca", "CA certificates that must have signed the gateway's; without it there is no TLS"),
        ("cert", "certificate to present"),
        ("key", "private key of this certificate"),
        ("name", "name in the gateway's certificate, if it is not the address"),
    ):
        metavar = "NAME" if word == "name" else "FILE"
        names = [f"{prefix}-{word}" for prefix in ("--connect-tls", *former)]
        group.add_argument(*names, metavar=metavar, default="", help=f"TLS to the gateway: {text}.")


def given_service_flags(given: argparse.Namespace) -> list[str]:
    """Return the services' options that the command line holds, as the user spells them."""
    flags = [name.removeprefix("service") for name in vars(given) if name.startswith("service--")]
    return flags + ["--draft-placement"] * (given.draft_placement != PLACEMENTS[0])


def translate_argv(argv: Sequence[str]) -> list[str]:
    """Translate options of other engines in a command line to Outrider's; warn of those that change nothing.

    Raises ConfigError for options that Outrider does not support.
    """
    known = [flag.flag for flag in service_flags()]
    return translate(argv, known, lambda text: print(f"outrider: warning: {text}", file=sys.stderr))


class _HelpAll(argparse.Action):
    """Prints the help with every option."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        for action in parser._actions:
            action.help = getattr(action, "whole_help", action.help)
        parser.print_help()
        parser.exit()


def add_service_options(parser: argparse.ArgumentParser) -> None:
    """Declare the services' options: common ones by subject, the rest, which only --help-all shows, by service."""
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="Show all options, grouped by service.")
    subjects = {name: parser.add_argument_group(name) for name in COMMON_FLAGS}
    subjects["speculation"].add_argument(
        "--draft-placement",
        choices=PLACEMENTS,
        default="auto",
        help="Where drafters run: in the draft service (remote) or with verify (colocated). Colocated means, on a GPU, "
        "a draft model inside verify's rounds, with n-grams left to the draft service; on a CPU, all drafters in "
        "verify's process. Default: auto, which is colocated if the target takes all GPUs, or if there is no GPU "
        "and fewer than four cores, else remote.",
    )
    subject_of = {flag: subject for subject, flags in COMMON_FLAGS.items() for flag in flags}
    groups = {name: parser.add_argument_group(f"{name} service") for name in SERVICES}
    shared = parser.add_argument_group("all services")
    by_flag: dict[str, ServiceFlag] = {}
    for flag in service_flags():
        by_flag.setdefault(flag.flag, flag)
    for name in [*subject_of, *(name for name in by_flag if name not in subject_of)]:
        _, service, option = by_flag[name]
        group = shared if option.name in SHARED else groups[service]
        is_socket = option.name == "address" and service != "gateway"
        default = "a unix socket" if is_socket else option.default_text or "empty"
        group = subjects[subject_of[name]] if name in subject_of else group
        text = f"{our_flags(service, option.help_text)} Default: {default}."
        action = add_option(group, option, name, f"service{name}", "VALUE", text)
        if name not in subject_of:
            action.whole_help, action.help = action.help, argparse.SUPPRESS  # type: ignore[attr-defined]


def parse_service_options(given: argparse.Namespace, env: Mapping[str, str] | None = None) -> dict[str, ServiceOptions]:
    """Return the options of each service, from the parsed options of add_service_options and the environment.

    An environment variable counts only for an option whose flag here is the service's own; an option whose flag has
    the service's name in front needs that flag. Raises ConfigError, naming the option as the user spells it.
    """
    env = os.environ if env is None else env
    _warn_of_ignored(env)
    return {name: _parse_one(name, vars(given), env) for name in SERVICES}


def _warn_of_ignored(env: Mapping[str, str]) -> None:
    """Warn of environment variables that change nothing here, because their options have a service's name in front."""
    flags: dict[str, list[str]] = {}
    for flag, _, option in service_flags():
        if option.env in env:
            flags.setdefault(option.env, []).append("" if flag == option.flag else flag)
    for variable, names in flags.items():
        if all(names):
            words = f"{variable} has no effect here; set {' or '.join(names)}"
            print(f"outrider: warning: {words}", file=sys.stderr)


def _parse_one(service: str, given: Mapping[str, str], env: Mapping[str, str]) -> ServiceOptions:
    spelled = {option.name: flag for flag, its, option in service_flags() if its == service}
    texts = {name: given[f"service{flag}"] for name, flag in spelled.items() if f"service{flag}" in given}
    own = [option.env for flag, its, option in service_flags() if its == service and flag == option.flag]
    legal = {name: env[name] for name in own if name in env}
    return read_options(OPTION_TYPES[service], texts, legal, spelled)


def make_cluster(
    arguments: argparse.Namespace, console: Console, on_line: LineSink, *, fixed_ports: bool, supervise: bool
) -> Cluster:
    """Return a cluster with the options given, not started yet; fetch its model first, with progress on stderr.

    `on_line` gets the services' log lines; crashes and restarts are printed on `console`.
    Raises ConfigError if the model does not exist, it or the draft cannot be served, or an address cannot be bound.
    """
    options = parse_service_options(arguments)
    with _naming_variables(options):
        verify, draft = cast(VerifyOptions, options["verify"]), cast(DraftOptions, options["draft"])
        gateway, gpus = cast(GatewayOptions, options["gateway"]), num_gpus()

        def notify(text: str) -> None:
            print_steadily(console, f"outrider: {text}")

        of_drafts: list[str] = []  # printed after all checks have passed
        placed = place_drafts(verify, draft, arguments.draft_placement, gpus, of_drafts.append)
        verify, placed_draft = placed.verify, placed.draft
        bound = bound_services(options, placed)
        own_door = partial(_check_own_door, gateway, arguments)
        if found := _faults(chain(door_checks(bound, fixed_ports), _service_checks(bound, gpus), [own_door])):
            raise ConfigError("\n".join(found))
        is_here = _target_here(verify) is not None
        with under("--model"):
            target = resolve_model(verify.model, impl=verify.model_impl)
        if not is_here:  # a target that was here is among the checks above
            _check_folder(target, verify, gateway)
        if placed_draft is not None and placed_draft.speculative_algorithm != NGRAM:
            placed_draft = place_draft_model(placed_draft, verify, target, gpus)
            check_drafter(placed_draft, target)
        if set(verify.speculative_algorithm) - {*NGRAM}:
            check_drafter(verify.draft_model(str(target)), target)
        if verify.lockstep and draft.speculative_num_draft_tokens and is_default(verify, "max_draft_tokens"):
            verify = replace(verify, max_draft_tokens=draft.speculative_num_draft_tokens)
        for text in of_drafts:
            notify(text)
        return Cluster(
            gateway=gateway,
            verify=verify,
            draft=placed_draft,
            services=SERVICES if placed_draft is not None else [name for name in SERVICES if name != "draft"],
            fixed_ports=fixed_ports,
            supervise=supervise,
            on_line=on_line,
            on_event=notify,
        )


def bound_services(options: Mapping[str, ServiceOptions], placed: Placed) -> dict[str, ServiceOptions]:
    """Return the options of the services to run, with verify's and draft's as placed."""
    found = {"draft": placed.draft, "verify": placed.verify, "gateway": options["gateway"]}
    return {name: one for name, one in found.items() if one is not None}


@contextmanager
def _naming_variables(options: Mapping[str, ServiceOptions]) -> Iterator[None]:
    """In ConfigErrors, replace the option that begins a line with its variable if the environment gave its value."""
    try:
        yield
    except ConfigError as error:
        lines = (_with_variable(line, options) for line in error.message.splitlines())
        raise ConfigError("\n".join(lines)) from error


def _with_variable(text: str, options: Mapping[str, ServiceOptions]) -> str:
    for flag in service_flags():
        if text.startswith(f"{flag.flag}:") and flag.flag == flag.option.flag:
            return with_variable(text, options[flag.service], os.environ)
    return text


Check = Callable[[], object]


def _faults(checks: Iterable[Check]) -> list[str]:
    """Run all checks; return the distinct messages of their ConfigErrors."""
    found: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found[error.message] = None
    return list(found)


def find_faults(options: Mapping[str, ServiceOptions], gpus: int) -> list[str]:
    """Return what would keep these services from starting or from reaching each other, as far as quick checks tell.

    Each message names options as `outrider up` spells them. `gpus`: the number of GPUs of this machine.
    """
    return _faults(_service_checks(options, gpus))


def _service_checks(options: Mapping[str, ServiceOptions], gpus: int) -> list[Check]:
    verify, draft = cast(VerifyOptions, options["verify"]), cast("DraftOptions | None", options.get("draft"))
    models = dict.fromkeys(one.speculative_draft_model_path for one in (verify, draft) if one is not None)
    own = {name: [partial(with_our_flags, name, check) for check in _own_checks(one)] for name, one in options.items()}
    checks: list[Check] = [*own["verify"], *own.get("draft", ()), partial(_check_gpus, verify, draft, gpus)]
    checks.append(partial(_check_target, verify, cast(GatewayOptions, options["gateway"])))
    checks += [partial(_check_draft_model, path) for path in models]
    links = [partial(check, options, *link) for link in LINKS for check in (_check_link, _check_handshake)]
    return [*checks, *own["gateway"], *links]


def _own_checks(one: ServiceOptions) -> Iterator[Check]:
    """Yield the checks that a service makes of its own options when it starts."""
    if isinstance(one, GatewayOptions | VerifyOptions | DraftOptions):
        yield one.check
    if isinstance(one, PeerServiceOptions):
        yield one.read_auth_tokens
        yield partial(check_cores, one.engine_cpus)
    if isinstance(one, GatewayOptions):
        yield one.read_api_keys
    yield partial(_load, partial(door_tls, one))
    for peer in (peer for caller, _, peer in LINKS if isinstance(one, OPTION_TYPES[caller])):
        yield partial(peer_token, one, peer)
        yield partial(_load, partial(peer_tls, one, peer))


def _load(find: Callable[[], TlsFiles | None]) -> None:
    if files := find():
        load_material(files)


def with_our_flags(service: str, check: Check) -> None:
    """Run a check of a service, with the flags in its ConfigError renamed to those of `outrider up`."""
    try:
        check()
    except ConfigError as error:
        raise ConfigError(our_flags(service, error.message)) from error


def our_flags(service: str, text: str) -> str:
    """Return a text about a service's options with their flags as `outrider up` spells them."""
    flags = {flag.option.flag: flag.flag for flag in service_flags() if flag.service == service}
    return re.sub(r"(?<![\w/-])--[a-z][a-z0-9-]*", lambda found: flags.get(found[0], found[0]), text)


def _check_gpus(verify: VerifyOptions, draft: DraftOptions | None, gpus: int) -> None:
    """Raise ConfigError for GPUs that this machine does not have."""
    if Path("/dev/dxg").exists():  # WSL: GPUs of Windows, which does not tell how many
        return
    count = f"this machine has {count_of(gpus, 'GPU')}" if gpus else "this machine has no GPU"
    for flag, name in (("--device", verify.device), ("--draft-device", draft.device if draft else "")):
        if first_gpu(name) >= gpus and re.fullmatch(r"cuda(:\d+)?", name):
            raise ConfigError(f"{flag}: {name} does not exist; {count}, counted without torch")
    last = first_gpu(verify.device) + verify.tensor_parallel_size
    if gpus and verify.device != "cpu" and last > gpus:
        raise ConfigError(
            f"--tensor-parallel-size: {verify.tensor_parallel_size} ranks from --device {verify.device} on need {last} "
            f"GPUs; {count}, counted without torch"
        )


def first_gpu(device: str) -> int:
    """Return the GPU number in a --device; 0 if it has none."""
    number = device.partition(":")[2]
    return int(number) if number.isdecimal() else 0


def _check_own_door(options: GatewayOptions, arguments: argparse.Namespace) -> None:
    """Raise ConfigError if this command could not connect to the gateway that it starts, given --connect-tls-*."""
    if "connect_tls_ca" not in arguments:
        return
    way = peer_tls(arguments, "connect")
    if way is None and options.tls_cert:
        raise ConfigError("--connect-tls-ca: --gateway-tls-cert is set; name the CA that signed it")
    if way is not None and not options.tls_cert:
        raise ConfigError("--connect-tls-ca: the gateway has no certificate; set --gateway-tls-cert, or leave it out")
    if way is not None and options.tls_ca and not way.cert:
        raise ConfigError("--connect-tls-cert: --gateway-tls-ca requires one; name one that it signed, and its key")
    try:
        host = split_host_port(options.address, "--gateway-address")[0].strip("[]")
        door = door_tls(options)
        _load(lambda: door)
    except ConfigError:  # reported by the gateway's own checks
        return
    if door is not None and way is not None and (refusal := find_refusal(door, way, host)) is not None:
        shown, trusted = ({word: f"--{end}-tls-{word}" for word in _TLS_WORDS} for end in ("gateway", "connect"))
        raise _refused(refusal, ("the gateway service", shown), ("this command", trusted))


def _refused(
    refusal: CertificateRefusal, door: tuple[str, Mapping[str, str]], caller: tuple[str, Mapping[str, str]]
) -> ConfigError:
    """Return the error for a certificate that the other end would refuse; each end comes with its name and flags."""
    (who, own), (_, other) = (caller, door) if refusal.by_caller else (door, caller)
    flag, fix = own["ca"], "name the CA that signed it"
    if refusal.is_name:
        flag, fix = own["name"], "name the host that it is issued for"
    elif refusal.is_time:
        flag, fix = other["cert"], "renew it, or correct the clock"
    return ConfigError(f"{flag}: {who} would not accept the certificate of {other['cert']}: {refusal.reason}; {fix}")


def _check_link(options: Mapping[str, ServiceOptions], caller: str, field: str, peer: str) -> None:
    """Raise ConfigError if tokens or TLS files of a door and its caller do not fit: the caller would retry for ever."""
    if peer not in options or not is_default(options[caller], field):
        return
    flags = flag_names()
    token, own_token = ("auth_token", "auth_token_file"), (f"{peer}_auth_token", f"{peer}_auth_token_file")
    for service, given, other, needed, fix, problem in (
        (peer, token, caller, own_token, own_token[1:], "has no token to send"),
        (peer, ("tls_cert",), caller, (f"{peer}_tls_ca",), (f"{peer}_tls_ca",), "has no CA to check it with"),
        (peer, ("tls_ca",), caller, (cert := f"{peer}_tls_cert",), (cert, f"{peer}_tls_key"), "shows no certificate"),
        (caller, (f"{peer}_tls_ca",), peer, ("tls_cert",), ("tls_cert", "tls_key"), "has no certificate"),
    ):
        name = next((name for name in given if getattr(options[service], name)), "")
        if name and not any(getattr(options[other], one) for one in needed):
            words = " and ".join(flags[other, one] for one in fix)
            raise ConfigError(f"{flags[service, name]}: the {other} service {problem}; set {words}, too")
    try:
        tokens, sent = cast(PeerServiceOptions, options[peer]).read_auth_tokens(), peer_token(options[caller], peer)
    except ConfigError:  # reported by the service's own checks
        return
    if tokens and sent not in tokens:
        own_flag, peer_flag = (
            next(flags[service, name] for name in names if getattr(options[service], name))
            for service, names in ((caller, own_token), (peer, token))
        )
        raise ConfigError(f"{own_flag}: the {peer} service accepts only the tokens of {peer_flag}; give it one of them")


def _check_handshake(options: Mapping[str, ServiceOptions], caller: str, field: str, peer: str) -> None:
    """Raise ConfigError if door and caller refuse each other's certificates: the caller would retry for ever."""
    if peer not in options or not is_default(options[caller], field):
        return
    address = options[peer].address
    is_socket = is_default(options[peer], "address") or unix_path(address) is not None
    try:
        door, way = door_tls(options[peer]), peer_tls(options[caller], peer)
        name = "localhost" if is_socket else split_host_port(address, "--address")[0].strip("[]")
        missing = not door or not way or (door.ca and not way.cert)  # reported by _check_link
        refusal = None if missing else find_refusal(cast(TlsFiles, door), cast(TlsFiles, way), name)
    except ConfigError:  # reported by the service's own checks
        return
    if refusal is None:
        return
    flags = flag_names()
    shown = {word: flags.get((peer, f"tls_{word}"), "") for word in _TLS_WORDS}
    trusted = {word: flags[caller, f"{peer}_tls_{word}"] for word in _TLS_WORDS}
    raise _refused(refusal, (f"the {peer} service", shown), (f"the {caller} service", trusted))


def _target_here(verify: VerifyOptions) -> Path | None:
    """Return the target's folder; None if it must still be fetched or converted. Raises ConfigError."""
    with under("--model"):
        folder = given_folder(verify.model)
        return converted_default() if folder is None and not is_hub_id(verify.model) else folder


def _check_target(verify: VerifyOptions, gateway: GatewayOptions) -> None:
    if (folder := _target_here(verify)) is not None:
        _check_folder(folder, verify, gateway)


def _check_folder(folder: Path, verify: VerifyOptions, gateway: GatewayOptions) -> None:
    """Raise ConfigError if the target cannot be served, its chat templates cannot be read, or --tokenizer is another
    model's: the gateway would wait for better ones."""
    # Imported here: Jinja takes a while.
    from outrider.chat_template import ChatTemplate

    check_target(folder, verify)
    with under("--model"):
        count_tokens(folder)
        for shard in shard_paths(folder):  # a download may have left some incomplete
            tensor_shapes(shard)
    digest = hash_tokenizer(gateway.tokenizer) if gateway.tokenizer else ""
    if digest and digest != hash_tokenizer(folder):
        raise ConfigError(
            f"--tokenizer: the tokenizer.json of {gateway.tokenizer} is not that of the model in {folder}; name that "
            "folder, or leave it out"
        )
    with under("--tokenizer" if gateway.tokenizer else "--model"):
        for name in ("default", "tool_use"):
            ChatTemplate.load(gateway.tokenizer or folder, name)


def _check_draft_model(path: str) -> None:
    with under("--speculative-draft-model-path"):
        if path:
            given_folder(path, needs_tokenizer=False)


def door_checks(options: Mapping[str, ServiceOptions], fixed_ports: bool) -> Iterator[Check]:
    """Yield checks that raise ConfigError, naming the option, for an address that a service could not bind.

    Without `fixed_ports`, default addresses are not checked: the cluster replaces them with free ones.
    """
    taken: dict[str, str] = {}
    for flag in service_flags():
        field = flag.option.name
        if flag.service not in options or field not in ADDRESS_FIELDS:
            continue
        one = options[flag.service]
        address = getattr(one, field)
        is_socket = field == "address" and flag.service != "gateway"
        if not address or (is_default(one, field) and (is_socket or not fixed_ports)):
            continue
        yield partial(_check_door, flag, address, taken)


def _check_door(door: ServiceFlag, address: str, taken: dict[str, str]) -> None:
    flag = door.flag
    if door.option.name != "address":  # HTTP doors have no unix sockets
        split_host_port(address, flag)
    if address in taken and not address.endswith(":0"):
        raise ConfigError(f"{flag}: {address} is also the address of {taken[address]}; give each door its own")
    taken[address] = flag
    check_free(address, flag)
