"""The one JSON file that a benchmark writes."""

from __future__ import annotations

from outrider_tools.bench.report import Row, cpu_name, write_report

__all__ = ["Row", "cpu_name", "write_report"]
