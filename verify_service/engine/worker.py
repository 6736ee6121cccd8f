"""The engine process: `python -m verify_service.engine.worker FD`, with the socket to the door. One thread, no loop.

It loads what the door's `Start` names, says `Ready` or `Refused`, and runs rounds until told to stop or the door is
gone. Signals are the door's business: it starts this process with SIGINT and SIGTERM blocked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from outrider.config.verify import VerifyOptions
from outrider.host.pipe import Pipe
from outrider.host.worker import BuiltEngine, exit_process, run_worker
from verify_service.engine.build import Built, assemble
from verify_service.engine.engine import VerifyInbox
from verify_service.engine.inbox import SocketInbox
from verify_service.engine.reporter import VerifyReporter
from verify_service.frames import FromDoor, TargetProfile, from_door

Build = Callable[[VerifyOptions, VerifyInbox, VerifyReporter], Built]
"""Makes the engine that the options ask for. Raises ConfigError when they cannot be met."""


def main(argv: list[str]) -> int:
    """Serve the door at the other end of an inherited socket; returns the exit code."""
    return run_worker("verify", argv, [from_door], partial(connect, build=assemble))


def connect(options: VerifyOptions, pipe: Pipe[FromDoor], build: Build) -> BuiltEngine[TargetProfile]:
    """An engine that hears and answers the door. Raises what `build` raises."""
    inbox, reporter = SocketInbox(pipe), VerifyReporter(pipe)
    built = build(options, inbox, reporter)
    reporter.watch(built.engine)
    inbox.serve(built.engine, reporter)

    def run() -> bool:
        built.engine.run()
        return inbox.stopped

    return BuiltEngine(built.served, run)


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
