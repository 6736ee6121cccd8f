from __future__ import annotations

import pytest
import torch

from kernels.norm import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 72), (2, 600)])
def test_it_is_the_norm_in_float32_rounded_once(device: str, dtype: torch.dtype, num_rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    rows = (3 * torch.randn(num_rows, size, generator=generator)).to(dtype)
    weight = (1 + torch.randn(size, generator=generator)).to(dtype)
    wide = rows.double()
    expected = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    result = rms_norm(rows.to(device), weight.to(device), 1e-5)
    torch.testing.assert_close(result.cpu(), expected.to(dtype))


def test_without_triton_it_is_the_same() -> None:
    rows, weight = torch.randn(3, 40), torch.randn(40)
    expected = torch.nn.functional.rms_norm(rows, (40,), weight, 1e-5)
    torch.testing.assert_close(rms_norm(rows, weight, 1e-5), expected)


def test_out_may_be_the_input(device: str) -> None:
    rows = torch.randn(2, 96, device=device)
    weight = torch.randn(96, device=device)
    expected = rms_norm(rows, weight, 1e-6)
    assert rms_norm(rows, weight, 1e-6, out=rows) is rows
    assert torch.equal(rows, expected)


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(torch.ones(2, 8), torch.ones(9), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [576, 4096, 5120, 8192])
def test_real_sizes(size: int) -> None:
    rows = torch.randn(33, size, device="cuda").bfloat16()
    weight = torch.randn(size, device="cuda").bfloat16()
    wide = rows.double()
    expected = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(rows, weight, 1e-5), expected.bfloat16())
