"""How the rows of mixtures of experts are laid out in tiles, the units of their products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from torch import Tensor

from kernels.launch import ceil_div, power_of_two

MAX_EXPERTS = 1024
MIN_TILE, MAX_TILE = 16, 128


def by_expert(rows: Tensor, experts: Tensor, num_out: int, product: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Multiply the rows of each expert's pairs by its weights, if the host knows which experts were chosen.

    Args:
        rows: [M, I], one row a token, or [P, I], one row a pair.
        experts: [M, K] of P = M * K pairs; negative for padding.
        product: returns [n, num_out] for an expert's number and rows [n, I].

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
        """Return alpha, limit and shift; None for values that change nothing, which kernels are compiled without."""
        alpha, limit = None if self.alpha == 1.0 else self.alpha, None if self.limit == inf else self.limit
        return alpha, limit, self.shift or None


SWIGLU = Gating()


@dataclass(frozen=True, slots=True)
class Routes:
    """Where the rows of M tokens go. An expert's pairs fill tiles of `tile` places; its last tile may be partly empty.

    Attributes:
        experts: int32 [M, K], each token's experts, the likeliest first; -1 for a token that is padding.
        weights: float32 [M, K], weights of the experts' results.
        tile_experts: int32 [T], the expert of each tile, ascending if there is more than one token; -1 for unused
            tiles, which come last. T is the most tiles that M tokens can fill, and 0 where torch computes the products.
        places: int32 [T * tile], the pair at each place; -1 for an empty one.
        num_places: int32 [1], places in tiles that have an expert.
        tile: places in a tile.
    """

    experts: Tensor
    weights: Tensor
    tile_experts: Tensor
    places: Tensor
    num_places: Tensor
    tile: int


def tile_of(num_tokens: int, num_active: int, num_experts: int) -> int:
    """Return the places of a tile: about as many as an expert has pairs if all experts are chosen equally often."""
    share = power_of_two(ceil_div(num_tokens * num_active, num_experts))
    return min(max(share, MIN_TILE), MAX_TILE)


def max_tiles(num_tokens: int, num_active: int, num_experts: int, tile: int) -> int:
    """Return the most tiles that `num_tokens` tokens fill."""
    pairs = num_tokens * num_active
    return min(pairs, num_experts + pairs // tile)
