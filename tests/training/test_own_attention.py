from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider_tools.training.attention import own_attention


def own_attention_explicit(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
    """own_attention by its definition, with all scores in memory."""
    scale = q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    true = (q @ k.transpose(-1, -2)).float().masked_fill(hidden, float("-inf")) * scale
    own = torch.einsum("bhtd,bhjtd->bhtj", q, own_k).float() * scale
    weights = torch.cat([true, own], -1).softmax(-1).to(v.dtype)
    true, own = weights.split((q.shape[2], own_k.shape[2]), -1)
    output: Tensor = true @ v + torch.einsum("bhtj,bhjtd->bhtd", own, own_v)
    return output


def inputs(device: str, dtype: torch.dtype, steps: int = 3, width: int = 40) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    true, own = (2, 3, width, 16), (2, 3, steps, width, 16)
    shapes = (true, true, true, own, own)
    found = [torch.randn(shape, generator=random) * 1.5 for shape in shapes]
    return [tensor.to(device, dtype).requires_grad_() for tensor in found]


def check(device: str, dtype: torch.dtype, tolerance: float) -> None:
    tensors = inputs(device, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    grad = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    output, expected = own_attention(*tensors), own_attention_explicit(*exact)
    output.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    for name, got, want in zip(("q", "k", "v", "own_k", "own_v"), tensors, exact, strict=True):
        assert got.grad is not None and want.grad is not None
        error = (got.grad.double() - want.grad).abs().max() / want.grad.abs().max()
        assert error < tolerance, f"gradient of {name} is off by {error:.2e} of its largest"


def test_flash_merged_with_own_keys_equals_the_definition() -> None:
    check("cpu", torch.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float32, 2e-3)])
def test_the_same_on_the_gpu(dtype: torch.dtype, tolerance: float) -> None:
    check("cuda", dtype, tolerance)


def test_definition_sees_true_keys_up_to_the_query_and_its_own_column() -> None:
    q, k, v, own_k, own_v = (tensor.detach() for tensor in inputs("cpu", torch.float32))
    before = own_attention_explicit(q, k, v, own_k, own_v)
    v[:, :, 21] += 1.0
    own_v[:, :, :, 30] += 1.0
    changed = (own_attention_explicit(q, k, v, own_k, own_v) - before).abs().amax((0, 1, 3)) > 1e-7
    assert changed.tolist() == [place >= 21 for place in range(40)]
