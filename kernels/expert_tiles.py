"""How the rows of mixtures of experts are laid out in tiles, and products with them cut into programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from torch import Tensor

from kernels.launch import ceil_div, power_of_two

MAX_EXPERTS = 1024
MIN_TILE, MAX_TILE = 16, 128


def by_expert(rows: Tensor, experts: Tensor, num_out: int, product: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The product of each expert that was woken with the rows of its pairs, where the host knows which these are.

    Args:
        rows: [M, I], the tokens' rows, or [P, I], one a pair.
        experts: [M, K] of P = M * K pairs; those of padding are negative.
        product: of an expert's number and rows [n, I], [n, num_out].

    Returns:
        [P, num_out] in the dtype of `rows`; zeros for pairs of padding.
    """
    flat = experts.flatten()
    per_row = len(flat) // len(rows)
    out = rows.new_zeros(len(flat), num_out)
    for expert in flat[flat >= 0].unique().tolist():
        pairs = (flat == expert).nonzero().flatten()
        out[pairs] = product(expert, rows[pairs // per_row]).to(out.dtype)
    return out


@dataclass(frozen=True, slots=True)
class Gating:
    """clamp(g) * sigmoid(alpha * clamp(g)) * (clamp(u) + shift) of gate g and up u.

    g is clamped to at most `limit`, u to -limit .. limit. The defaults are SwiGLU; gpt-oss has 1.702, 7 and 1.
    """

    alpha: float = 1.0
    limit: float = inf
    shift: float = 0.0

    def for_kernels(self) -> tuple[float | None, float | None, float | None]:
        """alpha, limit and shift, None for those that change nothing, which kernels are compiled without."""
        alpha, limit = None if self.alpha == 1.0 else self.alpha, None if self.limit == inf else self.limit
        return alpha, limit, self.shift or None


SWIGLU = Gating()


@dataclass(frozen=True, slots=True)
class Routes:
    """Where the rows of M tokens go. Pairs of one expert fill tiles of `tile` places; the rest of its last stays empty.

    Attributes:
        experts: int32 [M, K], each token's experts, the likeliest first; -1 for a token that is padding.
        weights: float32 [M, K], what their results count.
        tile_experts: int32 [T], the expert of each tile, in rising order where there are more tokens than one; -1 for
            those behind the last one. T is the most that M tokens can fill, and 0 where torch computes the products.
        places: int32 [T * tile], the pair at each place; -1 for an empty one.
        num_places: int32 [1], those in tiles that have an expert.
        tile: places in a tile.
    """

    experts: Tensor
    weights: Tensor
    tile_experts: Tensor
    places: Tensor
    num_places: Tensor
    tile: int


def tile_of(num_tokens: int, num_active: int, num_experts: int) -> int:
    """Places in a tile for so many tokens: about as many as an expert has pairs where all are woken alike."""
    share = power_of_two(ceil_div(num_tokens * num_active, num_experts))
    return min(max(share, MIN_TILE), MAX_TILE)


def max_tiles(num_tokens: int, num_active: int, num_experts: int, tile: int) -> int:
    """Tiles that so many tokens fill at most."""
    pairs = num_tokens * num_active
    return min(pairs, num_experts + pairs // tile)
