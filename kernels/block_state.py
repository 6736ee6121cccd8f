"""Device memory of block heads: what requests' last blocks say, the roots of new blocks, and how these lie."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class BlockStore(NamedTuple):
    """What the blocks of N requests say, G guesses each: of each the last one's places, one behind another.

    The last request is for padding.
    """

    begins: Tensor
    """int32 [N], the position of the root whose block it is."""
    rows: Tensor
    """[N * G, hidden]."""
    logits: Tensor
    """float32 [N * G, vocab_size], without what DSPARK's sequential part adds."""


class BlockRoots(NamedTuple):
    """The roots of the blocks of R requests. Tensors on the device, int32 but for `places`."""

    token_ids: Tensor
    """[M], tokens among which the roots are."""
    places: Tensor
    """int32 or int64 [R], which of them; read only where there is a root."""
    there: Tensor
    """[R], negative where there is no root."""
    positions: Tensor
    """[R], in the sequence; 0 where there is no root."""
    table_rows: Tensor
    """[R]"""
    context_len: Tensor
    """[R], positions of the context that the block sees, from the first on."""


class BlockLayout(NamedTuple):
    """The places of R blocks of S, one block behind another, W words of mask each. Tensors int32 on the device."""

    tokens: Tensor
    """[R], the roots' token ids; 0 where there is none."""
    rows: Tensor
    """[R], the roots' table rows; -1 where there is none."""
    token_ids: Tensor
    """[R * S], masks but for the first of each block, which is the root's."""
    positions: Tensor
    """[R * S], in the sequence."""
    first: Tensor
    """[R + 1], where blocks begin."""
    slots: Tensor
    """[R * S], their scratch; -1 where there is no root."""
    mask: Tensor
    """[R * S, W], bits of the tree slots that the block sees, if any are given, then those of all its own places."""
