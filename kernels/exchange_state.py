"""Memory for exchanges between ranks; see kernels.exchange."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_TURNS = 3
TIMEOUT_SECONDS = 10.0
_WORDS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class Mailboxes:
    """A rank's view of all ranks' mailboxes.

    table: int64 [world], the address of each rank's mailboxes in this device's address space.
    turns: int32 [max_rows], this rank's counters.
    failed: int32 [1] on the device: 0, or 1 + a rank that did not send in time. From then on nothing is waited for.
    report: int32 [1] in pinned memory of the host: a copy of `failed` that can be read at any time.
    timeout_seconds: how long to wait for a rank. In Triton's interpreter it counts reads.
    """

    rank: int
    world: int
    max_rows: int
    width: int
    dtype: torch.dtype
    table: Tensor
    turns: Tensor
    failed: Tensor
    report: Tensor
    timeout_seconds: float = TIMEOUT_SECONDS

    def silent_rank(self) -> int | None:
        """Return a rank that did not send in time, or None. Everything computed since then is invalid."""
        found = int(self.report[0])
        return found - 1 if found else None


def mailbox_bytes(world: int, max_rows: int, width: int, dtype: torch.dtype) -> int:
    """Return bytes of a rank's mailboxes. Raises ValueError if they exceed the kernels' limit, or for other dtypes."""
    places = NUM_TURNS * world * max_rows * width
    if places >= 1 << 31:
        raise ValueError(
            f"mailboxes of {max_rows} rows of {width} for {world} ranks have 2^31 places or more: take fewer rows"
        )
    if dtype not in _WORDS:
        raise ValueError(f"exchanges are of bfloat16, float16 or float32, not {dtype}")
    return places * dtype.itemsize


def empty(memory: Tensor, dtype: torch.dtype) -> None:
    """Mark mailboxes, uint8 [mailbox_bytes], as empty; must run before any rank writes to them."""
    word = _WORDS[dtype]
    memory.view(word).fill_(torch.iinfo(word).min)
