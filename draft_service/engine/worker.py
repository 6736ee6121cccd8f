"""The engine process: `outrider.host.launch` calls `main` with the sockets to the door. One thread, no loop.

It loads what the door's `Start` names, says `Ready` or `Refused`, and grows trees until told to stop or the door is
gone. Signals are the door's business: it starts this process with SIGINT and SIGTERM blocked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from draft_service.engine.engine import DraftEngine
from draft_service.frames import DrafterProfile, FeaturesFromDoor, FromDoor, features_from_door, from_door
from outrider.config.draft import DraftOptions
from outrider.drafting.base import AnyDrafter
from outrider.drafting.model.drafter import find_mapper, workplace
from outrider.drafting.model.features import MemoryMapper
from outrider.drafting.registry import build_drafter
from outrider.drafting.requests import drafters_of_any_target, introduce
from outrider.errors import ConfigError
from outrider.host.line import listen
from outrider.host.process import switch_threads_often
from outrider.host.worker import BuiltEngine, Pipe, disable_automatic_collection, pin_to_cores, run_worker
from outrider.models.drafters.kinds import without_model
from outrider.protocol.speculation import LineOffer

Build = Callable[[DraftOptions], tuple[AnyDrafter, MemoryMapper | None]]
"""Makes the drafter, and what maps verify's memory where that works, if that can be. Raises ConfigError."""


def main(argv: list[str]) -> int:
    """Serve the door at the other end of two inherited sockets; returns the exit code."""
    return run_worker("draft", argv, (from_door, features_from_door), partial(connect, build=assemble))


def assemble(options: DraftOptions) -> tuple[AnyDrafter, MemoryMapper | None]:
    """Load the drafters that the options name. Raises ConfigError."""
    pin_to_cores(options.engine_cpus)
    switch_threads_often()
    drafter = build_drafter(options)
    mapper = find_mapper(drafter)
    disable_automatic_collection()
    return drafter, mapper


def connect(
    options: DraftOptions, pipe: Pipe[FromDoor], features: Pipe[FeaturesFromDoor], build: Build
) -> BuiltEngine[DrafterProfile]:
    """An engine that hears and answers the door.

    Raises what `build` raises; of a draft model with NGRAM beside it the log tells it instead.
    """
    try:
        drafter, mapper = build(options)
    except ConfigError as error:
        options = without_model(options, error)
        drafter, mapper = build(options)
    listener = listen(options.local_line)
    line = None if listener is None else LineOffer(listener.host, listener.path)
    engine = DraftEngine(drafter, options, pipe, features, mapper, listener)

    def run() -> bool:
        with workplace(drafter):
            engine.run()
        return engine.inbox.stopped

    return BuiltEngine(describe(drafter, options, maps_memory=mapper is not None, line=line), run)


def describe(
    drafter: AnyDrafter, options: DraftOptions, *, maps_memory: bool = False, line: LineOffer | None = None
) -> DrafterProfile:
    """What the door is told of the drafter that the options name."""
    hello = replace(introduce(drafter, options), line=line)
    return DrafterProfile(hello, drafters_of_any_target(drafter), maps_memory, tuple(drafter.gauges()))
