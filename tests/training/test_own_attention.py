from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider_tools.training.attention import OwnKeyMerger, Spans, causal_attention, own_attention

BOUNDS = (0, 25, 25, 40)


def own_attention_explicit(q: Tensor, k: Tensor, v: Tensor, own_k: list[Tensor], own_v: list[Tensor]) -> Tensor:
    """own_attention by its definition, with all scores in memory."""
    scale, group = q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    k, v, *own = (part.repeat_interleave(group, 1) for part in (k, v, *own_k, *own_v))
    owners = torch.bucketize(torch.arange(len(q)), torch.tensor(BOUNDS[1:]), right=True)
    seen = (owners[:, None] == owners[None]) & torch.ones(len(q), len(q), dtype=torch.bool).tril()
    true = torch.einsum("thd,shd->hts", q, k).masked_fill(~seen.to(q.device), float("-inf")) * scale
    scores = [(q * key).sum(-1).t().unsqueeze(-1) * scale for key in own[: len(own_k)]]
    weights = torch.cat([true, *scores], -1).softmax(-1)
    output = torch.einsum("hts,shd->thd", weights[..., : len(q)], v)
    for number, value in enumerate(own[len(own_k) :]):
        output = output + weights[..., len(q) + number].t().unsqueeze(-1) * value
    return output


def inputs(device: str, dtype: torch.dtype, steps: int = 3) -> list[Tensor]:
    """q, k, v, own keys, own values; two queries share a key."""
    random = torch.Generator().manual_seed(1)
    shapes = [(BOUNDS[-1], 4, 16)] + [(BOUNDS[-1], 2, 16)] * (2 + 2 * steps)
    found = [torch.randn(shape, generator=random) * 1.5 for shape in shapes]
    return [tensor.to(device, dtype).requires_grad_() for tensor in found]


def split(tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    q, k, v, *own = tensors
    return q, k, v, own[: len(own) // 2], own[len(own) // 2 :]


def check(device: str, dtype: torch.dtype, tolerance: float, steps: int) -> None:
    tensors = inputs(device, dtype, steps)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    grad = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    spans = Spans.of(torch.tensor(BOUNDS, dtype=torch.int32, device=device), BOUNDS[-1], 25)
    output = own_attention(*split(tensors), spans, OwnKeyMerger(lambda piece: piece))
    expected = own_attention_explicit(*split(exact))
    output.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    for number, (got, want) in enumerate(zip(tensors, exact, strict=True)):
        assert got.grad is not None and want.grad is not None
        error = (got.grad.double() - want.grad).abs().max() / want.grad.abs().max()
        assert error < tolerance, f"gradient of input {number} is off by {error:.2e} of its largest"
    if not steps:
        with torch.no_grad():
            found = causal_attention(*tensors[:3], spans)
        torch.testing.assert_close(found, output, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("steps", [0, 3])
def test_flash_merged_with_own_keys_equals_the_definition(steps: int) -> None:
    check("cpu", torch.float32, 1e-5, steps)


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [0, 3])
def test_the_same_on_the_gpu(steps: int) -> None:
    check("cuda", torch.bfloat16, 3e-2, steps)


def test_definition_sees_true_keys_up_to_the_query_and_its_own_column() -> None:
    q, k, v, own_k, own_v = split([tensor.detach() for tensor in inputs("cpu", torch.float32)])
    before = own_attention_explicit(q, k, v, own_k, own_v)
    v[11] += 1.0
    own_v[1][30] += 1.0
    changed = (own_attention_explicit(q, k, v, own_k, own_v) - before).abs().amax((1, 2)) > 1e-7
    assert changed.tolist() == [11 <= place < 25 or place == 30 for place in range(40)]
