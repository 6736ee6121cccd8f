"""The engine's side of an engine process: its sockets, its start and its end, and the cores that it runs on."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from outrider.errors import ConfigError, InternalError
from outrider.host.frames import Ready, Refused, Start
from outrider.host.pipe import Pipe
from outrider.logs import configure_logging, get_logger
from outrider.rpc.lifecycle import EXIT_CONFIG, EXIT_FAILURE, EXIT_OK

FLUSH_SECONDS = 2.0
"""How long the last frames may wait for the door to read them."""
_CORE_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")

ServedT = TypeVar("ServedT")

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine(Generic[ServedT]):
    """An engine that has not run yet."""

    served: ServedT
    """What the door is told of it."""
    run: Callable[[], bool]
    """Serves the door until it says Stop; returns whether it did: it may hang up, and the engine may fail."""


def run_worker(
    service: str,
    arguments: Sequence[str],
    decoders: Sequence[msgspec.msgpack.Decoder[Any]],
    build: Callable[..., BuiltEngine[Any]],
) -> int:
    """Serve the door at the other end of inherited sockets; returns the exit code.

    `arguments`: the sockets' descriptors, the one that brings `Start` first; `decoders`: of what comes on each.
    `build` gets the options and a pipe for each socket.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(inherited_socket(argument)) for argument in arguments]
        pipes = [Pipe[Any](sock, decoder) for sock, decoder in zip(sockets, decoders, strict=True)]
        start = await_start(pipes[0])
        if start is None:
            return EXIT_FAILURE
        configure_logging(service, start.options.log_level)
        return run_engine(pipes[0], lambda: build(start.options, *pipes))


def inherited_socket(argument: str) -> socket.socket:
    """The socket whose descriptor the door has passed; processes that this one starts do not get it."""
    os.set_inheritable(int(argument), False)
    return socket.socket(fileno=int(argument))


def await_start(pipe: Pipe[Any]) -> Start[Any] | None:
    """What the door sends first; None when it is gone before. Raises InternalError for another frame."""
    while not pipe.closed:
        for frame in pipe.receive():
            if not isinstance(frame, Start):
                raise InternalError("the door's first frame is not Start")
            return frame
        pipe.wait(None)
    return None


def run_engine(pipe: Pipe[Any], build: Callable[[], BuiltEngine[Any]]) -> int:
    """Build an engine, tell the door `Ready` or `Refused`, and run it to its end; returns the exit code."""
    try:
        built = build()
    except ConfigError as error:
        pipe.send(Refused(error.message))
        pipe.drain(FLUSH_SECONDS)
        return EXIT_CONFIG
    except Exception:
        log.exception("the engine could not be built")
        return EXIT_FAILURE
    pipe.send(Ready(built.served))
    stopped = built.run()
    pipe.drain(FLUSH_SECONDS)
    return EXIT_OK if stopped else EXIT_FAILURE


def exit_process(code: int) -> NoReturn:
    """End the process; after a failure at once: what a broken CUDA context holds may hang or abort when it is freed."""
    if code == EXIT_FAILURE:
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def pin_to_cores(text: str) -> None:
    """From now on the calling thread, and threads that it starts, run on these cores alone; on any if `text` is empty.

    `text` is a list as `taskset -c` takes it: "4", "0,8-11". Raises ConfigError, naming --engine-cpus.
    """
    if not text.strip():
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--engine-cpus: this system does not let a process choose its cores; leave it empty")
    wanted, allowed = parse_cores(text), os.sched_getaffinity(0)
    if missing := sorted(wanted - allowed):
        raise ConfigError(
            f"--engine-cpus: {text!r} names core {missing[0]}; this process may run on {format_cores(allowed)}, "
            "choose of those"
        )
    os.sched_setaffinity(0, wanted)
    log.info("the engine runs on cores %s alone", format_cores(wanted))


def parse_cores(text: str) -> set[int]:
    """The cores of a list as `taskset -c` takes it. Raises ConfigError."""
    cores: set[int] = set()
    for part in text.split(","):
        found = _CORE_RANGE.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise ConfigError(f"--engine-cpus: {text!r} is no list of cores; write it like 4 or 0,8-11")
        cores.update(range(first, last + 1))
    return cores


def format_cores(cores: set[int]) -> str:
    """As short as they can be written: "0,8-11"."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1][1:] = [core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)
