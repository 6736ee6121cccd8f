"""The real system: three processes, the real model, float32 so that outputs can be compared token by token."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cli.cluster import Cluster
from outrider.config.verify import VerifyOptions

# Services that run within a test are driven as in their own tests.
for _sibling in ("verify", "draft"):
    sys.path.append(str(Path(__file__).parent.parent / _sibling))


def show(name: str, line: str) -> None:
    """Log lines of services are shown with a test that fails."""
    print(f"{name}: {line}", file=sys.stderr)


@pytest.fixture(scope="session")
def cluster(model_path: Path) -> Iterator[Cluster]:
    """For all files that ask it: it takes 20 s to start. A test that ends a service starts it again."""
    options = VerifyOptions(model=str(model_path), dtype="float32", max_total_tokens=8192, served_model_name="smollm2")
    with Cluster(verify=options, on_line=show) as running:
        yield running
    assert set(running.close().values()) == {"ended"}, "a service did not end by itself"
