"""Run all three services on this machine, as child processes of this one.

    with Cluster(verify=VerifyOptions(dtype="float32")) as cluster:
        channel = open_channel(cluster.gateway_address)
        cluster.draft.kill()
        cluster.restart("draft")

Leaving the `with` ends every process; so does the death of this process, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from outrider.cli.child import Child, LineSink, ServiceFailedError
from outrider.config.base import Option, describe_options, options_to_argv, options_to_env
from outrider.config.draft import AUTO, DRAFTING, DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.service import ServiceOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError, exit_text
from outrider.models.capacity import usable_cores
from outrider.rpc.transport import check_address

# In start order.
SERVICES = ("draft", "verify", "gateway")
MODULES = {"draft": "draft_service", "verify": "verify_service", "gateway": "gateway"}
OPTION_TYPES: dict[str, type[ServiceOptions]] = {
    "draft": DraftOptions,
    "verify": VerifyOptions,
    "gateway": GatewayOptions,
}
# (service, its option with the peer's addresses, the peer)
LINKS = (("verify", "draft", "draft"), ("gateway", "verify", "verify"))
ADDRESS_FIELDS = ("address", "rest_address", "metrics_address")
SHARED = ("log_level", "drain_seconds", "lockstep", "watchdog_timeout")
"""Options whose flags carry no service's name: one value goes to every service that has the option."""
TARGET_OPTIONS = ("device", "dtype", "disable_cuda_graph", "max_total_tokens", "mem_fraction_static")
"""Model options that both verify and draft have; flags without a service's name set verify's."""
# Options that the cluster sets: ready files, addresses of peers, and verify's copies of the draft model's options.
# Users give the latter without a service's name, and the placement decides which service gets them.
HIDDEN = (
    {(name, "ready_file") for name in SERVICES}
    | {(name, field) for name, field, _ in LINKS}
    | {("verify", name) for name in DRAFTING}
)


class ServiceFlag(NamedTuple):
    """A service's option as `outrider up`, `demo` and `chat` spell it: see `outrider.cli.options`."""

    flag: str
    service: str
    option: Option


@cache
def service_flags() -> Sequence[ServiceFlag]:
    """Return every option that a user may set, in the order of the services."""
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
            own = name in (TARGET_OPTIONS if service == "verify" else DRAFTING)
            plain = (names[name] == 1 and name not in taken) or name in SHARED or own
            flag = option.flag if plain else f"--{service}-{option.flag.removeprefix('--')}"
            flags.append(ServiceFlag(flag, service, option))
    return flags


@cache
def flag_names() -> Mapping[tuple[str, str], str]:
    """Return the flags of `service_flags` by service and field."""
    return {(service, option.name): flag for flag, service, option in service_flags()}


def place(name: str, options: ServiceOptions, folder: Path, fixed_ports: bool) -> ServiceOptions:
    """Return a service's options, with those left at their defaults replaced by the cluster's choices.

    Verify and draft get unix sockets in `folder`, where every service writes the addresses that it has bound. Other
    doors keep the default ports if `fixed_ports`; otherwise they take free ones, so that any number of clusters can run
    on a machine. Verify gets `num_threads()` threads.
    """
    changes: dict[str, Any] = {"ready_file": str(folder / f"{name}.json")}
    for field in _addresses(options):
        if not is_default(options, field):
            continue
        if field == "address" and name != "gateway":
            changes[field] = f"unix:{folder / name}.sock"
        elif not fixed_ports and getattr(options, field):
            changes[field] = "127.0.0.1:0"
    if isinstance(options, VerifyOptions) and is_default(options, "threads"):
        changes["threads"] = num_threads()
    return replace(options, **changes)


def link(options: Mapping[str, ServiceOptions]) -> dict[str, ServiceOptions]:
    """Return the options with each service's peer addresses filled in where they were left at their defaults.

    A service whose peer is not in `options` gets no addresses.
    """
    linked = dict(options)
    for name, field, peer in LINKS:
        if name in linked and is_default(linked[name], field):
            addresses: Any = (linked[peer].address,) if peer in linked else ()
            linked[name] = replace(linked[name], **{field: addresses})
    draft, verify = linked.get("draft"), linked.get("verify")
    # A draft that chooses its drafters must know the target. For grammars, n-grams take its tokenizer: they have none.
    chosen = draft.speculative_algorithm if isinstance(draft, DraftOptions) else ()
    if isinstance(draft, DraftOptions) and isinstance(verify, VerifyOptions) and chosen in (AUTO, ("NGRAM",)):
        linked["draft"] = replace(draft, target_model_path=draft.target_model_path or verify.model)
    return linked


def with_bound_addresses(options: ServiceOptions, bound: Mapping[str, str]) -> ServiceOptions:
    """Return the options with which a restarted service binds the addresses it had before.

    A door that was off stays off, even if another door serves in its place (the gateway's REST door has /metrics).
    """
    changes: dict[str, Any] = {
        field: bound[field] for field in _addresses(options) if getattr(options, field) and bound.get(field)
    }
    return replace(options, **changes)


def is_default(options: object, name: str) -> bool:
    """Whether the option has the default that its class declares."""
    return bool(getattr(options, name) == getattr(type(options), name))


def _addresses(options: ServiceOptions) -> list[str]:
    return [field.name for field in fields(options) if field.name in ADDRESS_FIELDS]


def num_cores() -> int:
    """Return the number of physical cores that this process may use."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return max(1, min(physical, usable_cores()))


def num_threads() -> int:
    """Return OMP_NUM_THREADS, or one thread for each core if it is not set."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(wanted)) if wanted.isdecimal() else num_cores()


def service_env(name: str, base: Mapping[str, str]) -> dict[str, str]:
    """Return a service's environment: numerical libraries use all cores in verify and one elsewhere.

    Idle threads sleep, because threads that spin take cores from the service that works. On a GPU shared through MPS
    verify has the lower priority.
    """
    threads = str(num_threads()) if name == "verify" else "1"
    # Under NVIDIA's MPS the draft has priority: its launches are small, and would wait for verify's large ones.
    priority = {"CUDA_MPS_CLIENT_PRIORITY": "1"} if name == "verify" else {}
    return {
        **priority,
        **base,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": base.get("OMP_WAIT_POLICY", "passive"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


LOCK = "cluster.lock"
"""Name of a file in a cluster's folder that stays locked while the process that runs the cluster lives."""


def cluster_folders() -> list[Path]:
    """Return the folders (sockets, ready files) of this user's clusters, even of killed ones, newest first."""
    found = []
    for path in Path(tempfile.gettempdir()).glob("outrider-*"):
        with suppress(OSError):  # just removed
            about = path.lstat()
            # Other users may put folders of any name there.
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid():
                found.append((about.st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def remove_dead_folders() -> None:
    """Remove the folders of this user's killed clusters: the system has released their locks."""
    for folder in cluster_folders():
        # The lock fails for a live cluster or one being removed. A folder without the file may be anything: leave it.
        with suppress(OSError), (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _lock_folder(folder: Path) -> int:
    """Lock the folder for the life of this process; return the file descriptor to close when it is removed."""
    early = folder / f"{LOCK}.tmp"
    lock = os.open(early, os.O_CREAT | os.O_WRONLY, 0o600)
    with suppress(OSError):  # without file locks the lock file is never named LOCK, so nobody removes the folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        early.rename(folder / LOCK)  # only now, so that nobody finds it unlocked
    return lock


START_SECONDS = 600.0
# A service that was asked to end is killed after drain_seconds and this many more.
GRACE_SECONDS = 5.0
WATCH_SECONDS = 0.1
FIRST_RESTART_SECONDS = 0.5
LAST_RESTART_SECONDS = 10.0
# If a service ran this long before it ended, the delay before its restart is FIRST_RESTART_SECONDS again.
SETTLED_SECONDS = 30.0


class Cluster:
    """Draft, verify and gateway, wired to each other. Entering it starts the services and waits until they are ready.

    Options left at their defaults get free ports and unix sockets (see `place`; `fixed_ports` keeps the default
    ports). `services` can leave some out. With `supervise`, a service that dies is started again, with growing delays;
    otherwise it stays dead until `restart`. `on_line(name, line)` gets the services' log lines and `on_event(text)`
    news such as restarts, both from threads of their own. `modules` and `env` replace the modules and the environment.
    """

    def __init__(
        self,
        *,
        gateway: GatewayOptions | None = None,
        verify: VerifyOptions | None = None,
        draft: DraftOptions | None = None,
        services: Sequence[str] = SERVICES,
        fixed_ports: bool = False,
        supervise: bool = False,
        on_line: LineSink | None = None,
        on_event: Callable[[str], None] | None = None,
        modules: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._gateway, self._verify = gateway or GatewayOptions(), verify or VerifyOptions()
        given = {"draft": draft or DraftOptions(), "verify": self._verify, "gateway": self._gateway}
        self._given = {name: given[name] for name in SERVICES if name in services}
        self._fixed_ports = fixed_ports
        self._supervise = supervise
        self._on_line = on_line or (lambda name, line: None)
        self._on_event = on_event or (lambda text: None)
        self._modules = {**MODULES, **(modules or {})}
        self._env = dict(os.environ if env is None else env)
        self._start_seconds = start_seconds

        self._closing = threading.Event()
        # One thread starts every child: on Linux the kernel ties a child to the thread that started it.
        self._spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")
        self._watchers: list[threading.Thread] = []
        self._locks = {name: threading.Lock() for name in self._given}
        self._options: dict[str, ServiceOptions] = {}
        self._folder: Path | None = None
        self._folder_lock: int | None = None
        self._num_folders = 0
        """How often the folder was recreated; `_folders` has this count as of each service's last start."""
        self._folders: dict[str, int] = {}
        self._endings: dict[str, str] | None = None
        self.children: dict[str, Child] = {}

    def __enter__(self) -> Cluster:
        """Start all services and wait until they serve.

        If that fails, ends what has started. Raises ServiceFailedError, or ConfigError for a TMPDIR unfit for sockets.
        """
        try:
            self._start()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) or (isinstance(error, RuntimeError) and "thread" in str(error)):
                raise ServiceFailedError(
                    f"the services cannot be started: {error}; check the limits of this user: ulimit -u, ulimit -n"
                ) from error
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def services(self) -> list[str]:
        """Names of the services, in start order."""
        return list(self._given)

    @property
    def gateway(self) -> Child:
        """The gateway's process."""
        return self.children["gateway"]

    @property
    def verify(self) -> Child:
        """The verify service's process."""
        return self.children["verify"]

    @property
    def draft(self) -> Child:
        """The draft service's process."""
        return self.children["draft"]

    @property
    def gateway_address(self) -> str:
        """Address of the gateway's gRPC door, for open_channel."""
        return self.address("gateway")

    @property
    def drain_seconds(self) -> float:
        """Longest time that running requests keep a service alive after it was asked to end."""
        return max(one.drain_seconds for one in self._given.values())

    @property
    def drafters(self) -> dict[str, tuple[str, ...]]:
        """Drafters of each service, as the service reported when it was ready.

        These can be n-grams alone, whatever was configured, if a draft model cannot draft.
        """
        if self._verify.no_speculation:
            return {}
        reported = {
            name: self.children[name].ready_info.get("drafters")
            for name in ("verify", "draft")
            if name in self.children
        }
        return {name: tuple(names.split("+")) for name, names in reported.items() if names}

    @property
    def rest_url(self) -> str:
        """URL of the gateway's REST door, without a trailing slash."""
        scheme = "https" if self._options["gateway"].tls_cert else "http"
        return f"{scheme}://{self.address('gateway', 'rest_address')}"

    @property
    def page_url(self) -> str:
        """URL of the page where people can try the model; empty with --no-page."""
        return "" if self._gateway.no_page else f"{self.rest_url}/"

    @property
    def api_key(self) -> str:
        """Bearer token that the gateway asks clients for; empty if it asks for none."""
        return self._gateway.read_api_key()

    def options(self, name: str) -> ServiceOptions:
        """Return the options that a service was started with, with the addresses that it has bound."""
        return self._options[name]

    def address(self, name: str, field: str = "address") -> str:
        """Return a service's bound `address`, `metrics_address` or `rest_address`; empty if it is off."""
        return str(getattr(self._options[name], field))

    def metrics_url(self, name: str) -> str:
        """Return the URL of a service's Prometheus page; empty if it is off."""
        if name == "gateway":
            return f"{self.rest_url}/metrics"
        address = self.address(name, "metrics_address")
        return f"http://{address}/metrics" if address else ""

    def restart(self, name: str) -> None:
        """Restart a service on the addresses that it had, ending it first if it runs; return when it serves."""
        with self._locks[name]:
            child = self.children[name]
            if child.running:
                self._end(child)
            self._launch(name)
            child.wait_ready(self._start_seconds, self._closing)

    def close(self) -> dict[str, str]:
        """End all services, the gateway first, then verify; return how each one ended. Ctrl-C meanwhile kills them."""
        if self._endings is not None:
            return self._endings
        self._closing.set()
        self._endings = endings = {}
        try:
            for watcher in self._watchers:
                watcher.join()
            with suppress(RuntimeError):  # no thread can be started, so nothing is being started either
                self._spawner.submit(lambda: None).result()
            for name in ("gateway", "verify", "draft"):
                if name in self.children:
                    self._end(self.children[name])
        except KeyboardInterrupt:
            self._on_event("interrupted again: killing what is left")
            raise
        finally:
            for name, child in self.children.items():
                child.kill()
                code = child.poll()
                endings[name] = "not started" if code is None else "ended" if code == 0 else exit_text(code)
            self._spawner.shutdown()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            if self._folder_lock is not None:
                os.close(self._folder_lock)
        return endings

    def _start(self) -> None:
        # A short path, because a socket's path is limited to about 100 bytes. mkdtemp makes it private (0700).
        try:
            remove_dead_folders()
            self._folder = Path(tempfile.mkdtemp(prefix="outrider-"))
            self._folder_lock = _lock_folder(self._folder)
        except OSError as error:
            raise ConfigError(
                f"TMPDIR: no folder for the services' sockets: {error.strerror}; set it to a folder that can be written"
            ) from error
        check_address(f"unix:{self._folder}/verify.sock", "TMPDIR")
        placed = {name: place(name, options, self._folder, self._fixed_ports) for name, options in self._given.items()}
        self._options = placed
        for name, options in self._options.items():
            self.children[name] = Child(name, self._modules[name], Path(options.ready_file), self._on_line)
        # The gateway asks verify for its model, so it starts last. A draft on a free port starts before verify, which
        # needs that port.
        first = ["draft"] if "draft" in placed and placed["draft"].address.endswith(":0") else []
        for names in (first, [name for name in SERVICES if name not in ("gateway", *first)], ["gateway"]):
            self._start_together([name for name in names if name in placed])
        if self._supervise:
            for name in self._given:
                watcher = threading.Thread(target=self._watch, args=(name,), name=f"{name}-watch", daemon=True)
                watcher.start()
                self._watchers.append(watcher)

    def _start_together(self, names: Sequence[str]) -> None:
        linked = link(self._options)
        self._options.update({name: linked[name] for name in names})
        for name in names:
            self._launch(name)
        for name in names:
            child = self.children[name]
            child.wait_ready(self._start_seconds, self._closing)
            self._options[name] = with_bound_addresses(self._options[name], child.ready_info)

    def _launch(self, name: str) -> None:
        options = self._options[name]
        if self._folder is not None:
            with suppress(FileExistsError):
                # The folder may have been removed by a cleanup of temporary files.
                self._folder.mkdir(mode=0o700)
                self._num_folders += 1
        self._folders[name] = self._num_folders
        env = {**service_env(name, self._env), **options_to_env(options)}
        self._spawner.submit(self.children[name].start, options_to_argv(options), env).result()

    def _end(self, child: Child) -> None:
        if not child.ready_info:
            # Not ready yet: there are no requests to drain, and loading a model may take minutes.
            child.kill()
        child.terminate()
        child.resume()
        if not child.wait(self._options[child.name].drain_seconds + GRACE_SECONDS):
            self._on_event(f"{child.name} did not end when asked to; killing it")
            child.kill()

    def _watch(self, name: str) -> None:
        delay = FIRST_RESTART_SECONDS
        while not self._closing.wait(WATCH_SECONDS):
            with self._locks[name]:
                code = self.children[name].poll()
                if code is None and not self._is_cut_off(name):
                    continue
            if time.monotonic() - self.children[name].started_at > SETTLED_SECONDS:
                delay = FIRST_RESTART_SECONDS
            how = "cannot be reached, for its socket was removed" if code is None else f"ended ({exit_text(code)})"
            self._on_event(f"{name} {how}; starting it again in {delay:g} s")
            if self._closing.wait(delay):
                return
            if self.children[name].running and not self._is_cut_off(name):
                continue
            delay = min(2 * delay, LAST_RESTART_SECONDS)
            try:
                self.restart(name)
                self._on_event(f"{name} serves again")
            except (ServiceFailedError, OSError) as error:
                if not self._closing.is_set():
                    self._on_event(str(error))

    def _is_cut_off(self, name: str) -> bool:
        """Whether restarted services cannot find this service's socket because the folder was removed and recreated.

        Until the first restart after the removal, all services keep their open connections.
        """
        is_in_folder = self._options[name].address.startswith(f"unix:{self._folder}/")
        return is_in_folder and self._folders[name] < self._num_folders
