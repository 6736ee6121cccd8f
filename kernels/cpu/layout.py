"""Arguments of functions of kernels.cpu, and how data lies in memory."""

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
"""Four-bit blocks that kernels.cpu.tiles converts before they are multiplied, and multiplies before they are added up:
as many are read before the first, and twice as many after the last, and not used."""
CODES_ROWS = 8
"""Rows whose codes lie side by side, for weights of eight bits."""
CODES = 576
"""Bytes of a block of such codes and their scales, padded to whole cache lines."""
FLOATS = 4 * GROUP
"""Bytes of a row's columns of a block in float32."""
DOT_PARTS = {"four": 1, "eight": 2}
"""Bytes of a row's numbers for dot products of bytes, by the kind of weights."""
DOT_SCALES = 8
"""Bytes of the scale of a row's block, and of the offset of its sums, which follow."""
_CHUNK = 256 << 10
"""Bytes of weights that a thread takes at a time."""
LINE = 64
"""Bytes of a cache line."""
COUNTERS = 2 * LINE
"""Bytes of counters of work that threads share: chunks taken and, in a separate cache line, chunks done."""
PHASES = 5
"""Phases of a layer: norm and q, k, v; attention; output; norm and gate; down."""
TILES_ARGS = ("x", "row_stride", "w", "y", "out_stride", "blocks", "first", "last", "count", "prepared")
"""Arguments for some tiles of a product, all int64: address of rows and bytes from one to the next, address of weights,
the same of results as of rows, blocks of a tile, the first tile and the one after the last, number of rows, and address
of the prepared rows: for tiles sums, which offset four-bit weights, or codes, for eight-bit weights; for dot products
of bytes codes, scales and offsets of sums; otherwise float32 numbers."""
PREPARE_ARGS = ("x", "row_stride", "blocks", "count", "prepared")
"""Arguments for the preparation of rows."""
LARGEST_CODE = 127
"""Largest code of eight-bit weights and rows."""
TINY = 1e-30
"""Scales of eight-bit weights below this count as zeros."""
MAX_BEST = 64
"""Most numbers that are ranked in a row."""
KEYS = TILE
"""Keys that are multiplied by queries at once."""
RUN_ARGS = (
    "stream", "rows", "layers", "num_layers", "draft_head", "cos", "sin", "positions", "slots", "items",
    "num_items", "queries", "heads", "attended", "inner", "qkv_input", "scratch", "scratch_size", "at_prepared",
    "at_part", "at_queries", "at_scores", "counters", "counter_bytes",
)  # fmt: skip
"""Arguments of a run, all int64: addresses and counts. See StackPlan."""
LAYER_FIELDS = (
    "attention_norm", "qkv", "qkv_bias", "qk_norm", "output", "mlp_norm", "gate_up", "down", "keys", "values", "tap",
)  # fmt: skip
"""Addresses of a layer's weights, of its keys and values, and of a copy of the stream that enters it, or 0."""
HEAD_ARGS = (
    "tokens", "taken", "left", "features", "embedding", "token_norm", "hidden_norm", "final_norm", "starts_normed",
    "leaves_normed", "output", "tiles", "prepare", "num_tiles", "chunk", "num_chunks", "logits", "top_k", "divisors",
    "ids", "best", "found", "scores",
)  # fmt: skip
"""Additional arguments of a step of a draft head, all int64. See kernels.cpu.head_step."""
QUERIES_FIELDS = ("slots", "num_keys", "first", "mask", "num_masked")
ITEM_FIELDS = ("queries", "head", "first", "count")
"""A piece of attention: which queries, which kv head, the first of the queries' rows, and the number of rows."""


@dataclass(frozen=True, slots=True)
class StackShape:
    """Properties that all layers share.

    Attributes:
        hidden: width of the residual stream, a multiple of 32; so is `inner`, that of the MLP.
        head_dim: a multiple of 32.
        eps: of norms.
        scale: factor of attention scores.
        kind: of all matrices, see kernels.cpu.products.Packed.
        qkv_input_size: columns of the input of q, k and v, if that is not the normed stream; otherwise 0.
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
    qkv_input_size: int = 0
    has_bias: bool = False
    has_qk_norm: bool = False

    @property
    def fits(self) -> bool:
        """Whether there is a function for this shape."""
        return (
            not any(size % GROUP for size in (self.hidden, self.inner, self.head_dim, self.qkv_input_size))
            and self.group <= LANES
            and self.head_dim <= 256
        )

    @property
    def group(self) -> int:
        """Number of query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_qkv_heads(self) -> int:
        """Number of heads of q, k and v."""
        return self.num_heads + 2 * self.num_kv_heads


def prepared_size(kind: str, rows: int, size: int, isa: Isa) -> int:
    """Return the bytes that the preparation of `rows` rows of `size` columns takes."""
    if not isa.has_tiles:
        block = DOT_PARTS[kind] * GROUP + DOT_SCALES if isa.has_dots(kind) else FLOATS
        return -(-rows // TILE) * TILE * (size // GROUP) * block
    per_group = {"four": (TILE, 4 * TILE), "eight": (CODES_ROWS, CODES), "half": (TILE, 0)}
    together, block = per_group[kind]
    return -(-rows // together) * (size // GROUP) * block


def chunk_of(num_out: int, size: int, threads: int, kind: str) -> int:
    """Return the tiles of a matrix that a thread takes at a time: some for each thread, but not too many chunks."""
    tiles = num_out // TILE
    chunks = max(2 * threads, tiles * (size // GROUP) * BLOCKS[kind] // _CHUNK)
    return max(1, -(-tiles // chunks))


def float_bits(value: float) -> int:
    """Return the bits of a float32 number, as a function's argument."""
    return int.from_bytes(struct.pack("<f", value), "little")
