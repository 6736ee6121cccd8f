from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_of_metrics_is_what_the_services_export() -> None:
    fresh = runpy.run_path(str(ROOT / "scripts" / "gen_metrics"))["page"]()
    assert (ROOT / "docs" / "metrics.md").read_text() == fresh, "docs/metrics.md is not current; run: make metrics"
