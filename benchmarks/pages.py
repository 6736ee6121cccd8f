"""Metrics pages and the costs of processes, read before and after a run."""

from __future__ import annotations

import shutil
import subprocess
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import psutil
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Histogram:
    """A Prometheus histogram: the sum and number of its observations, and how many lie up to each bound."""

    total: float
    count: float
    bounds: dict[float, float]

    @property
    def mean(self) -> float:
        """Of all observations; 0 without any."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """About where `share` of the observations are below, evenly spread in their bucket; 0 without any."""
        lower = below = 0.0
        for bound, count in sorted(self.bounds.items()):
            if count >= share * self.count and count > below:
                upper = 2 * lower if bound == float("inf") else bound
                return lower + (upper - lower) * (share * self.count - below) / (count - below)
            lower, below = bound, count
        return 0.0


@dataclass
class Page:
    """One reading of a metrics page, or the difference of two. Samples with labels are named `name{label}`."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)

    @classmethod
    def read(cls, url: str) -> Page:
        """Scrape a page."""
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        page = cls()
        for family in text_string_to_metric_families(text):
            if family.type == "histogram":
                page.histograms[family.name] = _histogram(family.name, family.samples)
            for sample in family.samples:
                labels = ",".join(value for _, value in sorted(sample.labels.items()))
                name = f"{family.name}{{{labels}}}" if labels else family.name
                if family.type == "counter" and sample.name.endswith("_total"):
                    page.counters[name] = sample.value
                elif family.type == "gauge":
                    page.gauges[name] = sample.value
        return page

    def since(self, before: Page) -> Page:
        """What came to counters and histograms since; gauges as they are now."""
        counters = {name: value - before.counters.get(name, 0.0) for name, value in self.counters.items()}
        histograms = {
            name: _minus(value, before.histograms[name]) if name in before.histograms else value
            for name, value in self.histograms.items()
        }
        return Page(counters, self.gauges, histograms)

    def counter(self, name: str) -> float:
        """A counter by its family's name; 0 where there is none."""
        return self.counters.get(name, 0.0)

    def histogram(self, name: str) -> Histogram:
        """A histogram by its family's name; empty where there is none."""
        return self.histograms.get(name, Histogram(0.0, 0.0, {}))

    def labelled(self, name: str) -> Iterator[tuple[str, float]]:
        """Labels and values of a counter or gauge."""
        for full, value in (*self.counters.items(), *self.gauges.items()):
            if full.startswith(f"{name}{{"):
                yield full[len(name) + 1 : -1], value


def _histogram(name: str, samples: Iterable[object]) -> Histogram:
    sums: dict[str, float] = {}
    bounds: dict[float, float] = {}
    for sample in samples:
        labels, value = sample.labels, sample.value  # type: ignore[attr-defined]
        part = sample.name.removeprefix(name)  # type: ignore[attr-defined]
        if part == "_bucket":
            bounds[float(labels["le"])] = bounds.get(float(labels["le"]), 0.0) + value
        else:
            sums[part] = sums.get(part, 0.0) + value
    return Histogram(sums.get("_sum", 0.0), sums.get("_count", 0.0), bounds)


def _minus(after: Histogram, before: Histogram) -> Histogram:
    bounds = {bound: count - before.bounds.get(bound, 0.0) for bound, count in after.bounds.items()}
    return Histogram(after.total - before.total, after.count - before.count, bounds)


@dataclass(frozen=True)
class Cost:
    """What a service's processes, all together, have used by now."""

    cpu_seconds: float
    resident_mib: float
    gpu_mib: float
    """Memory that they hold on GPUs; 0 where there is none, or where the driver does not tell."""


def cost_of(pid: int) -> Cost:
    """Of a process and all its descendants."""
    family = psutil.Process(pid)
    members = [family, *family.children(recursive=True)]
    cpu = resident = 0.0
    for member in members:
        # One may end between being listed and being asked.
        try:
            cpu += sum(member.cpu_times()[:2])
            resident += member.memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            continue
    on_gpu = gpu_memory()
    return Cost(cpu, resident, sum(on_gpu.get(member.pid, 0.0) for member in members))


def gpu_memory() -> dict[int, float]:
    """MiB on all GPUs by process id; empty without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    found: dict[int, float] = {}
    for line in done.stdout.splitlines():
        pid, _, used = line.partition(",")
        if pid.strip().isdecimal() and used.strip().isdecimal():
            found[int(pid)] = found.get(int(pid), 0.0) + float(used)
    return found
