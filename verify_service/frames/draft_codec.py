"""Between messages of the features stream and the frames of its beginning. Torch-free."""

from __future__ import annotations

from outrider.protocol.messages import FeaturesBegin
from outrider.protocol.part_codec import pack_ring, unpack_ring
from verify_service.frames.drafts import FeaturesOpen


def pack_begin(session: int, begin: FeaturesBegin) -> FeaturesOpen:
    """The beginning of a features stream, but for its token, which the door knows."""
    ring = pack_ring(begin.ring)
    return FeaturesOpen(
        session, list(begin.layers), begin.width, begin.dtype, ring, begin.projected, begin.wants_projection
    )


def unpack_begin(frame: FeaturesOpen) -> FeaturesBegin:
    """The beginning of a features stream, without its token."""
    ring = unpack_ring(frame.ring)
    return FeaturesBegin(
        "", tuple(frame.layers), frame.width, frame.dtype, ring, frame.projected, frame.wants_projection
    )
