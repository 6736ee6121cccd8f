"""A drafter inside rounds whose model is cut over ranks: rank 0 tells the others what it does, and they do the same.

All ranks grow the same trees: their tokens come from the same logits, which all ranks have whole, and their features
from the same residual stream. What tells requests apart, their rows, pages and temperatures, comes from rank 0's host.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.attention.prompts import PromptChunk
from outrider.drafting.model.round_drafter import ChoiceShape, RoundDrafter, RoundShape
from outrider.graphs import compile_aside
from outrider.sampling.params import SamplingParams
from verify_service.executors.rank_link import DRAFT_CAPTURE, DRAFT_CONTEXT, DRAFT_CUT, DRAFT_GROW, DRAFT_ROW, RankLink

Ints = NDArray[np.int32]
_SAMPLING = struct.Struct("<dQq")
_CHUNK_WORDS = 4


class RankedDrafter(RoundDrafter):
    """See RoundDrafter. Of a request's sampling the other ranks get what candidates are ranked by."""

    def __init__(self, link: RankLink, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, compiling=link.compiling)
        self._link = link

    def admit(self, row: int, sampling: SamplingParams) -> None:
        """See RoundDrafter."""
        words = _SAMPLING.pack(sampling.temperature, sampling.seed, sampling.choice_index)
        self._link.tell(DRAFT_ROW, [row, *np.frombuffer(words, np.int32)])
        super().admit(row, sampling)

    def cut(self, row: int, shift: int, pages: Sequence[int]) -> None:
        """See RoundDrafter."""
        self._link.tell(DRAFT_CUT, [row, shift, *pages])
        super().cut(row, shift, pages)

    def compute_context(self, chunks: Sequence[PromptChunk], feature_slots: Sequence[int]) -> None:
        """See RoundDrafter."""
        self._link.tell(DRAFT_CONTEXT, pack_chunks(chunks, feature_slots))
        super().compute_context(chunks, feature_slots)

    def grow(self, shape: RoundShape, num_steps: int, num_nodes: int) -> None:
        """See RoundDrafter."""
        self._link.tell(DRAFT_GROW, [*shape, num_steps, num_nodes])
        super().grow(shape, num_steps, num_nodes)

    def capture(self, shapes: Sequence[RoundShape], choices: Sequence[ChoiceShape]) -> None:
        """See RoundDrafter."""
        pairs = [*shapes, *choices]
        self._link.tell(DRAFT_CAPTURE, [len(shapes), *(number for pair in pairs for number in pair)])
        super().capture(shapes, choices)

    def replay(self, kind: int, numbers: Ints) -> None:
        """As another rank than 0, do what rank 0 does; `kind`: see RankLink."""
        if kind == DRAFT_GROW:
            tokens, rows, num_steps, num_nodes = numbers.tolist()
            super().grow(RoundShape(tokens, rows), num_steps, num_nodes)
        elif kind == DRAFT_CONTEXT:
            super().compute_context(*unpack_chunks(numbers))
        elif kind == DRAFT_ROW:
            temperature, seed, choice = _SAMPLING.unpack(numbers[1:].tobytes())
            super().admit(int(numbers[0]), SamplingParams(temperature=temperature, seed=seed, choice_index=choice))
        elif kind == DRAFT_CUT:
            super().cut(int(numbers[0]), int(numbers[1]), numbers[2:].tolist())
        elif kind == DRAFT_CAPTURE:
            pairs = numbers[1:].reshape(-1, 2).tolist()
            shapes, choices = pairs[: numbers[0]], pairs[numbers[0] :]
            with compile_aside():
                super().capture([RoundShape(*pair) for pair in shapes], [ChoiceShape(*pair) for pair in choices])
        else:
            raise ValueError(f"rank 0 sent a message of kind {kind}")


def pack_chunks(chunks: Sequence[PromptChunk], feature_slots: Sequence[int]) -> Ints:
    """Their number, of each row, start, offset and number of tokens, then all tokens, all slots, all feature slots."""
    heads = [(chunk.table_row, chunk.start, chunk.offset, len(chunk.slots)) for chunk in chunks]
    parts = [[len(chunks)], *heads, *(chunk.token_ids for chunk in chunks), *(chunk.slots for chunk in chunks)]
    return np.concatenate([np.asarray(part, np.int32) for part in (*parts, feature_slots)])


def unpack_chunks(numbers: Ints) -> tuple[list[PromptChunk], list[int]]:
    """What `pack_chunks` was given."""
    count = int(numbers[0])
    heads = numbers[1 : 1 + _CHUNK_WORDS * count].reshape(-1, _CHUNK_WORDS)
    ends = np.cumsum(heads[:, 3])
    total = int(ends[-1])
    tokens, slots, feature_slots = np.split(numbers[1 + _CHUNK_WORDS * count :], [total, 2 * total])
    parts = zip(heads.tolist(), np.split(tokens, ends[:-1]), np.split(slots, ends[:-1]), strict=True)
    chunks = [PromptChunk(row, own, start, into, offset) for (row, start, offset, _), own, into in parts]
    return chunks, feature_slots.tolist()
