"""What every engine process does at its start and its end."""

from __future__ import annotations

import os
import socket
import sys
from typing import NoReturn, TypeVar

from outrider.errors import InternalError
from outrider.process.pipe import Pipe
from outrider.rpc.lifecycle import EXIT_FAILURE

FAREWELL_SECONDS = 2.0
"""How long the last frames may wait for the door to read them."""

FrameT = TypeVar("FrameT")
StartT = TypeVar("StartT")


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


def leave(code: int) -> NoReturn:
    """End the process; after a failure at once: what a broken CUDA context holds may hang or abort when it is freed."""
    if code == EXIT_FAILURE:
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
