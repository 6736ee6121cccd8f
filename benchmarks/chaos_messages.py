"""What a hostile or broken draft service may make of its messages, as the bytes that verify gets."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from outrider.v1 import draft_pb2

Response = draft_pb2.DraftServiceSpeculateResponse

REMEMBERED = 64
HELD_BACK = 4
MAX_NODES = 64


@dataclass
class Corruption:
    """What becomes of each message; `name` says which of `CORRUPTIONS`. One stream's messages go through one of these.

    A message is what the wrapped draft service really said, so most of what it names is real.
    """

    name: str
    random: random.Random
    vocab_size: int
    past: deque[bytes] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    held: list[bytes] = field(default_factory=list)

    def __call__(self, message: bytes) -> list[bytes]:
        """The messages that go out in the place of one."""
        out = CORRUPTIONS[self.name](self, message)
        self.past.append(message)
        return out


def lost(corruption: Corruption, message: bytes) -> list[bytes]:
    """Every third one never arrives."""
    return [] if corruption.random.random() < 0.33 else [message]


def truncated(corruption: Corruption, message: bytes) -> list[bytes]:
    """Half of them end early, in their bytes or in their arrays."""
    draw = corruption.random
    if draw.random() < 0.5 or not message:
        return [message]
    if draw.random() < 0.5:
        return [message[: draw.randrange(len(message))]]
    batch = Response.FromString(message)
    for event in batch.events:
        if event.WhichOneof("event") == "grow":
            name = draw.choice(("parents", "token_ids", "scores", "sources"))
            data = getattr(event.grow, name)
            setattr(event.grow, name, data[: draw.randrange(len(data) + 1)])
    return [batch.SerializeToString()]


def duplicated(corruption: Corruption, message: bytes) -> list[bytes]:
    """All of them come two to four times."""
    return [message] * corruption.random.randint(2, 4)


def reordered(corruption: Corruption, message: bytes) -> list[bytes]:
    """They wait for each other, and leave in any order."""
    corruption.held.append(message)
    if len(corruption.held) < HELD_BACK:
        return []
    out, corruption.held = corruption.held, []
    corruption.random.shuffle(out)
    return out


def stale(corruption: Corruption, message: bytes) -> list[bytes]:
    """With each comes one from before: of an earlier tree, or of a request that has ended."""
    return [message, corruption.random.choice(corruption.past)] if corruption.past else [message]


def flipped(corruption: Corruption, message: bytes) -> list[bytes]:
    """Some bits of each are others."""
    data = bytearray(message)
    for _ in range(corruption.random.randint(1, 4)):
        if data:
            data[corruption.random.randrange(len(data))] ^= 1 << corruption.random.randrange(8)
    return [bytes(data)]


def garbage(corruption: Corruption, message: bytes) -> list[bytes]:
    """Between real ones: noise, and well-formed trees of nonsense for requests that are open."""
    draw = corruption.random
    if draw.random() < 0.3:
        return [message, draw.randbytes(draw.randrange(200))]
    batch = Response()
    for event in Response.FromString(message).events:
        if event.WhichOneof("event") == "grow":
            batch.events.add().grow.CopyFrom(_nonsense(corruption, event.grow))
    return [batch.SerializeToString(), message]


def foreign(corruption: Corruption, message: bytes) -> list[bytes]:
    """Token ids are those of another tokenizer, some past the end of the target's vocabulary."""
    batch = Response.FromString(message)
    for event in batch.events:
        if event.WhichOneof("event") == "grow":
            ids = np.frombuffer(event.grow.token_ids, "<i4").astype(np.int64)
            event.grow.token_ids = ((ids * 7 + 3) % (corruption.vocab_size * 9 // 8)).astype("<i4").tobytes()
    return [batch.SerializeToString()]


def hostile(corruption: Corruption, message: bytes) -> list[bytes]:
    """All of the above, at random."""
    kinds = [kind for name, kind in CORRUPTIONS.items() if name not in ("hostile", "passed")]
    return corruption.random.choice(kinds)(corruption, message)


CORRUPTIONS: dict[str, Callable[[Corruption, bytes], list[bytes]]] = {
    "passed": lambda corruption, message: [message],
    "lost": lost,
    "truncated": truncated,
    "duplicated": duplicated,
    "reordered": reordered,
    "stale": stale,
    "flipped": flipped,
    "garbage": garbage,
    "foreign": foreign,
    "hostile": hostile,
}


def _nonsense(corruption: Corruption, real: draft_pb2.Grow) -> draft_pb2.Grow:
    """A tree that nobody grew, for a request that is open or for none."""
    draw = corruption.random
    count = draw.randrange(MAX_NODES)
    noise = np.random.default_rng(draw.randrange(2**32))
    parents = noise.integers(0, draw.choice((4, 2**32)), count)
    scores = noise.choice([-0.1, -5.0, 3.0, np.nan, -np.inf, np.inf], count)
    return draft_pb2.Grow(
        request=draw.choice((real.request, real.request, draw.randrange(2**64))),
        epoch=draw.choice((real.epoch, real.epoch, real.epoch + 1, 0, 2**64 - 1)),
        base_len=draw.choice((real.base_len, real.base_len, 0, 1, 2**32 - 1)),
        acked_len=draw.choice((real.acked_len, 2**32 - 1)),
        first_id=draw.choice((real.first_id, 1, 0, 2**32 - 1)),
        parents=parents.astype("<u4").tobytes(),
        token_ids=noise.integers(-5, corruption.vocab_size + 5, count).astype("<i4").tobytes(),
        scores=scores.astype("<f4").tobytes(),
        sources=noise.integers(0, 256, count).astype("u1").tobytes(),
    )
