"""See kernels.gumbel; also the coins of lossy acceptance."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def gumbel(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Noise of `token_ids` [N, K] under `keys` [N, 3] at `positions` [N]: float32 [N, K]."""
    ids = token_ids.long()
    columns = [word[:, None].expand_as(ids) for word in (positions, *keys.unbind(1))]
    position, low, high, choice = columns
    words = torch.stack(philox(ids >> 2, position, choice, torch.zeros_like(ids), low, high), -1)
    x = words.gather(-1, (ids & 3)[..., None])[..., 0]
    # 1 - u is exact in float64, see outrider.sampling.noise.
    exponential = -torch.log((2.0**32 - 0.5 - x.double()) * 2.0**-32)
    return -torch.log(exponential).float()


def coins(keys: Tensor, positions: Tensor) -> Tensor:
    """The levels' coins under `keys` [N, 3] at `positions` [N]: float64 [N] between 0 and 1."""
    low, high, choice = keys.unbind(1)
    zeros = torch.zeros_like(positions)
    return (philox(zeros, positions, choice, zeros + 1, low, high)[0].double() + 0.5) * 2.0**-32


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, ...]:
    """Philox 4x32-10 of counters and keys given as words of one shape: four int64 tensors of 32-bit words."""
    c0, c1, c2, c3, k0, k1 = (word.long() & _WORD for word in (c0, c1, c2, c3, k0, k1))
    for _ in range(10):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 64-bit product, in halves: int64 has no unsigned product."""
    low = word * (factor & 0xFFFF)
    high = word * (factor >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
