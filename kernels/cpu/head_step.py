"""A step of a draft head on a CPU in one function: embedding, features and norms, layers, logits, and the best of them.

Threads enter it once, as in kernels.cpu.stack, which has the layers. The head is like EAGLE-3's: its layers take the
normed embedding and the normed feature of the position before, side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import products
from kernels.cpu.isa import needed_isa
from kernels.cpu.layout import HEAD_ARGS, MAX_BEST, TILE, StackShape, chunk_of, prepared_size
from kernels.cpu.products import Packed, function_address
from kernels.cpu.rows import row_function
from kernels.cpu.stack import HeadCall, StackPlan


class HeadWeights(NamedTuple):
    """Weights of a head outside its layers.

    Attributes:
        embedding: bfloat16 [V, hidden].
        token_norm: float32 [hidden], for embeddings; so are `hidden_norm`, for features, and `final_norm`, before
            `output`.
        output: [N, hidden], with 8 or 16 bits a weight.
        starts_normed: whether the residual stream starts at the normed feature.
        leaves_normed: whether a row leaves the normed stream to its children.
    """

    embedding: Tensor
    token_norm: Tensor
    hidden_norm: Tensor
    final_norm: Tensor
    output: Packed
    starts_normed: bool
    leaves_normed: bool


class Links(NamedTuple):
    """Which features M rows take, and where they write their own.

    Attributes:
        features: bfloat16 [any, hidden].
        taken: int64 [M], the row of `features` that each takes.
        left: int64 [M], the row of `features` that each writes: all distinct, and none that is taken.
    """

    features: Tensor
    taken: Tensor
    left: Tensor


class Ranking(NamedTuple):
    """How candidates of M rows are found: as in kernels.cpu.rows, after dividing the logits.

    Attributes:
        divisors: float32 [M].
        ids: int32 [N], the id of each column.
        best: candidates of a row, at most MAX_BEST.
    """

    divisors: Tensor
    ids: Tensor
    best: int


class Stepped(NamedTuple):
    """Results of a step.

    Attributes:
        logits: float32 [M, N]; divided if they were ranked.
        tokens: int32 [M, best], like `scores`, which are float32; see kernels.cpu.rows.write_top_k. None if nothing was
            ranked.
    """

    logits: Tensor
    tokens: Tensor | None = None
    scores: Tensor | None = None


class HeadStep:
    """Runs steps of a head."""

    def __init__(self, shape: StackShape, weights: HeadWeights) -> None:
        if not fits_head(shape, weights):
            raise ValueError(f"a head of {shape} with weights of {weights.output.kind} has no function")
        self._shape, self._weights = shape, weights
        output, isa = weights.output, needed_isa()
        tiles = output.num_out // TILE
        chunk = chunk_of(output.num_out, output.size, products.num_threads(), output.kind)
        self._fields = dict.fromkeys(HEAD_ARGS, 0) | {
            "embedding": weights.embedding.data_ptr(), "token_norm": weights.token_norm.data_ptr(),
            "hidden_norm": weights.hidden_norm.data_ptr(), "final_norm": weights.final_norm.data_ptr(),
            "starts_normed": weights.starts_normed, "leaves_normed": weights.leaves_normed,
            "output": output.blocks.data_ptr(), "num_tiles": tiles, "chunk": chunk, "num_chunks": -(-tiles // chunk),
            "tiles": function_address(isa, output.kind, f"tiles_{output.kind}"),
            "prepare": function_address(isa, output.kind, "prepare"),
            "top_k": row_function(isa, "top_k").engine.get_function_address("top_k"),
        }  # fmt: skip

    def __call__(self, plan: StackPlan, token_ids: Tensor, links: Links, ranking: Ranking | None = None) -> Stepped:
        """Run M rows with int64 `token_ids` [M]; write their keys and values, and their features to `links`.

        Raises ValueError for arguments that the function would misread.
        """
        output, isa = self._weights.output, needed_isa()
        self._check(plan.rows, token_ids, links, ranking)
        stream = torch.empty(plan.rows, self._shape.hidden, dtype=torch.bfloat16)
        qkv_input = torch.empty(plan.rows, self._shape.qkv_input_size, dtype=torch.bfloat16)
        found = Stepped(torch.empty(plan.rows, output.num_out))
        fields = self._fields | {
            "tokens": token_ids.data_ptr(), "taken": links.taken.data_ptr(), "left": links.left.data_ptr(),
            "features": links.features.data_ptr(), "logits": found.logits.data_ptr(),
        }  # fmt: skip
        if ranking is not None:
            size = plan.rows, ranking.best
            tokens, scores = torch.empty(size, dtype=torch.int32), torch.empty(size)
            found = Stepped(found.logits, tokens, scores)
            fields |= {
                "divisors": ranking.divisors.data_ptr(), "ids": ranking.ids.data_ptr(), "best": ranking.best,
                "found": tokens.data_ptr(), "scores": scores.data_ptr(),
            }  # fmt: skip
        words = np.array([*fields.values()], np.int64)
        head = HeadCall(words.ctypes.data, prepared_size(output.kind, plan.rows, output.size, isa))
        plan.run(stream, qkv_input=qkv_input, head=head)
        return found

    def _check(self, rows: int, token_ids: Tensor, links: Links, ranking: Ranking | None) -> None:
        for numbers in (token_ids, links.taken, links.left):
            if numbers.dtype != torch.int64 or numbers.shape != (rows,) or not numbers.is_contiguous():
                raise ValueError(f"tokens and links are int64, one for each of {rows} rows, side by side")
        for name, numbers, end in (
            ("token", token_ids, len(self._weights.embedding)),
            ("row taken", links.taken, len(links.features)),
            ("row left", links.left, len(links.features)),
        ):
            least, largest = int(numbers.min()), int(numbers.max())
            if least < 0 or largest >= end:
                raise ValueError(f"a {name} of {least if least < 0 else largest}; there are {end}")
        features = links.features
        if features.dtype != torch.bfloat16 or features.shape[1:] != (self._shape.hidden,) or not _lies_plain(features):
            raise ValueError(f"features {features.dtype} {list(features.shape)} for rows of {self._shape.hidden}")
        if ranking is not None:
            wanted = {"divisors": (torch.float32, rows), "ids": (torch.int32, self._weights.output.num_out)}
            for name, (dtype, size) in wanted.items():
                found = getattr(ranking, name)
                if found.dtype != dtype or found.shape != (size,) or not _lies_plain(found):
                    raise ValueError(f"{name} are {dtype} [{size}], side by side")
            if not 0 < ranking.best <= min(MAX_BEST, self._weights.output.num_out):
                raise ValueError(f"the best {ranking.best} of {self._weights.output.num_out}")


def fits_head(shape: StackShape, weights: HeadWeights) -> bool:
    """Whether there is a function for this head."""
    output, size = weights.output, shape.hidden
    is_plain = _lies_plain(weights.embedding) and weights.embedding.dtype == torch.bfloat16
    return (
        shape.fits and shape.qkv_input_size == 2 * size and output.size == size and output.kind != "four" and is_plain
    )


def _lies_plain(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and rows.is_contiguous()
