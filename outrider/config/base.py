"""Options of a service: a frozen dataclass, filled from the command line, the environment and its defaults.

    @dataclass(frozen=True)
    class DraftOptions:
        max_requests: int = option(1024, "Requests open at once.", minimum=1)

    options = parse_options(DraftOptions, prog="python -m draft_service")     # --max-requests 5

A field `max_requests` is the flag --max-requests and the environment variable OUTRIDER_MAX_REQUESTS; the flag wins.
Types: int, float, str, bool, Path, tuple[str, ...] (comma separated), and each of them `| None` (empty text is None).
A wrong value raises a ConfigError that names the option, the value, the limit and the fix. A leading `~` in paths is
expanded: see `expand`.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from outrider.config.compat import translate
from outrider.errors import ConfigError

ENV_PREFIX = "OUTRIDER_"

OptionsT = TypeVar("OptionsT")

MAX_WHOLE = 2**31 - 1
"""Highest value of whole-number options without a maximum of their own: messages and memory hold no larger ones."""
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_KIND_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def option(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
    secret: bool = False,
) -> Any:
    """Declare a field of an options dataclass.

    `minimum` and `maximum` are inclusive; `choices` are the legal texts. A `secret` is kept out of the options'
    repr, of --help and of `options_to_argv` (command lines can be read by every user of a machine).
    """
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "choices": choices, "secret": secret}
    return field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True)
class Option:
    """The declaration of one field of an options dataclass."""

    name: str
    kind: type
    optional: bool
    default: Any
    help: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...] | None
    secret: bool

    @property
    def flag(self) -> str:
        """The option as it is written on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The option's environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def help_text(self) -> str:
        """The help text with the option's limits."""
        limits = []
        if self.choices is not None:
            limits.append(f"One of {', '.join(self.choices)}.")
        if self.minimum is not None:
            limits.append(f"At least {self.minimum}.")
        if self.maximum is not None:
            limits.append(f"At most {self.maximum}.")
        return " ".join([self.help, *limits])

    @property
    def default_text(self) -> str:
        """The default as a user would write it; empty for None and for secrets."""
        return "" if self.secret or self.default is None else _to_text(self, self.default)


def parse_options(
    options_type: type[OptionsT],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    env: Mapping[str, str] | None = None,
) -> OptionsT:
    """Parse the command line and the environment into options.

    `argv` is without the program's name. None takes the process's own arguments, and a mistake then ends the process
    as argparse does: one line on stderr, exit code 2. With an explicit `argv` a mistake raises ConfigError.
    `--help` prints the options with their defaults and exits.
    """
    name = prog or Path(sys.argv[0]).name
    items = describe_options(options_type)
    flags = [item.flag for item in items]
    summary = (options_type.__doc__ or "").strip().splitlines()
    parser = _Parser(prog=prog, description=summary[0] if summary else None, allow_abbrev=False)
    for item in items:
        default = "a secret" if item.secret and item.default else (item.default_text or "empty")
        text = f"{item.help_text} Default: {default}. Environment: {item.env}."
        add_option(parser, item, item.flag, item.name, item.kind.__name__.upper(), text)
    try:
        words = sys.argv[1:] if argv is None else argv
        words = translate(words, flags, lambda text: print(f"{name}: warning: {text}", file=sys.stderr))
        given, unknown = parser.parse_known_args(words)
        if unknown:
            raise ConfigError(_unknown_text(unknown[0], flags))
        return read_options(options_type, vars(given), os.environ if env is None else env, {})
    except ConfigError as error:
        if argv is not None:
            raise
        print(f"{name}: error: {error.message}", file=sys.stderr)
        raise SystemExit(2) from None


def add_option(
    parser: argparse._ActionsContainer, item: Option, flag: str, dest: str, metavar: str, help: str
) -> argparse.Action:
    """Declare an option to argparse. Its value is text, absent if not given; a bool's may be left out for true."""
    return parser.add_argument(
        flag,
        dest=dest,
        default=argparse.SUPPRESS,
        metavar=metavar,
        help=help.replace("%", "%%"),
        nargs="?" if item.kind is bool else None,
        const="true" if item.kind is bool else None,
    )


def read_options(
    options_type: type[OptionsT], given: Mapping[str, Any], env: Mapping[str, str], spelled: Mapping[str, str]
) -> OptionsT:
    """Return options with values from `given` (argparse's, by field name), else the environment, else the defaults.

    `spelled` has the flags of fields that the user knows under other flags than their own. Raises ConfigError.
    """
    values: dict[str, Any] = {}
    for item in describe_options(options_type):
        if item.name in given:
            # For --name=-- argparse drops the -- and leaves an empty list.
            text = "--" if given[item.name] == [] else given[item.name]
            values[item.name] = _from_text(item, text, spelled.get(item.name, item.flag))
        elif item.env in env and (env[item.env] or item.optional or item.kind in (str, tuple)):
            values[item.name] = _from_text(item, env[item.env], f"{item.env} (environment)")
    return options_type(**values)


def describe_options(options_type: type) -> list[Option]:
    """Return the options of a dataclass, in order."""
    hints = typing.get_type_hints(options_type)
    return [_describe_field(entry, hints[entry.name]) for entry in fields(options_type)]


def options_to_argv(options: object) -> list[str]:
    """Return the command line that gives a child process these options, secrets excepted (see `options_to_env`).

    Every field is written out, so that the child's environment cannot change it.
    """
    return [
        f"{item.flag}={_to_text(item, getattr(options, item.name))}"
        for item in describe_options(type(options))
        if not item.secret
    ]


def options_to_env(options: object) -> dict[str, str]:
    """Return the environment variables that give a child process the secrets among these options."""
    items = [item for item in describe_options(type(options)) if item.secret]
    return {item.env: _to_text(item, getattr(options, item.name)) for item in items}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")


def _describe_field(entry: Field[Any], hint: Any) -> Option:
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        arguments = [part for part in typing.get_args(hint) if part is not types.NoneType]
        optional = len(arguments) < len(typing.get_args(hint))
        hint = arguments[0] if len(arguments) == 1 else hint
    if typing.get_origin(hint) is tuple and typing.get_args(hint) == (str, Ellipsis):
        hint = tuple
    if hint not in (int, float, str, bool, Path, tuple):
        raise TypeError(f"option {entry.name}: type {hint} is not supported")
    if entry.default is MISSING or "help" not in entry.metadata:
        raise TypeError(f"option {entry.name}: declare it with option(default, help)")
    return Option(entry.name, hint, optional, entry.default, **entry.metadata)


def _from_text(item: Option, text: str, source: str) -> Any:
    value: Any
    check_text(text, source)
    if item.optional and not text:
        return None
    if item.kind is bool:
        lowered = text.strip().lower()
        if lowered not in _TRUE + _FALSE:
            raise _wrong(item, source, text, "is not true or false")
        return lowered in _TRUE
    if item.kind is tuple:
        value = tuple(part.strip() for part in text.split(",") if part.strip())
    elif item.kind is Path:
        try:
            value = Path(text).expanduser()
        except RuntimeError:
            raise _wrong(item, source, text, "names a home that does not exist", "write the whole path") from None
    elif item.kind is str:
        value = text
    else:
        try:
            value = item.kind(text)
        except ValueError:
            raise _wrong(item, source, text, f"is not {_KIND_WORDS[item.kind]}") from None
    _check(item, value, source, text)
    return value


def _check(item: Option, value: Any, source: str, shown: str) -> None:
    """Raise ConfigError unless `value` is within its limits; `shown` is how the user wrote it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise _wrong(item, source, shown, "is not a finite number")
    if item.minimum is not None and value < item.minimum:
        raise _wrong(item, source, shown, f"is below the minimum {item.minimum}", f"use {item.minimum} or more")
    maximum = MAX_WHOLE if item.maximum is None and isinstance(value, int) else item.maximum
    if maximum is not None and value > maximum:
        raise _wrong(item, source, shown, f"is above the maximum {maximum}", f"use {maximum} or less")
    for part in value if isinstance(value, tuple) else (value,):
        if item.choices is not None and part not in item.choices:
            raise _wrong(item, source, part, f"is not one of {', '.join(item.choices)}", _near(str(part), item.choices))


def _wrong(item: Option, source: str, shown: str, problem: str, fix: str = "") -> ConfigError:
    return ConfigError(f"{source}: {'the value' if item.secret else repr(shown)} {problem}; {fix or _limits(item)}")


def _limits(item: Option) -> str:
    if item.kind is bool:
        return f"use {item.flag} or {item.flag}=false"
    if item.choices is not None:
        return f"use {' or '.join(item.choices)}"
    if item.minimum is not None and item.maximum is not None:
        return f"use {_KIND_WORDS.get(item.kind, 'a value')} from {item.minimum} to {item.maximum}"
    if item.minimum is not None:
        return f"use {_KIND_WORDS.get(item.kind, 'a value')} of {item.minimum} or more"
    return f"use {_KIND_WORDS.get(item.kind, 'a ' + item.kind.__name__)}, for instance {item.default_text or '1'}"


def _unknown_text(argument: str, flags: Sequence[str]) -> str:
    name = argument.split("=", 1)[0]
    if not name.startswith("-"):
        return f"unexpected argument {name!r}; every option is written --name value, see --help"
    return f"unknown option {name}; {_near(name, flags)}"


def _near(text: str, candidates: Sequence[str]) -> str:
    by_lowered = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(text.lower(), by_lowered, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(by_lowered[match] for match in close)}?" if close else "see --help"


def _to_text(item: Option, value: Any) -> str:
    if value is None:
        return ""
    if item.kind is bool:
        return "true" if value else "false"
    if item.kind is tuple:
        for part in value:
            if not part.strip() or part != part.strip() or "," in part:
                raise ConfigError(f"{item.flag}: {part!r} cannot be part of a comma separated list; rename it")
        return ",".join(value)
    return str(value)


def check_text(text: str, source: str) -> None:
    """Raise ConfigError, naming `source`, if a text of the command line or the environment is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{source}: {text!r} is not UTF-8, and no message could hold it; write it as UTF-8") from None


def expand(name: str | Path) -> Path:
    """Return `name` as a path with `~` expanded. Raises ConfigError if that home does not exist."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ConfigError(f"{name} names a home that does not exist; write the whole path") from None
