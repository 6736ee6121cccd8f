"""What every engine process does at its start and its end."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import msgspec

from outrider.errors import ConfigError, InternalError
from outrider.host.pipe import Pipe
from outrider.logs import get_logger
from outrider.rpc.lifecycle import EXIT_CONFIG, EXIT_FAILURE

FAREWELL_SECONDS = 2.0
"""How long the last frames may wait for the door to read them."""

FrameT = TypeVar("FrameT")
StartT = TypeVar("StartT")
BuiltT = TypeVar("BuiltT")

log = get_logger(__name__)


def inherited_socket(argument: str) -> socket.socket:
    """The socket whose descriptor the door has passed; processes that this one starts do not get it."""
    os.set_inheritable(int(argument), False)
    return socket.socket(fileno=int(argument))


def await_first(pipe: Pipe[FrameT], kind: type[StartT]) -> StartT | None:
    """What the door sends first; None when it is gone before. Raises InternalError for another frame."""
    while not pipe.closed:
        for frame in pipe.receive():
            if not isinstance(frame, kind):
                raise InternalError(f"the door's first frame is not {kind.__name__}")
            return frame
        pipe.wait(None)
    return None


def build_or_refuse(
    pipe: Pipe[FrameT], build: Callable[[], BuiltT], refusal: Callable[[str], msgspec.Struct]
) -> BuiltT | int:
    """What `build` makes, or the exit code of a process that cannot serve; a `refusal` goes to the door."""
    try:
        return build()
    except ConfigError as error:
        pipe.send(refusal(error.message))
        pipe.drain(FAREWELL_SECONDS)
        return EXIT_CONFIG
    except Exception:
        log.exception("the engine could not be built")
        return EXIT_FAILURE


def leave(code: int) -> NoReturn:
    """End the process; after a failure at once: what a broken CUDA context holds may hang or abort when it is freed."""
    if code == EXIT_FAILURE:
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
