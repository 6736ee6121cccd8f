"""What a service tells of its memory and CPU covers the processes below it."""

from __future__ import annotations

import subprocess
import sys

from prometheus_client import CollectorRegistry, ProcessCollector

from draft_service.door.metrics import DraftMetrics
from outrider.metrics import ServiceCollector
from verify_service.door.metrics import VerifyMetrics

_HOLD = "import sys; held = bytearray(b'x') * (200 << 20); print('there', flush=True); sys.stdin.read()"


_WORK = """
import sys, time
while time.process_time() < 0.5:
    pass
print('there', flush=True)
sys.stdin.read()
"""


def value(collector: object, name: str) -> float:
    registry = CollectorRegistry()
    registry.register(collector)  # type: ignore[arg-type]
    found = registry.get_sample_value(name)
    assert found is not None
    return found


def own_and_all(code: str, name: str) -> tuple[float, float, float]:
    """A figure of this process, of this one with a child that runs the code, and the same when the child has ended."""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"there\n"
        own, all_of_them = value(ProcessCollector(registry=None), name), value(ServiceCollector(), name)
        child.communicate(b"")
    return own, all_of_them, value(ServiceCollector(), name)


def test_memory_of_a_process_below_counts() -> None:
    own, all_of_them, after = own_and_all(_HOLD, "process_resident_memory_bytes")
    assert all_of_them > own + (190 << 20) and all_of_them > after + (190 << 20)


def test_cpu_of_a_process_below_counts_also_when_it_has_ended() -> None:
    own, all_of_them, after = own_and_all(_WORK, "process_cpu_seconds_total")
    assert all_of_them > own + 0.45 and after >= all_of_them


def test_verify_and_draft_tell_of_their_engines() -> None:
    for registry in (VerifyMetrics().registry, DraftMetrics(("ngram",)).registry):
        assert any(isinstance(collector, ServiceCollector) for collector in registry._collector_to_names)
