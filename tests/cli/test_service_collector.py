"""What a service tells of its memory and CPU covers the processes below it."""

from __future__ import annotations

import subprocess
import sys

from prometheus_client import CollectorRegistry, ProcessCollector

from outrider.metrics import ServiceCollector

_HOLD = "import sys; held = bytearray(b'x') * (200 << 20); print('there', flush=True); sys.stdin.read()"


def memory(collector: object) -> float:
    registry = CollectorRegistry()
    registry.register(collector)  # type: ignore[arg-type]
    value = registry.get_sample_value("process_resident_memory_bytes")
    assert value is not None and registry.get_sample_value("process_cpu_seconds_total") is not None
    return value


def test_memory_of_a_process_below_counts() -> None:
    command = [sys.executable, "-c", _HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"there\n"
        own, all_of_them = memory(ProcessCollector(registry=None)), memory(ServiceCollector())
        child.communicate(b"")
    assert all_of_them > own + (190 << 20)
