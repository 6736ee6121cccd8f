"""Frames between the door and the engine process: `FromDoor` goes to the engine, `FromEngine` to the door. Torch-free.

How they are cut and packed is in `outrider.host.frames`.
"""

from __future__ import annotations

import msgspec

from outrider.config.verify import VerifyOptions
from outrider.host.frames import Ready, Refused, Start, Stop
from verify_service.frames.drafts import (
    DraftDown,
    DraftReset,
    DraftUp,
    FeaturesDone,
    FeaturesOpen,
    FeaturesToDraft,
    FeaturesUp,
    FromDraft,
    ProjectionFrame,
    ToDraft,
)
from verify_service.frames.engine import EngineUpdates, ServedModel
from verify_service.frames.requests import (
    Cancel,
    Submit,
)

FromDoor = (
    Start[VerifyOptions]
    | Stop
    | Submit
    | Cancel
    | DraftUp
    | DraftDown
    | FromDraft
    | FeaturesUp
    | FeaturesDone
    | ProjectionFrame
)
FromEngine = EngineUpdates | ToDraft | DraftReset | FeaturesOpen | FeaturesToDraft

from_door: msgspec.msgpack.Decoder[FromDoor] = msgspec.msgpack.Decoder(FromDoor)
from_engine: msgspec.msgpack.Decoder[Ready[ServedModel] | Refused | FromEngine] = msgspec.msgpack.Decoder(
    Ready[ServedModel] | Refused | FromEngine
)
