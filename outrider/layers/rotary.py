"""Rotary positions: frequencies once per model, cos and sin once per forward, a rotation per layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from outrider.models.parts import RopeConfig, rotary_dim


class Rotary:
    """Turns positions into angles. Pairs are (i, i + head_dim / 2), as in Hugging Face checkpoints. If a head is only
    rotated in part, its first pairs are; `pair_order` lays out its channels for that.

    Without `rope` all angles are 0, for q and k that are rotated already.
    """

    def __init__(
        self, rope: RopeConfig | None, head_dim: int, device: torch.device, padded_dim: int | None = None
    ) -> None:
        """`padded_dim`: channels of a head with the zeros behind each half, if there are any."""
        self.turns = rope is not None
        """Whether rotation changes anything."""
        frequencies, self.scale = _frequencies(rope, head_dim) if rope else (torch.zeros(head_dim // 2), 1.0)
        zeros = 0 if padded_dim is None else (padded_dim - head_dim) // 2
        self._set(functional.pad(frequencies, (0, zeros)), device)

    @classmethod
    def of_frequencies(cls, frequencies: Tensor, scale: float, device: torch.device) -> Rotary:
        """Make one from radians per position of each pair, float32 [head_dim / 2] on the CPU.

        cos and sin are multiplied by `scale`.
        """
        rotary = cls(None, 2 * len(frequencies), device)
        rotary.turns, rotary.scale = True, scale
        rotary._set(frequencies, device)
        return rotary

    def _set(self, frequencies: Tensor, device: torch.device) -> None:
        head_dim = 2 * len(frequencies)
        self.half_frequencies = frequencies.to(device)
        """Radians per position of each pair, float32 [head_dim / 2]."""
        self._frequencies = torch.cat([frequencies, frequencies]).to(device)
        # sin of the first half is subtracted: rotate() then needs one swap of the halves and no negation.
        # Before it moves: arithmetic on the meta device makes torch import its compiler, for a second and over 100 MB.
        sign = torch.ones(head_dim)
        sign[: head_dim // 2] = -1.0
        # Channels that do not turn are not scaled.
        scales = torch.where(torch.cat([frequencies, frequencies]) == 0.0, 1.0, self.scale)
        self._sign = (sign * scales).to(device)
        self._scales = scales.to(device)
        self._tables: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin for int64 positions [M], each [M, 1, head_dim] in `dtype`."""
        if positions.device.type != "cpu" or not positions.numel():
            return self._computed(positions, dtype)
        # Two lookups replace nine operations, which each cost more in overhead than in arithmetic.
        cos, sin = self.tables(positions, dtype)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin on a CPU, by position, for at least all positions up to the largest of `positions`."""
        count, tables = int(positions.max()) + 1, self._tables.get(dtype)
        if tables is None or len(tables[0]) < count:
            tables = self._computed(torch.arange(max(_FIRST_ANGLES, 1 << (count - 1).bit_length())), dtype)
            self._tables[dtype] = tables
        return tables

    def _computed(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions.float().unsqueeze(1) * self._frequencies
        cos, sin = angles.cos() * self._scales, angles.sin() * self._sign
        return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


_FIRST_ANGLES = 1024
"""Positions whose angles are computed at first; when more are needed, a power of two."""


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [M, num_heads, head_dim] by the angles that `Rotary.angles` returned."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return swapped.mul_(sin).add_(heads * cos)


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return radians per position for each pair, float32 [head_dim / 2], and the factor on cos and sin."""
    size = rotary_dim(rope, head_dim)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    frequencies, scale = _scaled(1.0 / rope.theta**exponents, rope, size)
    return functional.pad(frequencies, (0, (head_dim - size) // 2)), scale


def pair_order(rope: RopeConfig, head_dim: int) -> list[int] | None:
    """Return the checkpoint's channel for each place of a head rotated in its first part; None if all are in place.

    Scores stay the same if channels of queries and keys are reordered alike.
    """
    size = rotary_dim(rope, head_dim)
    if size == head_dim:
        return None
    middle = (size + head_dim) // 2
    return [*range(size // 2), *range(size, middle), *range(size // 2, size), *range(middle, head_dim)]


def _scaled(plain: Tensor, rope: RopeConfig, size: int) -> tuple[Tensor, float]:
    """Return the scaled frequencies of the rotated pairs, and the factor on cos and sin."""
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    given = rope.attention_factor
    if rope.kind == "yarn":
        return _yarn(plain, rope, size), _yarn_scale(rope) if given is None else given
    if rope.kind == "longrope":
        factors = torch.tensor(rope.long_factors if rope.is_long else rope.short_factors, dtype=torch.float32)
        return plain / factors, _longrope_scale(rope) if given is None else given
    return plain, 1.0


def _longrope_scale(rope: RopeConfig) -> float:
    """Return the factor on cos and sin of LongRoPE (arXiv 2402.13753)."""
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(rope.factor) / math.log(rope.original_max_positions))


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Stretch slow pairs and keep fast ones; in between, the number of turns in the old context sets the mix."""
    turns = rope.original_max_positions * plain / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / rope.factor


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Do as `_llama3`, but with a mix that is linear in the pair's index (YaRN, arXiv 2309.00071)."""

    def pair_with(turns: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return stretch * plain / rope.factor + (1.0 - stretch) * plain


def _yarn_scale(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
