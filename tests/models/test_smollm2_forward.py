"""The default model's real weights compute what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import relative_error, run_one

from kernels.cpu.isa import cpu_flags
from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.models.decoder import CausalLM
from outrider.models.loader import load_model

PROMPTS = [
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "In 1969, 2 men walked 3.5 hours on the moon; 400000 people had worked for it, and",
    "def fibonacci(n):\n    ",
]


@pytest.fixture(scope="module")
def model(model_path: Path) -> CausalLM:
    return load_model(model_path)


@pytest.fixture(scope="module")
def reference(model_path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(model_path: Path) -> list[torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    return [torch.tensor(tokenizer(prompt).input_ids) for prompt in PROMPTS]


def test_default_model_logits_equal_transformers(model: CausalLM, reference: Any, prompts: list[torch.Tensor]) -> None:
    for ids in prompts:
        logits = run_one(model, model.new_kv(ids.numel()), ids, torch.arange(ids.numel()))
        with torch.inference_mode():
            assert relative_error(logits, reference(ids[None]).logits[0]) <= 1e-4


@pytest.mark.skipif("avx512_bf16" not in cpu_flags(), reason="measured with these instructions alone")
def test_a_root_in_bfloat16_has_the_same_bits_alone_and_above_any_tree(model_path: Path) -> None:
    model = load_model(model_path, torch.bfloat16)
    generator = torch.Generator().manual_seed(4)
    for context in (5, 17, 100, 530):
        ids = torch.randint(5, 40000, (context + 40,), generator=generator)
        kv, slots = model.new_kv(context + 64), torch.arange(context + 64)
        run_one(model, kv, ids[: context - 1], slots[: context - 1])
        found = []
        for count in (1, 2, 4, 7, 11, 24, 40):  # the root, and children of it
            mask = torch.eye(count, dtype=torch.bool)
            mask[:, 0] = True
            positions = torch.full((count,), context)
            positions[0] -= 1
            segment = Segment(count, slots[: context - 1 + count], mask)
            batch = ForwardBatch(ids[context - 1 : context - 1 + count], positions, [segment])
            with torch.inference_mode():
                found.append(model.logits(model.forward(batch, kv, TorchAttention())[:1])[0])
        assert all(torch.equal(one, found[0]) for one in found[1:]), context
