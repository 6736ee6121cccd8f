"""What functions of kernels.cpu are told, and where it lies."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kernels.cpu.isa import Isa

LANES = 16
"""Numbers in a vector of float32."""
GROUP = 32
"""Columns of a block; with weights of four and eight bits they are summed before they are scaled."""
TILE = 16
"""Weight rows of a block."""
BLOCKS = {"four": 320, "eight": 576, "half": 1024}
"""Bytes of a block, by the kind of weights."""
AHEAD = 2
"""Blocks of four bits that kernels.cpu.tiles makes wide before they are multiplied, and multiplies before they are
added up: as many are read before the first, and twice as many behind the last, and not used."""
CODES_ROWS = 8
"""Rows whose codes lie side by side, for weights of eight bits."""
CODES = 576
"""Bytes of a block of such codes, their scales and what is missing to whole lines of memory."""
FLOATS = 4 * GROUP
"""Bytes of a row's columns of a block in float32."""
DOT_CODES = 2 * GROUP + 8
"""Bytes of a row's codes of a block for dot products of bytes, its scale, and what its sums are moved by."""
_CHUNK = 256 << 10
"""Bytes of weights that a thread takes at a time."""
LINE = 64
"""Bytes of a cache line."""
COUNTERS = 2 * LINE
"""Bytes of counters of what threads share out: taken, and, in a line of its own, done."""
PHASES = 5
"""Of a layer: norm and q, k, v; attention; output; norm and gate; down."""
TILES = ("x", "row_stride", "w", "y", "out_stride", "blocks", "first", "last", "count", "prepared")
"""Of some tiles of a product, all int64: address of rows and bytes from one to the next, address of weights, the same
of results as of rows, blocks of a tile, the first tile and the one behind the last, rows, and the address of what was
prepared of them: for tiles sums, which weights of four bits are moved by, or codes, for weights of eight bits; for dot
products of bytes codes, scales and what sums are moved by; else float32 numbers."""
PREPARE = ("x", "row_stride", "blocks", "count", "prepared")
"""Of what prepares that."""
LARGEST_CODE = 127
"""Of weights of eight bits."""
TINY = 1e-30
"""Scales of such weights that are less count as zeros."""
MAX_BEST = 64
"""Numbers that are ranked in a row."""
KEYS = TILE
"""Keys that are multiplied with queries at once."""
RUN = (
    "stream", "rows", "layers", "num_layers", "draft_head", "cos", "sin", "positions", "slots", "items",
    "num_items", "queries", "heads", "attended", "inner", "given", "scratch", "scratch_size", "at_prepared", "at_part",
    "at_queries", "at_scores", "counters", "counter_bytes",
)  # fmt: skip
"""What a run is told, all int64: addresses and counts. See StackPlan."""
LAYER = (
    "attention_norm", "qkv", "qkv_bias", "qk_norm", "output", "mlp_norm", "gate_up", "down", "keys", "values", "tap",
)  # fmt: skip
"""Addresses of a layer's weights, of its keys and values, and of where the stream is kept as it enters, or 0."""
HEAD = (
    "tokens", "taken", "left", "features", "embedding", "token_norm", "hidden_norm", "final_norm", "starts_normed",
    "leaves_normed", "output", "tiles", "prepare", "num_tiles", "chunk", "num_chunks", "logits", "ranks", "divisors",
    "ids", "best", "found", "scores",
)  # fmt: skip
"""What a step of a draft head is told besides, all int64. See kernels.cpu.head_step."""
QUERIES = ("slots", "num_keys", "first", "mask", "num_masked")
ITEM = ("queries", "head", "first", "count")
"""A piece of attention: which queries, of which kv head, from which of their rows on, and how many."""


@dataclass(frozen=True, slots=True)
class StackShape:
    """What layers have in common.

    Attributes:
        hidden: width of the residual stream, a multiple of 32; so is `inner`, that of the MLP.
        head_dim: a multiple of 32.
        eps: of norms.
        scale: factor on attention's scores.
        kind: of all matrices, see kernels.cpu.products.Packed.
        given: columns of what q, k and v are made of, if that is not the normed stream but given beside it; else 0.
        has_bias: whether q, k and v have a bias.
        has_qk_norm: whether heads of q and k are normed.
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    eps: float
    scale: float
    kind: str = "four"
    given: int = 0
    has_bias: bool = False
    has_qk_norm: bool = False

    @property
    def fits(self) -> bool:
        """Whether there is a function for it."""
        return (
            not any(size % GROUP for size in (self.hidden, self.inner, self.head_dim, self.given))
            and self.group <= LANES
            and self.head_dim <= 256
        )

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_all(self) -> int:
        """Heads of q, k and v."""
        return self.num_heads + 2 * self.num_kv_heads


def prepared_size(kind: str, rows: int, size: int, isa: Isa) -> int:
    """Bytes of what is prepared of so many rows of `size` columns."""
    if not isa.has_tiles:
        return -(-rows // TILE) * TILE * (size // GROUP) * (DOT_CODES if isa.has_dots(kind) else FLOATS)
    per_group = {"four": (TILE, 4 * TILE), "eight": (CODES_ROWS, CODES), "half": (TILE, 0)}
    together, block = per_group[kind]
    return -(-rows // together) * (size // GROUP) * block


def chunk_of(num_out: int, size: int, threads: int, kind: str) -> int:
    """Tiles of a matrix that a thread takes at a time: so that there are some for each, and not too many."""
    tiles = num_out // TILE
    chunks = max(2 * threads, tiles * (size // GROUP) * BLOCKS[kind] // _CHUNK)
    return max(1, -(-tiles // chunks))


def float_bits(value: float) -> int:
    """A float32 number as a function's argument."""
    return int.from_bytes(struct.pack("<f", value), "little")
