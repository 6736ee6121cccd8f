"""A service's metrics page for Prometheus: serves it, and reads it for tools."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import BadStatusLine, HTTPException
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, make_wsgi_app
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from outrider.errors import ConfigError, UnavailableError, reason_of
from outrider.rpc.transport import split_host_port

_MAX_CONNECTIONS = 16
"""Connections to a page at the same time; further ones are closed."""
_REQUEST_SECONDS = 10.0
"""Time that a client has to send its request and read the page."""


@contextmanager
def serve_metrics(address: str, registry: CollectorRegistry) -> Iterator[str]:
    """Serve /metrics of a registry, from a thread of its own, until the block ends.

    `address` is host:port; port 0 takes a free port, and an empty address serves nothing. Yields the address that was
    bound. Raises ConfigError if it cannot be bound.
    """
    if not address:
        yield ""
        return
    host, port = split_host_port(address, "--metrics-address")
    try:
        server = _PageServer(host.strip("[]"), port, registry)
    except OSError as error:
        raise ConfigError(
            f"--metrics-address: cannot bind {address}: {error.strerror}; use another port, 0 for a free one"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _PageServer(ThreadingMixIn, WSGIServer):
    """Serves each connection in a thread of its own. Connections are few, and none waits long for its client."""

    daemon_threads = True

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Bind. Raises OSError."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = found[0]
        super().__init__((str(found[4][0]), port), _PageHandler)
        self._page = make_wsgi_app(registry)
        self.set_app(self._answer)
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def server_bind(self) -> None:
        """Bind as a plain TCP server does, because the base asks DNS for the host's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """See the base."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def finish_request(self, request: Any, client_address: Any) -> None:
        """See the base."""
        late = threading.Timer(_REQUEST_SECONDS, _hang_up, (request,))
        late.daemon = True
        try:
            late.start()
            super().finish_request(request, client_address)
        finally:
            late.cancel()
            self._places.release()

    def _answer(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] in ("/", "/metrics"):
            page: Iterable[bytes] = self._page(environ, start_response)
            return page
        start_response("404 Not Found", [("content-type", "text/plain; charset=utf-8")])
        return [b"there is no such page; see /metrics\n"]


def _hang_up(connection: socket.socket) -> None:
    """Shut a connection down, so that pending reads and writes end."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _PageHandler(WSGIRequestHandler):
    def handle(self) -> None:
        """See the base."""
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because scrapers come all the time."""


class ServiceCollector(Collector):
    """Memory, CPU and files of a service, summed over its own process and those below it, such as its engine's.

    CPU time includes that of processes that have ended, or it would fall whenever one ends. The start time and the
    limit of open files are those of the service's own process.
    """

    def collect(self) -> Iterator[Metric]:
        """Yield Prometheus's usual process metrics."""
        totals = {metric.name: metric for metric in ProcessCollector(registry=None).collect()}
        family = [os.getpid(), *_children(os.getpid())]
        for pid in family[1:]:
            for metric in ProcessCollector(registry=None, pid=partial(int, pid)).collect():
                if metric.name in _SUMMED and metric.name in totals:
                    total = totals[metric.name]
                    pairs = zip(total.samples, metric.samples, strict=True)
                    total.samples = [own._replace(value=own.value + other.value) for own, other in pairs]
        if cpu := totals.get("process_cpu_seconds"):
            cpu.samples = [cpu.samples[0]._replace(value=sum(map(_cpu_seconds, family)))]
        yield from totals.values()


_SUMMED = ("process_resident_memory_bytes", "process_virtual_memory_bytes", "process_open_fds")


def _children(pid: int) -> Iterator[int]:
    """Yield the processes below one, if the system lists them; those that end meanwhile are left out."""
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = tasks.read_text().split()
        except OSError:
            continue
        for child in map(int, found):
            yield child
            yield from _children(child)


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of the ended children that it has waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    return sum(map(int, stat.rpartition(")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")


WANTS_KEY = "metrics_page_wants_key"
"""Code of the error for a page that only holders of a key may read."""
MAX_PAGE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Histogram:
    """A Prometheus histogram: the sum and number of its observations, and how many lie up to each bound."""

    total: float
    count: float
    bounds: dict[float, float]

    @property
    def mean(self) -> float:
        """Mean of all observations; 0 without any."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Estimate below which value `share` of the observations lie, if evenly spread in a bucket; 0 without any."""
        lower = below = 0.0
        for bound, count in sorted(self.bounds.items()):
            if count >= share * self.count and count > below:
                upper = 2 * lower if bound == float("inf") else bound
                return lower + (upper - lower) * (share * self.count - below) / (count - below)
            lower, below = bound, count
        return 0.0


_PAGES = "give the REST door of a gateway or a --metrics-address"
SHOWS_CERTIFICATE = "--connect-tls-cert shows the door a certificate, where it wants one"
TRUSTS_CERTIFICATE = (
    "--connect-tls-ca says what the door's certificate is signed with, --connect-tls-name the name in it"
)
BEGINS_WITH_HTTPS = "begin it with https:// where the door has TLS"
_FIXES: dict[type[Exception], str] = {
    ssl.SSLCertVerificationError: TRUSTS_CERTIFICATE,
    ssl.SSLError: f"begin it with http:// where the door has no TLS; {SHOWS_CERTIFICATE}",
    ConnectionRefusedError: f"nobody listens there: {_PAGES}, as `outrider up` prints them",
}
"""Advice for each kind of connection error; the first kind that matches applies."""


@dataclass
class MetricsPage:
    """One reading of a metrics page, or the difference of two. Samples with labels are named `name{label}`. The bare
    name of a histogram with labels stands for their sum."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)

    @classmethod
    def read(
        cls, url: str, *, token: str = "", timeout: float = 10.0, tls: ssl.SSLContext | None = None
    ) -> MetricsPage:
        """Scrape a page. `timeout` is in seconds. Raises UnavailableError."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            request = urllib.request.Request(url, headers=headers)
            # Without a proxy, like all other connections to services.
            handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
            with urllib.request.build_opener(*handlers).open(request, timeout=timeout) as answer:
                text = answer.read(MAX_PAGE_BYTES).decode(errors="replace")
        except urllib.error.HTTPError as error:
            code, fix = (WANTS_KEY, "") if error.code == 401 else (None, f"; {_PAGES}")
            raise UnavailableError(f"{url} answers {error.code} {error.reason}{fix}", code=code) from None
        except BadStatusLine as error:
            if url.startswith("https:") and isinstance(error, ConnectionError):
                raise UnavailableError(f"{url} ends the connection without an answer; {SHOWS_CERTIFICATE}") from None
            raise UnavailableError(
                f"{url} does not speak HTTP; {_PAGES}, not a gRPC door, and {BEGINS_WITH_HTTPS}"
            ) from None
        except (OSError, HTTPException, ValueError) as error:
            cause = getattr(error, "reason", None)  # of a URLError
            reason = cause if isinstance(cause, Exception) else error
            fix = next((fix for kind, fix in _FIXES.items() if isinstance(reason, kind)), _PAGES)
            raise UnavailableError(f"{url} cannot be read: {reason_of(reason)}; {fix}") from None
        try:
            return cls.parse(text)
        except ValueError:
            raise UnavailableError(f"{url} is no metrics page; {_PAGES}") from None

    @classmethod
    def parse(cls, text: str) -> MetricsPage:
        """Parse the text of a page. Raises ValueError if it is not one."""
        page = cls()
        for family in text_string_to_metric_families(text):
            if family.type == "histogram":
                page.histograms[family.name] = _histogram(family.name, family.samples)
                labelled: dict[str, list[Sample]] = {}
                for sample in family.samples:
                    labelled.setdefault(_labels(sample), []).append(sample)
                for labels, samples in labelled.items():
                    if labels:
                        page.histograms[f"{family.name}{{{labels}}}"] = _histogram(family.name, samples)
            for sample in family.samples:
                labels = _labels(sample)
                name = f"{family.name}{{{labels}}}" if labels else family.name
                if family.type == "counter" and sample.name.endswith("_total"):
                    page.counters[name] = sample.value
                elif family.type == "gauge":
                    page.gauges[name] = sample.value
        return page

    def since(self, before: MetricsPage) -> MetricsPage:
        """Return the increase of counters and histograms since `before`, and gauges as they are now.

        A service that was restarted counts from zero, and so does the difference.
        """
        counters = {name: _rise(value, before.counters.get(name, 0.0)) for name, value in self.counters.items()}
        histograms = {
            name: _minus(value, before.histograms[name]) if name in before.histograms else value
            for name, value in self.histograms.items()
        }
        return MetricsPage(counters, self.gauges, histograms)

    def histogram(self, name: str) -> Histogram:
        """Return a histogram by its family's name; empty if there is none."""
        return self.histograms.get(name, Histogram(0.0, 0.0, {}))

    def labelled(self, name: str) -> Iterator[tuple[str, float]]:
        """Yield label values, in the order of label names, and the value of each sample of a counter or gauge."""
        for full, value in (*self.counters.items(), *self.gauges.items()):
            if full.startswith(f"{name}{{"):
                yield full[len(name) + 1 : -1], value

    def total(self, name: str) -> float:
        """Return the sum over all labels of a counter or gauge; 0 if there is none."""
        plain = self.counters.get(name, self.gauges.get(name, 0.0))
        return plain + sum(value for _, value in self.labelled(name))


def _labels(sample: Sample) -> str:
    """Return the values of a sample's labels, except bucket bounds, in the order of label names."""
    return ",".join(value for name, value in sorted(sample.labels.items()) if name != "le")


def _histogram(name: str, samples: Iterable[Sample]) -> Histogram:
    sums: dict[str, float] = {}
    bounds: dict[float, float] = {}
    for sample in samples:
        part = sample.name.removeprefix(name)
        if part == "_bucket":
            bound = float(sample.labels["le"])
            bounds[bound] = bounds.get(bound, 0.0) + sample.value
        else:
            sums[part] = sums.get(part, 0.0) + sample.value
    return Histogram(sums.get("_sum", 0.0), sums.get("_count", 0.0), bounds)


def _rise(after: float, before: float) -> float:
    return after - before if after >= before else after


def _minus(after: Histogram, before: Histogram) -> Histogram:
    if after.count < before.count:
        return after
    bounds = {bound: count - before.bounds.get(bound, 0.0) for bound, count in after.bounds.items()}
    return Histogram(after.total - before.total, after.count - before.count, bounds)
