"""What tests on a GPU share: models that are made once, and the engine's test helpers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from page_integrity import check_memory

from outrider.models.decoder import CausalLM
from verify_service.executors.cuda import CudaExecutor

# Engine and runners are driven on a GPU as they are on a CPU.
for _folder in ("verify", "burst", "models"):
    sys.path.append(str(Path(__file__).parent.parent / _folder))

from deterministic_drafts import Start  # noqa: E402
from threaded_engine import ThreadedEngine  # noqa: E402

Models = Callable[..., CausalLM]


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """cuda_harness.small_model on the GPU, each made once."""
    from cuda_harness import small_model

    made: dict[tuple[object, ...], CausalLM] = {}

    def make(
        family: str = "Llama", head_dim: int = 64, dtype: torch.dtype = torch.bfloat16, **changes: Any
    ) -> CausalLM:
        key = (family, head_dim, dtype, *sorted(changes.items()))
        if key not in made:
            made[key] = small_model(tmp_path_factory.mktemp("small"), family, head_dim, dtype, "cuda", **changes)
        return made[key]

    return make


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes engines and starts them; in the end nothing may be left in them."""
    from cuda_harness import make_paged_engine

    made: list[ThreadedEngine] = []

    def begin(model: CausalLM, **options: object) -> tuple[ThreadedEngine, CudaExecutor]:
        engine, executor = make_paged_engine(model, **options)  # type: ignore[arg-type]
        made.append(engine)
        engine.start()
        return engine, executor

    yield begin
    for engine in made:
        engine.stop()
        check_memory(engine.memory)
        assert engine.memory.num_used == engine.memory.radix.num_pages, "a page leaked"


@pytest.fixture(scope="session")
def test_model() -> Path:
    """The folder of a real checkpoint."""
    folder = os.environ.get("OUTRIDER_TEST_MODEL")
    if not folder:
        pytest.skip("OUTRIDER_TEST_MODEL names no folder with a checkpoint")
    return Path(folder)
