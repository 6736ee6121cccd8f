"""Layers of small models with norm, product and rotation in one launch give what they give apart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny, token_ids

from kernels.launch import triton_on_cpu
from outrider.attention.paged import PagedBatch
from outrider.attention.triton_backend import TritonAttention
from outrider.cache.kv import KVCache
from outrider.models.decoder import CausalLM
from outrider.models.loader import load_model

sys.path.append(str(Path(__file__).parent.parent / "kernels"))

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interprets; tests/gpu runs whole models on the GPU")

PAGE, CONTEXT, COUNT = 4, 8, 5
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 64},
    "Qwen2": {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128},
    "Qwen3": {"head_dim": 64, "hidden_size": 72},
    "narrow": {"head_dim": 16},
}


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(model: CausalLM, kv: KVCache) -> torch.Tensor:
    """Logits of a chain of tokens over a context; writes their k and v, but for the last one's."""
    places = range(CONTEXT, CONTEXT + COUNT)
    batch = PagedBatch(
        token_ids=token_ids(COUNT).int(),
        positions=ints(list(places)),
        first=ints([0, COUNT]),
        cached_len=ints([CONTEXT]),
        table_rows=ints([0]),
        page_tables=ints(list(range(kv.num_slots // PAGE))).unsqueeze(0),
        slots=ints([*places[:-1], -1]),
        page_size=PAGE,
        max_row_tokens=COUNT,
        mask=ints([(2 << place) - 1 for place in range(COUNT)]).unsqueeze(1),
    )
    return model.logits(model.forward(batch, kv, TritonAttention()))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_keys_are_those_of_separate_launches(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import interpreter  # noqa: F401  # loops to computed bounds

    save_tiny(tmp_path, "Llama" if name == "narrow" else name, **FAMILIES[name])
    # oneDNN lays float32 weights out anew, and float16 ones not.
    model = load_model(tmp_path, torch.float16)
    caches = []
    for _ in range(2):
        torch.manual_seed(3)
        caches.append(model.new_kv(16))
        caches[-1].k.normal_()
        caches[-1].v.normal_()
    expected = run(model, caches[0])

    heads_apart: list[int] = []
    from outrider.attention import triton_backend

    rope_write = triton_backend.rope_write

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        heads_apart.append(1)
        return rope_write(*args, **options)

    monkeypatch.setattr(triton_backend, "rope_write", counted)
    with triton_on_cpu():
        result = run(model, caches[1])
    assert not heads_apart
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    for written, wanted in ((caches[1].k, caches[0].k), (caches[1].v, caches[0].v)):
        # The last token has no slot: what it would write is not there.
        torch.testing.assert_close(written, wanted, rtol=2e-2, atol=2e-2)
