"""The engine process: one thread, no event loop. `python -m draft_service.worker FD FD` with its sockets to the door.

It loads what the door's `Start` names, says `Ready` or `Refused`, and grows trees until told to stop or the door is
gone. Signals are the door's business: it starts this process with SIGINT and SIGTERM blocked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from draft_service.drafters.base import AnyDrafter, build_drafter
from draft_service.drafters.model import find_mapper, workplace
from draft_service.engine import Engine
from draft_service.feature_ring import MemoryMapper
from draft_service.profile import describe
from draft_service.wire import FeaturesFromDoor, FromDoor, Ready, Refused, Start, features_from_door, from_door
from outrider.config.draft import DraftOptions
from outrider.logs import configure_logging, get_logger
from outrider.process.child import share_interpreter
from outrider.process.cores import keep_to
from outrider.process.garbage import take_over
from outrider.process.line import listen
from outrider.process.parts import LineFrame
from outrider.process.pipe import Pipe
from outrider.process.worker import FAREWELL_SECONDS, await_first, build_or_refuse, inherited_socket, leave
from outrider.rpc.lifecycle import EXIT_FAILURE, EXIT_OK

_logger = get_logger("draft_service.worker")


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

    def make() -> tuple[Engine, Ready]:
        built, listener = build(options), listen(options.local_line)
        engine = Engine(built.drafter, options, pipe, features, built.mapper, listener)
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
