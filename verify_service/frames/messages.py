"""Frames between the door and the engine process: `FromDoor` goes to the engine, `FromEngine` to the door. Torch-free.

How they are cut and packed is in `outrider.host.frames`.
"""

from __future__ import annotations

import msgspec

from verify_service.frames.drafts import (
    DraftDown,
    DraftReset,
    DraftSaid,
    DraftTold,
    DraftUp,
    FeaturesDone,
    FeaturesOpen,
    FeaturesTold,
    FeaturesUp,
    ProjectionFrame,
)
from verify_service.frames.engine import (
    Ready,
    Refused,
    Start,
    Stop,
    Told,
)
from verify_service.frames.requests import (
    Cancel,
    Submit,
)

FromDoor = (
    Start | Submit | Cancel | DraftUp | DraftDown | DraftSaid | Stop | FeaturesUp | FeaturesDone | ProjectionFrame
)
FromEngine = Ready | Refused | Told | DraftTold | DraftReset | FeaturesOpen | FeaturesTold

from_door: msgspec.msgpack.Decoder[FromDoor] = msgspec.msgpack.Decoder(FromDoor)
from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
