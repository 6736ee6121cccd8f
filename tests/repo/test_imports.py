from __future__ import annotations

import graphlib
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]

TORCH_FREE = [
    "gateway",
    "outrider.drafting.ngram",
    "outrider.drafting.registry",
    "outrider.drafting.model.burst_grower",
    "draft_service.main",
    "draft_service.engine.worker",
    "outrider.cli",
    "outrider.config",
    "outrider.errors",
    "outrider.logs",
    "outrider.host",
    "outrider.models.drafters.kinds",
    "outrider.rpc",
    "outrider.sampling.noise",
    "outrider.sampling.params",
    "outrider.tree",
    "verify_service.main",
]

# Imports each module named and all modules below them, then prints which of the heavy ones came along.
PROBE = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for inner in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        if not inner.name.endswith("__main__"):
            importlib.import_module(inner.name)
        heavy = {"torch", "transformers", "triton"} & set(sys.modules)
        assert not heavy, (inner.name, heavy)
print(*sorted({"torch", "transformers", "triton"} & set(sys.modules)))
"""


def run(*command: str) -> str:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_what_needs_no_torch_imports_without_it() -> None:
    assert run(sys.executable, "-c", PROBE, *TORCH_FREE).split() == []


def test_importing_outrider_imports_neither_torch_nor_grpc() -> None:
    loaded = run(sys.executable, "-c", "import sys, outrider, outrider.errors; print(*sys.modules)").split()
    assert not {"torch", "grpc", "numpy"} & set(loaded)


def test_no_module_is_in_a_circle_of_imports() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    graph = grimp.build_graph(*packages, cache_dir=None)
    order = graphlib.TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules})
    order.prepare()  # raises CycleError, which names the circle


def test_transformers_gets_along_with_our_package_named_kernels() -> None:
    # transformers asks for the version of a package called `kernels` and fails to import if there is none.
    import kernels

    assert kernels.__version__ and str(kernels.__file__).startswith(str(ROOT))
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=1))
