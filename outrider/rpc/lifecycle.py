"""Lifecycle of a service process: logging, signals, exit codes, and the ready file with its addresses."""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from outrider.config.base import ENV_PREFIX, describe_options, read_options
from outrider.config.draft import DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.service import ServiceOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, ConfigError
from outrider.logs import configure_logging, get_logger, mend_streams, redact

if sys.platform == "win32":
    from asyncio import new_event_loop
else:
    # A gateway's process takes a fifth less time for a token than with asyncio's own loop.
    from uvloop import new_event_loop

_NO_OPTIONS = ("API_KEY", "HEADS", "HOME", "MODELS")
"""Variables that other parts read (names without the prefix), and MODELS, the folder of compose.yaml."""
_LIKENESS = 0.8
"""Similarity of two names, 0 to 1, from which on one counts as a misspelling of the other."""

OptionsT = TypeVar("OptionsT", bound=ServiceOptions)


_logger = get_logger(__name__)


def run_service(main: Callable[[OptionsT, asyncio.Event], Coroutine[Any, Any, int | None]], options: OptionsT) -> int:
    """Run `main(options, stop)` until it returns, and return the process's exit code.

    SIGTERM and the first SIGINT set `stop`; `main` then drains and returns (None means 0). A second SIGINT ends the
    process at once with 130. ConfigError becomes one line on stderr and 2; any other exception is logged and is 1.

    Uses `options.log_level`, and `options.ready_file`, which exists only while the service serves. Log lines name
    the service: "draft" for DraftOptions.
    """
    name = type(options).__name__.removesuffix("Options").lower()
    mend_streams()
    configure_logging(name, options.log_level)
    for variable, meant in misspelt_variables(os.environ):
        _logger.warning("%s in the environment is not an option of any service; did you mean %s?", variable, meant)
    try:
        remove_ready_file(options.ready_file)
        _check_ready_file(options.ready_file)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_with_signals(main, options)) or EXIT_OK
    except Exception as error:
        config_error = _only_config_error(error)
        if config_error is not None:
            text = with_variable(config_error.message, options, os.environ)
            print(f"{name}: error: {redact(text)}", file=sys.stderr, flush=True)
            return EXIT_CONFIG
        _logger.error("the service failed", exc_info=error)
        return EXIT_FAILURE
    finally:
        with suppress(ConfigError):
            remove_ready_file(options.ready_file)


def with_variable(message: str, options: Any, env: Mapping[str, str]) -> str:
    """Return `message` with the option that begins it replaced by its variable if its value came from there."""
    for item in describe_options(type(options)):
        if message.startswith(f"{item.flag}:") and env.get(item.env):
            with suppress(ConfigError):  # an invalid variable was never read: the flag was given
                given = read_options(type(options), {}, {item.env: env[item.env]}, {})
                if getattr(given, item.name) == getattr(options, item.name):
                    return f"{item.env} (environment){message.removeprefix(item.flag)}"
    return message


def misspelt_variables(variables: Iterable[str]) -> list[tuple[str, str]]:
    """Return the variables that nearly match the variable of an option of any service, each with that one.

    A service's environment may also hold other services' options, and unrelated variables.
    """
    services = (GatewayOptions, VerifyOptions, DraftOptions)
    options = (option for service in services for option in describe_options(service))
    known = {option.env.removeprefix(ENV_PREFIX) for option in options} | {*_NO_OPTIONS}
    found = []
    for variable in sorted(variables):
        name = variable.removeprefix(ENV_PREFIX)
        if name != variable and name not in known and not name.startswith("HEALTH_"):
            found += [(variable, ENV_PREFIX + near) for near in difflib.get_close_matches(name, known, 1, _LIKENESS)]
    return found


async def _with_signals(
    main: Callable[[OptionsT, asyncio.Event], Coroutine[Any, Any, int | None]], options: OptionsT
) -> int | None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    interrupts = 0

    # Plain signal handlers, not the loop's: they run between two bytecodes even while a callback blocks the loop.
    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            for handler in logging.getLogger().handlers:
                handler.flush()
            os._exit(EXIT_INTERRUPTED)
        loop.call_soon_threadsafe(request_stop, number)

    def request_stop(number: int) -> None:
        if not stop.is_set():
            _logger.info("%s: stopping", signal.Signals(number).name)
            stop.set()

    if threading.current_thread() is not threading.main_thread():
        return await main(options, stop)
    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return await main(options, stop)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _only_config_error(error: BaseException) -> ConfigError | None:
    """Return `error` if it is a ConfigError, or the single ConfigError that task groups have wrapped; else None."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, ConfigError) else None


def write_ready_file(
    path: str | Path, *, address: str, metrics_address: str = "", rest_address: str = "", **about: str
) -> None:
    """Write the bound addresses and `about` as JSON, atomically: a reader sees the whole content or no file.

    Does nothing for an empty path. Raises ConfigError if the file cannot be written.
    """
    if not str(path):
        return
    target = Path(path)
    content = {"address": address, "metrics_address": metrics_address, "rest_address": rest_address, **about}
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=target.parent, prefix=f".{target.name}.", delete=False, encoding="utf-8"
        ) as file:
            json.dump(content, file)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, target)
    except OSError as error:
        raise ConfigError(f"--ready-file: cannot write {target}: {error.strerror}; use a writable path") from error


def _check_ready_file(path: str) -> None:
    """Raise ConfigError now for a ready file that could not be written later, after the model has been loaded."""
    folder = Path(path).parent
    if path and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"--ready-file: cannot write {path}: {folder} is not a writable folder; use a writable path")


def remove_ready_file(path: str | Path) -> None:
    """Remove the file of `write_ready_file`, if it exists. Raises ConfigError if it cannot be removed."""
    if not str(path):
        return
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--ready-file: cannot remove {path}: {error.strerror}; use a path that can be removed"
        ) from error
