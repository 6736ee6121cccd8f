"""How attention is divided among programs: tiles of queries and keys, and splits of long contexts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.launch import ceil_div, power_of_two

# The deterministic mode uses the same splits in every round.
PATH_SPLITS = 8
MAX_SPLITS = 32
# Even a single tile gains nothing from more, and each adds to the cost of the sum.
CHOSEN_SPLITS = 24
# Up to this many splits are faster even if several programs share a processor.
MAX_SHARED_SPLITS = 16
# Queries of the smallest tile.
SMALL_ROWS = 16
# If context and branches are one launch: most splits, splits with many programs, and tiles of keys that each context
# program loads into registers before it waits.
SHORT_SPLITS = 8
_MIN_SHORT_SPLITS = 6
RESIDENT_TILES = 2


class ScoreRules(NamedTuple):
    """How a model's attention changes scores, apart from scaling. Kernels are compiled for each window and cap."""

    window: int = 0
    """A query at position p sees only keys at positions above p - window; 0: no window."""
    softcap: float = 0.0
    """Scaled scores s become softcap * tanh(s / softcap); 0: no cap."""
    sinks: Tensor | None = None
    """float32 [H]: for each head the score, neither scaled nor capped, of an additional key whose value is zero."""


PLAIN_SCORES = ScoreRules()


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Sizes of a kernel's tiles. Results differ in their last bits between configurations.

    Attributes:
        rows: queries of one kv head in a tile, tokens times the heads that share it; a power of two, at least 16.
        keys: keys in a step; a power of two, at least 16.
        num_warps: 4 or 8 with at least 64 rows uses the tensor cores of a whole warp group.
        num_stages: key tiles in flight, plus the one being processed.
        span: fewest steps of a split, so that short contexts use fewer splits.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    span: int = 1


def mean_row_tokens(num_tokens: int, num_rows: int, max_row_tokens: int) -> int:
    """Return the tokens of a row if all rows of a round have equally many; tiles are sized for such rows.

    A longer row takes several tiles, which read its keys from L2. Tiles for the longest possible row would be nearly
    empty in all other rows.
    """
    return min(max_row_tokens, ceil_div(num_tokens, num_rows))


def fit_heads(config: TileConfig, head_dim: int, dtype: torch.dtype) -> TileConfig:
    """Return a smaller tile for heads whose keys and sums would not fit a processor's shared memory and registers."""
    if head_dim <= 256:
        return config
    keys = SMALL_ROWS if dtype == torch.float32 else 2 * SMALL_ROWS
    return replace(config, keys=min(config.keys, keys), num_warps=8, num_stages=min(config.num_stages, 2))


def tree_config(row_tokens: int, group: int, dtype: torch.dtype) -> TileConfig:
    """Return the tile for rows of about `row_tokens` tokens, with `group` query heads to a kv head."""
    if dtype == torch.float32:
        return _exact_config(group)
    if row_tokens * group <= SMALL_ROWS:
        return TileConfig(SMALL_ROWS, 64, 4, 3)
    # The sum over splits reads more with more tokens, which makes longer splits worthwhile. A tile with fewer rows
    # would not use the tensor cores of a whole warp group; one with more would be alone on its processor.
    return TileConfig(max(64, power_of_two(group)), 64, 4, 3, span=1 + row_tokens // 16)


def branch_config(row_tokens: int, group: int, head_dim: int, dtype: torch.dtype) -> TileConfig:
    """Return the tile for contexts with branches: like `tree_config`, for launches that have the device to themselves.

    Chosen from whole layers of draft models with 9/3 heads of 64 and 32/8 of 128, and 8 to 64 nodes: if the next launch
    is a small product, many short splits beat few long ones.
    """
    config = tree_config(row_tokens, group, dtype)
    queries = row_tokens * group
    if dtype == torch.float32:
        return config
    if head_dim > 64:
        if SMALL_ROWS < queries <= 2 * SMALL_ROWS:
            config = replace(config, rows=2 * SMALL_ROWS)
        return replace(config, span=min(config.span, 2))
    if queries <= SMALL_ROWS:
        return replace(config, num_warps=1, span=1)
    return replace(config, span=1, keys=32 if queries <= config.rows else config.keys)


def short_config(group: int, head_dim: int, dtype: torch.dtype) -> TileConfig:
    """Return the tile for short contexts with branches: RESIDENT_TILES and one of ancestors are in registers."""
    rows = max(SMALL_ROWS, power_of_two(group))
    if dtype == torch.float32:
        return TileConfig(rows, max(_short_keys(head_dim) // 2, SMALL_ROWS), 4, 1)
    return TileConfig(rows, _short_keys(head_dim), 8, 1)


def _short_keys(head_dim: int) -> int:
    # More than 128 keys do not fit in registers, whatever their size.
    return min(max(4096 // power_of_two(head_dim), SMALL_ROWS), 128)


def short_tokens(head_dim: int) -> int:
    """Return the longest context that counts as short: its two-byte keys fit in the registers of all splits.

    With many programs there are fewer splits, which read the rest in a loop.
    """
    return SHORT_SPLITS * RESIDENT_TILES * _short_keys(head_dim)


def short_splits(programs: int, processors: int) -> int:
    """Return the most splits of short contexts, of `programs` each: two programs a processor, or _MIN_SHORT_SPLITS."""
    return min(max(2 * processors // programs, _MIN_SHORT_SPLITS), SHORT_SPLITS)


def path_config(group: int, dtype: torch.dtype) -> TileConfig:
    """Return the tile of the deterministic mode: few tokens, since each follows its own path after the context."""
    if dtype == torch.float32:
        return _exact_config(group)
    rows = max(16, power_of_two(group))
    return TileConfig(rows, 64, 4, 3, span=3)


def prefill_config(group: int, head_dim: int, dtype: torch.dtype) -> TileConfig:
    """Return the tile for prompts."""
    if dtype == torch.float32:
        return _exact_config(group)
    if head_dim > 128:
        return TileConfig(max(64, power_of_two(group)), 64, 4, 2)
    return TileConfig(max(128, power_of_two(group)), 128, 8, 3)


def _exact_config(group: int) -> TileConfig:
    """Return the tile for float32, whose products do not use tensor cores: registers hold only a small tile."""
    return TileConfig(max(16, power_of_two(group)), 32, 4, 2)


def choose_splits(
    num_tokens: int, num_rows: int, max_row_tokens: int, num_heads: int, num_kv_heads: int, processors: int
) -> int:
    """Return the most splits of a row's keys, such that all programs of a round run at the same time.

    That is one program a processor, or up to 16 splits with as many programs as fit on a processor: three with small
    tiles, two with others. Short contexts use fewer splits.
    """
    group = num_heads // num_kv_heads
    row_tokens = mean_row_tokens(num_tokens, num_rows, max_row_tokens)
    rows = tree_config(row_tokens, group, torch.bfloat16).rows
    programs = mean_row_tiles(num_tokens, num_rows, max_row_tokens, rows // group) * num_kv_heads
    crowded = min(processors * (3 if rows == SMALL_ROWS else 2) // programs, MAX_SHARED_SPLITS)
    return min(max(processors // programs, crowded, 1), CHOSEN_SPLITS)


def exclusive_splits(programs: int, rows: int, num_splits: int, processors: int) -> int:
    """Return how many splits take part in contexts that are not long: as many as have processors to themselves.

    A split has `programs`, whose tiles have `rows`. With small tiles all take part: a program alone leaves its
    processor idle while it waits.
    """
    return num_splits if rows == SMALL_ROWS else min(max(processors // programs, 1), num_splits)


def mean_row_tiles(num_tokens: int, num_rows: int, max_row_tokens: int, tile_tokens: int) -> int:
    """Return the tiles that rows of equal length fill. Nearly all other tiles of a launch end immediately."""
    return max_tiles(num_tokens, num_rows, mean_row_tokens(num_tokens, num_rows, max_row_tokens), tile_tokens)


def max_tiles(num_tokens: int, num_rows: int, max_row_tokens: int, tile_tokens: int, padding: bool = False) -> int:
    """Return the most tiles of `num_tokens` tokens in `num_rows` rows, with tiles of padding tokens if `padding`."""
    of_rows = num_rows * ceil_div(max_row_tokens, tile_tokens)
    if padding:
        of_rows += ceil_div(num_tokens, tile_tokens)
        num_rows += 1
    # A row takes a tile for its first token, and another one for every `tile_tokens` more.
    busy = min(num_rows, num_tokens)
    return min(of_rows, busy + (num_tokens - busy) // tile_tokens)
