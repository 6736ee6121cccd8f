"""The command `outrider`."""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from outrider import __version__
from outrider.config.base import check_text
from outrider.errors import ConfigError, OutriderError
from outrider.logs import mend_streams

EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130

COMMANDS = {
    "up": "Start gateway, verify and, unless verify itself drafts, a draft service; run them until Ctrl-C.",
    "chat": "Talk to the model in the terminal.",
    "demo": "Start all services, stream one answer with its figures, and stop them.",
    "health": "Check whether a service is serving; the exit code is 0 if it is.",
    "bench": "Send load to a running gateway, and measure latency, throughput and acceptance.",
    "doctor": "Look for problems that keep the services from starting, finding each other, or being safe.",
    "plan": "Show how much GPU memory a configuration needs, from config.json alone.",
    "top": "Watch running services: tokens, acceptance, rounds, memory, errors.",
    "models": "Fetch models, and list those on this machine.",
    "inflate": "Make a large model that gives a small model's answers, to measure speed.",
    "quantize": "Make a checkpoint with 8-bit or 4-bit weights, for tests and measurements.",
    "train": "Train a drafter for a model on the model's own text.",
    "evaluate-draft": "Measure offline how well a drafter guesses a model's answers.",
    "convert": "Convert a model, draft head or token map saved by torch to safetensors or JSON.",
    "version": "Print the version.",
}

TOOLS = ("bench", "convert", "doctor", "evaluate-draft", "inflate", "plan", "quantize", "top", "train")
"""Commands of `outrider_tools`, which is imported by name only: serving does not depend on it."""

WITH_SERVICES = ("up", "chat", "demo", "doctor", "plan")
"""Commands that take the services' options."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and suggest the option that was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        unknown = message.removeprefix("unrecognized arguments: ").split("=")[0].split()
        if message.startswith("unrecognized") and unknown and not unknown[0].startswith("-"):
            message = f"unexpected argument {unknown[0]!r}"
        elif message.startswith("unrecognized") and unknown:
            actions = list(self._actions)  # and those of the commands below
            for action in self._actions:
                if isinstance(action, argparse._SubParsersAction):
                    actions += [inner for parser in action.choices.values() for inner in parser._actions]
            known = [flag for action in actions for flag in action.option_strings]
            close = difflib.get_close_matches(unknown[0], known, n=1)
            message = f"unknown option {unknown[0]}" + (f"; did you mean {close[0]}?" if close else "")
        self.exit(EXIT_CONFIG, f"{self.prog}: error: {message}; see --help\n")


def make_parser(commands: Sequence[str] = tuple(COMMANDS)) -> Parser:
    """Return the command line's parser, with the options of `commands`; other commands are only listed."""
    parser = Parser(prog="outrider", description="Speculative decoding as gRPC services.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, text in COMMANDS.items():
        # The services have too many options for a usage line that lists them all.
        usage = f"outrider {name} [options]" if name in WITH_SERVICES else None
        subparser = subparsers.add_parser(name, help=text, description=text, usage=usage, allow_abbrev=False)
        subparser.add_argument("--no-color", action="store_true", help="Print without colours (as NO_COLOR=1 does).")
        if name in commands and name != "version":
            _module(name).add_parser(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    mend_streams()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"outrider: error: {error.message}", file=sys.stderr)
        return EXIT_CONFIG
    except OutriderError as error:
        print(f"outrider: error: {error.message}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        print("outrider: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        if isinstance(error, PermissionError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}; give this user access, or name another place"
            print(f"outrider: error: {text}", file=sys.stderr)
            return EXIT_CONFIG
        # Handle only a failed write of output: the reader is gone, or the disk is full.
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO) or error.filename is not None:
            raise
        # Python flushes the rest of the output at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print(f"outrider: error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_FAILURE


def _run(words: list[str]) -> int:
    for word in words:
        check_text(word, "the command line")
    # The first word that is not an option is the command; only that command's module is loaded.
    wanted = next((word for word in words if not word.startswith("-")), "")
    if wanted in WITH_SERVICES:
        from outrider.cli.options import translate_argv

        words = translate_argv(words)
    if not words:
        make_parser([]).print_help(sys.stderr)
        return EXIT_CONFIG
    arguments = make_parser([wanted]).parse_args(words)
    if arguments.command == "version":
        print(f"outrider {__version__}")
        return 0
    # Signals that ask the process to end act like Ctrl-C: they unwind the `with` blocks that end the services.
    # SIGINT is set too, since shells without job control start jobs with it ignored. nohup's ignored SIGHUP stays so.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    return int(_module(arguments.command).run(arguments))


def _module(command: str) -> ModuleType:
    package = "outrider_tools" if command in TOOLS else "outrider"
    return importlib.import_module(f"{package}.cli.{command.replace('-', '_')}")
