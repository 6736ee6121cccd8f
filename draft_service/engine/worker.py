"""The engine process: `python -m draft_service.engine.worker FD FD`, with its sockets to the door. One thread, no loop.

It loads what the door's `Start` names, says `Ready` or `Refused`, and grows trees until told to stop or the door is
gone. Signals are the door's business: it starts this process with SIGINT and SIGTERM blocked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from draft_service.door.profile import describe
from draft_service.engine.engine import DraftEngine
from draft_service.frames import FeaturesFromDoor, FromDoor, Ready, Refused, Start, features_from_door, from_door
from outrider.config.draft import DraftOptions
from outrider.drafting.base import AnyDrafter
from outrider.drafting.model.drafter import find_mapper, workplace
from outrider.drafting.model.features import MemoryMapper
from outrider.drafting.registry import build_drafter
from outrider.host.child import share_interpreter
from outrider.host.cores import keep_to
from outrider.host.garbage import take_over
from outrider.host.line import listen
from outrider.host.pipe import Pipe
from outrider.host.worker import FAREWELL_SECONDS, await_first, build_or_refuse, inherited_socket, leave
from outrider.logs import configure_logging, get_logger
from outrider.protocol.parts import LineFrame
from outrider.rpc.lifecycle import EXIT_FAILURE, EXIT_OK

_logger = get_logger("draft_service.engine.worker")


@dataclass(frozen=True, slots=True)
class Built:
    """What an engine works with."""

    drafter: AnyDrafter
    mapper: MemoryMapper | None = None
    """Maps verify's memory where the drafter works, if that can be."""


Build = Callable[[DraftOptions], Built]
"""Raises ConfigError where the options cannot be met."""


def main(argv: list[str]) -> int:
    """Serve the door at the other end of two inherited sockets; returns the exit code."""
    with inherited_socket(argv[0]) as sock, inherited_socket(argv[1]) as features:
        pipe = Pipe(sock, from_door)
        start = await_first(pipe, Start)
        if start is None:
            return EXIT_FAILURE
        configure_logging("draft", start.options.log_level)
        return serve_engine(pipe, Pipe(features, features_from_door), start.options, assemble)


def assemble(options: DraftOptions) -> Built:
    """Load the drafters that the options name. Raises ConfigError."""
    keep_to(options.engine_cpus)
    share_interpreter()
    drafter = build_drafter(options)
    built = Built(drafter, find_mapper(drafter))
    take_over()
    return built


def serve_engine(pipe: Pipe[FromDoor], features: Pipe[FeaturesFromDoor], options: DraftOptions, build: Build) -> int:
    """Run an engine for the door until it says Stop or hangs up; returns the exit code."""

    def make() -> tuple[DraftEngine, Ready]:
        built, listener = build(options), listen(options.local_line)
        engine = DraftEngine(built.drafter, options, pipe, features, built.mapper, listener)
        line = None if listener is None else LineFrame(listener.host, listener.path, "")
        return engine, Ready(describe(built.drafter, maps_memory=built.mapper is not None), line)

    made = build_or_refuse(pipe, make, Refused)
    if isinstance(made, int):
        return made
    engine, ready = made
    pipe.send(ready)
    with workplace(engine.drafter):
        engine.run()
    pipe.drain(FAREWELL_SECONDS)
    return EXIT_OK if engine.inbox.stopped else EXIT_FAILURE


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
