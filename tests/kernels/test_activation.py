from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import silu_mul


def expected_of(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, 1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 32), (3, 1030)])
def test_it_is_silu_times_up_rounded_once(device: str, dtype: torch.dtype, num_rows: int, size: int) -> None:
    gate_up = (4 * torch.randn(num_rows, 2 * size, generator=torch.Generator().manual_seed(size))).to(dtype)
    torch.testing.assert_close(silu_mul(gate_up.to(device)).cpu(), expected_of(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's; exp(200) is infinity
def test_large_gates_do_not_overflow(device: str) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -200.0, 0.0, 3.0, 3.0, 3.0, 3.0]], device=device)
    torch.testing.assert_close(silu_mul(gate_up).cpu(), torch.tensor([[0.0, 3e4, 0.0, 0.0]]))


def test_without_triton_it_is_the_same() -> None:
    gate_up = torch.randn(2, 20)
    torch.testing.assert_close(silu_mul(gate_up), expected_of(gate_up))


def test_odd_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="silu_mul"):
        silu_mul(torch.ones(2, 5))


@pytest.mark.gpu
def test_real_size() -> None:
    gate_up = torch.randn(64, 2 * 14336, device="cuda").bfloat16()
    torch.testing.assert_close(silu_mul(gate_up), expected_of(gate_up))
