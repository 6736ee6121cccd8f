"""The gateway's image holds what the gateway loads, and no more than that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Loads the gateway and the command line's health check, and what they load only when they work.
PROBE = """
import importlib, importlib.metadata, pkgutil, sys
for name in ("gateway", "outrider.cli.health", "uvicorn.protocols.http.h11_impl", "anyio._backends._asyncio"):
    module = importlib.import_module(name)
    for inner in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        if not inner.name.endswith("__main__"):
            importlib.import_module(inner.name)
owners = importlib.metadata.packages_distributions()
print(*sorted({owners[top][0] for top in {name.partition(".")[0] for name in sys.modules} if top in owners}))
"""
# Share a top-level package with what the gateway loads, or are loaded where they happen to be there.
BESIDE = {"outrider", "setuptools", "sniffio", "grpcio-tools"}


def listed() -> set[str]:
    lines = (ROOT / "docker" / "requirements-gateway.txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def test_everything_that_the_gateway_loads_is_in_its_image() -> None:
    result = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    loaded = {name.lower().replace("_", "-") for name in result.stdout.split()} - BESIDE
    assert loaded - listed() == set(), "add it to docker/requirements-gateway.txt"


def test_the_image_s_packages_are_pinned_and_torch_is_not_among_them() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line}
    assert listed() <= pinned
    assert not {"torch", "triton", "transformers", "huggingface-hub", "safetensors"} & listed()
