"""Logits on the GPU against transformers on the same GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from paged_request import PagedRequest
from torch import Tensor

from outrider.attention.triton_backend import TritonAttention
from outrider.models.loader import load_model

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 448,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
PARENTS = [-1, 0, 1, 1, 0, 4, 2, 6, 7, 0, 5]
"""A tree of 11 tokens below a prompt."""


def save(folder: Path, family: str, **changes: Any) -> Any:
    """A random model whose every weight matters; transformers' own, float32 on the GPU."""
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            # The default start, biases of zero and norms of one, would hide a weight in the wrong place.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model.cuda().eval()


def chain_of(index: int) -> list[int]:
    """The tokens of the tree on the path to one of them."""
    chain: list[int] = []
    while index >= 0:
        chain.insert(0, index)
        index = PARENTS[index]
    return chain


@torch.inference_mode()
def their_logits(model: Any, prompt: list[int], tree: list[int]) -> tuple[Tensor, Tensor]:
    """Of the prompt, and of every tree token after the prompt and its own path."""
    whole = model(torch.tensor([prompt], device="cuda")).logits[0].float()
    rows = []
    for index in range(len(tree)):
        ids = prompt + [tree[place] for place in chain_of(index)]
        rows.append(model(torch.tensor([ids], device="cuda")).logits[0, -1].float())
    return whole, torch.stack(rows)


def error(actual: Tensor, truth: Tensor) -> float:
    """Root mean square of the difference over that of the truth."""
    return float((actual - truth).norm() / truth.norm())


@pytest.mark.parametrize(
    ("family", "head_dim", "dtype"),
    [
        ("Llama", 64, torch.bfloat16),
        ("Llama", 128, torch.float16),
        ("Qwen2", 64, torch.float16),
        ("Qwen2", 128, torch.bfloat16),
        ("Qwen3", 64, torch.bfloat16),
        ("Qwen3", 128, torch.float16),
    ],
)
def test_logits_are_as_near_the_truth_as_those_of_transformers(
    tmp_path: Path, family: str, head_dim: int, dtype: torch.dtype
) -> None:
    exact = save(tmp_path, family, head_dim=head_dim)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 320, (150,), generator=generator).tolist()
    tree = torch.randint(0, 320, (len(PARENTS),), generator=generator).tolist()
    truth = their_logits(exact, prompt, tree)
    theirs = their_logits(exact.to(dtype), prompt, tree)
    model = load_model(tmp_path, dtype, "cuda")
    request = PagedRequest(model, TritonAttention())
    # In chunks of which none ends with a page.
    whole = torch.cat([request.prefill(prompt[:70]), request.prefill(prompt[70:])])
    assert error(whole, truth[0]) < 1.5 * error(theirs[0], truth[0]) + 1e-4
    for by_path in (False, True):
        rows = request.tree(tree, PARENTS, by_path)
        assert error(rows, truth[1]) < 1.5 * error(theirs[1], truth[1]) + 1e-4


def test_float32_logits_are_those_of_transformers(tmp_path: Path) -> None:
    exact = save(tmp_path, "Llama", head_dim=64)
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(0, 320, (90,), generator=generator).tolist()
    tree = torch.randint(0, 320, (len(PARENTS),), generator=generator).tolist()
    truth = their_logits(exact, prompt, tree)
    request = PagedRequest(load_model(tmp_path, torch.float32, "cuda"), TritonAttention())
    # A tensor core's float32 product has 10 bits of each factor.
    assert error(request.prefill(prompt), truth[0]) < 2e-3
    assert error(request.tree(tree, PARENTS), truth[1]) < 2e-3
