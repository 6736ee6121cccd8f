"""Calls of tools in the text of an answer, found while it grows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum, auto

from gateway.core.tool_format import ToolFormat

_SEPARATORS = " \t\r\n,;[]"
"""What stands between calls and around them."""
_ARGUMENTS = ("arguments", "parameters")
_NAME = re.compile(r"[\w.-]+")
_MAX_NAME = 256
"""Characters of a name without quotes; longer ones are text."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """News of one call: its id and its name once, then pieces of its arguments, which are JSON."""

    index: int
    """Of the call in its answer."""
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """How calls are found in the answers to a request."""

    form: ToolFormat
    names: frozenset[str]
    """Of known tools."""
    parallel: bool = True
    """Whether an answer may hold several calls."""
    forced: bool = False
    """Whether the prompt ends with the opener, and the answer is a call."""


class _CallReader:
    """Reads one object with a name and arguments, a character at a time."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""
        """Those not yet taken."""
        self.has_arguments = False
        self.is_done = False
        self.has_failed = False
        self._key: str | None = None
        self._value = ""
        """The key or the value that is being read, unless it is streamed."""
        self._wants = "{"
        self._depth = 0
        self._is_scalar = False
        self._in_string = False
        self._escaped = False
        self._streams = False

    def read(self, character: str) -> None:
        """The next character."""
        if self._wants in ("key value", "value"):
            self._read_value(character)
        elif not character.isspace():
            self._read_mark(character)

    def _read_mark(self, character: str) -> None:
        match self._wants, character:
            case "{", "{":
                self._wants = "key or end"
            case (("key or end" | "key"), '"'):
                self._begin("key value", character)
            case (("key or end" | "comma"), "}"):
                self.is_done = True
            case ":", ":":
                self._wants = "first"
            case "comma", ",":
                self._wants = "key"
            case "first", ('"' | "{" | "[") as opening:
                self._streams = self._key in _ARGUMENTS and opening == "{"
                self._begin("value", character)
            case "first", _ if character not in "}],:":
                self._begin("value", character)
            case _:
                self.has_failed = True

    def _begin(self, wants: str, character: str) -> None:
        self._wants, self._value, self._depth, self._in_string = wants, "", 0, False
        self._read_value(character)

    def _read_value(self, character: str) -> None:
        if not self._value and not self._in_string and self._depth == 0:
            self._is_scalar = character not in '"{['
        elif self._is_scalar and (character in ",}" or character.isspace()):
            self._end_value()
            if not character.isspace():
                self._read_mark(character)
            return
        self._take(character)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        if not self._in_string and self._depth == 0 and not self._is_scalar:
            self._end_value()

    def _take(self, character: str) -> None:
        if self._streams:
            self.arguments += character
        else:
            self._value += character

    def _end_value(self) -> None:
        wants, self._wants = self._wants, "comma"
        if self._streams:
            self._streams, self.has_arguments = False, True
            return
        try:
            value = json.loads(self._value)
        except (ValueError, RecursionError):
            self.has_failed = True
            return
        if wants == "key value":
            self._key, self._wants = str(value), ":"
        elif self._key == "name" and isinstance(value, str):
            self.name = value
        elif self._key in _ARGUMENTS and isinstance(value, str):
            # Some models write the arguments' JSON into a string.
            self.arguments, self.has_arguments = value, True


class _State(Enum):
    TEXT = auto()
    BETWEEN = auto()
    """Behind an opener or a call."""
    NAME = auto()
    """Within a name without quotes."""
    CALL = auto()


class ToolCallParser:
    """Splits an answer's text in what is said and what is called; any cut into pieces gives the same.

    Whitespace around calls belongs to nobody. What only looked like a call is text.
    """

    def __init__(self, calls: ToolCalls) -> None:
        self._form = form = calls.form
        self._names = calls.names
        self._parallel = calls.parallel
        self._bare = form.bare
        self._any_name = not form.bare
        self._state = _State.BETWEEN if calls.forced else _State.TEXT
        self._raw = ""
        """Text since the last call that may still turn out to be none."""
        self._held = ""
        """Whitespace, or the beginning of a mark, that may belong to nobody."""
        self._reader = _CallReader()
        self._name = ""
        self._begun = False
        self._called = False
        """Whether a call has ended since the last text."""
        self._spoke = False
        """Whether text was let through since the last call."""
        self._text: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self.num_calls = 0
        """Calls that have begun."""

    def push(self, piece: str) -> tuple[str, list[ToolCallDelta]]:
        """Adds text. Returns the text that is no call, and what is new of calls."""
        for character in piece:
            self._read(character)
        return self._news()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """Ends the answer. What was held back is text, unless it is whitespace behind a call."""
        unfinished = self._state in (_State.NAME, _State.CALL) and not self._begun
        if unfinished or (self._state is _State.BETWEEN and self._raw.strip(_SEPARATORS if self._called else "")):
            self._give_up()
        rest, self._held = self._held, ""
        if rest.strip() or self._spoke or not self.num_calls:
            self._text.append(rest)
        return self._news()

    def _news(self) -> tuple[str, list[ToolCallDelta]]:
        text, calls = "".join(self._text), _joined(self._calls)
        self._text, self._calls = [], []
        return text, calls

    def _read(self, character: str) -> None:
        if self._state is _State.TEXT:
            self._read_text(character)
            return
        if not self._begun:
            self._raw += character
        match self._state:
            case _State.BETWEEN:
                self._read_between(character)
            case _State.NAME:
                self._read_name(character)
            case _:
                self._read_call(character)

    def _read_text(self, character: str) -> None:
        if self._bare and not self._held.strip() and character in "{[":
            self._raw, self._state, self._bare = self._held, _State.BETWEEN, False
            self._held = ""
            self._read(character)
            return
        self._held += character
        opener = self._form.opener
        if opener and self._held.endswith(opener):
            self._let_through(self._held[: -len(opener)].rstrip())
            self._raw, self._held, self._state, self._any_name = opener, "", _State.BETWEEN, True
            self._called = False
            return
        # As far as it is neither whitespace at the end nor what an opener may begin with.
        safe = self._held[: len(self._held) - _overlap(self._held, opener)].rstrip()
        self._let_through(safe)

    def _let_through(self, text: str) -> None:
        if not text:
            return
        self._held = self._held[len(text) :]
        if self.num_calls and not self._spoke:
            text = text.lstrip()
        self._spoke, self._bare = True, False
        self._text.append(text)

    def _read_between(self, character: str) -> None:
        closer, opener = self._form.closer, self._form.opener
        tail = (self._raw.removeprefix(opener) if opener else self._raw).lstrip(_SEPARATORS)
        if character == "{" and tail == "{":
            self._reader, self._state = _CallReader(), _State.CALL
            self._reader.read(character)
            return
        if not tail:
            return
        if closer and tail == closer and self._called:
            self._raw, self._state, self._spoke = "", _State.TEXT, False
        elif opener and tail == opener:
            self._raw, self._any_name = opener, True
        elif any(mark.startswith(tail) and mark != tail for mark in (closer, opener)):
            return
        elif self._form.is_list and (character.isalnum() or character == "_"):
            self._name, self._state = character, _State.NAME
        else:
            self._give_up()

    def _read_name(self, character: str) -> None:
        if character == "{":
            # A further opener begins with a separator, which is not here any more.
            name = self._name.removeprefix(self._form.opener[1:]).removesuffix("[ARGS]").partition("[CALL_ID]")[0]
            name = name.strip(_SEPARATORS)
            if name and not _NAME.fullmatch(name):
                self._give_up()
                return
            self._name = name
            self._reader, self._state = _CallReader(), _State.CALL
            for one in f'{{"name": {json.dumps(name)}, "arguments": {{' if name else character:
                self._reader.read(one)
            self._look()
        elif character == "\n" or len(self._name) > _MAX_NAME:
            self._give_up()
        else:
            self._name += character

    def _read_call(self, character: str) -> None:
        self._reader.read(character)
        self._look()

    def _look(self) -> None:
        """What the reader has found."""
        reader = self._reader
        if self._name and reader.has_arguments:
            reader.is_done = True
        if reader.has_failed and not self._begun:
            self._give_up()
            return
        if reader.name is not None and not self._begun:
            if not self._any_name and reader.name not in self._names:
                self._give_up()
                return
            self._begun, self._raw, self._spoke = True, "", False
            self._tell(ToolCallDelta(self.num_calls, self._form.new_id(), reader.name))
            self.num_calls += 1
        if self._begun and reader.arguments:
            self._tell(ToolCallDelta(self.num_calls - 1, arguments=reader.arguments))
            reader.arguments = ""
        if reader.has_failed:
            self._end_call()
        elif reader.is_done:
            if not self._begun:
                self._give_up()
                return
            if not reader.has_arguments:
                self._tell(ToolCallDelta(self.num_calls - 1, arguments="{}"))
            self._end_call()

    def _tell(self, delta: ToolCallDelta) -> None:
        if self._parallel or delta.index == 0:
            self._calls.append(delta)

    def _end_call(self) -> None:
        self._state, self._begun, self._raw, self._name, self._called = _State.BETWEEN, False, "", "", True

    def _give_up(self) -> None:
        """What was taken for the beginning of a call is text."""
        raw = self._raw.lstrip(_SEPARATORS) if self._called else self._raw
        self._raw, self._name, self._called = "", "", False
        self._state, self._bare, self._held = _State.TEXT, False, raw
        keep = _overlap(raw, self._form.opener)
        self._let_through(raw[: len(raw) - keep].rstrip())


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text a mark may begin with."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def _joined(deltas: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """Pieces of one call's arguments that follow each other, as one."""
    joined: list[ToolCallDelta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if last is not None and last.index == delta.index and not delta.id:
            joined[-1] = ToolCallDelta(last.index, last.id, last.name, last.arguments + delta.arguments)
        else:
            joined.append(delta)
    return joined
