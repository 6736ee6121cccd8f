"""Noise on a device equals the reference in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.gumbel import gumbel
from kernels.reference.gumbel import coins
from kernels.reference.gumbel import gumbel as torch_gumbel
from outrider.sampling import noise

SEEDS = [0, 1, 2**31, 2**32 - 1, 2**63 + 12345, 2**64 - 1]


def key(seed: int, choice: int) -> list[int]:
    """Seed and choice index as the bit patterns of three int32."""
    return np.array([seed & 0xFFFFFFFF, seed >> 32, choice], np.uint32).view(np.int32).tolist()


def keys_and_positions(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.tensor([key(seed, index) for index, seed in enumerate(SEEDS)], dtype=torch.int32, device=device)
    return keys, torch.arange(7, 7 + len(SEEDS), dtype=torch.int32, device=device)


def agree(ours: torch.Tensor, expected: np.ndarray) -> None:
    """Equal but for the last bit, and that rarely: the float64 logarithms may differ before the rounding."""
    got = ours.cpu().numpy()
    assert got.dtype == expected.dtype == np.float32
    np.testing.assert_array_max_ulp(got, expected, 1)
    assert (got != expected).mean() < 1e-4


@pytest.mark.parametrize("vocab_size", [1, 5, 1024, 3001])
def test_rows_equal_numpy(device: str, vocab_size: int) -> None:
    keys, positions = keys_and_positions(device)
    got = gumbel(keys, positions, vocab_size)
    for row, seed in enumerate(SEEDS):
        agree(got[row], noise.gumbel(seed, row, int(positions[row]), vocab_size=vocab_size))


def test_listed_tokens_have_the_noise_of_the_full_row(device: str) -> None:
    keys, positions = keys_and_positions(device)
    ids = torch.randint(0, 3000, (len(SEEDS), 37), dtype=torch.int32, device=device)
    assert torch.equal(gumbel(keys, positions, 3000, ids), gumbel(keys, positions, 3000).gather(1, ids.long()))


def test_keys_may_be_columns_of_a_wider_table(device: str) -> None:
    keys, positions = keys_and_positions(device)
    table = torch.full((len(SEEDS), 8), -1, dtype=torch.int32, device=device)
    table[:, :3] = keys
    assert torch.equal(gumbel(table[:, :3], positions, 50), gumbel(keys, positions, 50))


def test_the_torch_reference_equals_numpy() -> None:
    keys, positions = keys_and_positions("cpu")
    got = torch_gumbel(keys, positions, torch.arange(999).expand(len(SEEDS), -1))
    for row, seed in enumerate(SEEDS):
        agree(got[row], noise.gumbel(seed, row, int(positions[row]), vocab_size=999))


def test_coins_are_the_first_words_under_the_last_counter() -> None:
    keys, positions = keys_and_positions("cpu")
    for row, (seed, coin) in enumerate(zip(SEEDS, coins(keys, positions), strict=True)):
        word = noise.philox(np.zeros(1, np.uint64), int(positions[row]), row, 1, seed)[0, 0]
        assert float(coin) == (int(word) + 0.5) / 2**32


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="keys"):
        gumbel(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), 5)


@pytest.mark.gpu
def test_a_large_table_equals_numpy() -> None:
    keys, positions = (tensor.cuda() for tensor in keys_and_positions("cpu"))
    got = gumbel(keys, positions, 128256)
    for row, seed in enumerate(SEEDS):
        agree(got[row], noise.gumbel(seed, row, int(positions[row]), vocab_size=128256))
