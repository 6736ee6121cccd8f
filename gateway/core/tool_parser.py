"""Tool calls as models write them: the marks around calls, and finding calls in an answer's text while it grows."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from gateway.core.gemma_calls import QUOTE, read_arguments, write_value
from gateway.core.tokenizer import overlap_length


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls: each is a JSON object with a name and arguments, or written as Gemma does."""

    name: str
    opener: str = ""
    """The mark before calls; empty if the first character of the answer shows that it is a call."""
    closer: str = ""
    """The mark that may follow a call."""
    bare: bool = False
    """Whether an answer that begins with an object or a list may be calls, if it names a known tool."""
    arguments_key: str = "arguments"
    """The object's key for arguments as the model writes it; any known key is read."""
    is_list: bool = False
    """Whether calls are in a list."""
    has_short_ids: bool = False
    """Whether templates want ids of nine letters and digits."""
    quote: str = ""
    """The quote around strings if calls are `call:name{key:value}`; empty for JSON."""

    @property
    def shown_tokens(self) -> frozenset[str]:
        """Tokens that are part of the text even if the tokenizer calls them special."""
        return frozenset({self.opener, self.closer, self.quote, "[ARGS]"} - {""})

    def new_id(self) -> str:
        """Return a new id for a call."""
        return secrets.token_hex(5)[:9] if self.has_short_ids else f"call_{secrets.token_hex(12)}"

    @property
    def forced_opening(self) -> str:
        """Text that is put after the prompt if the answer must be a call."""
        return self.opener if self.is_list or self.quote or not self.closer else f"{self.opener}\n"

    def describe(self) -> str:
        """Describe how to answer with a call, for a model whose template says nothing about calls."""
        if self.quote:
            call = f"{self.opener}call:its name{{key:value,key:value}}{self.closer}"
            return f"answer with nothing but {call}, with {self.quote} before and behind each string"
        call = f'{{"name": its name, "{self.arguments_key}": an object of arguments}}'
        return f"answer with {'a JSON object and nothing else:' if self.bare else 'nothing but'} {self._marked(call)}"

    def write(self, name: str, arguments: Any) -> str:
        """Return a call as it would be written in an answer."""
        if self.quote:
            try:
                written = write_value(arguments)
            except RecursionError:  # JSON, which is read as well, can be written with more levels
                written = json.dumps(arguments, ensure_ascii=False)
            return f"{self.opener}call:{name}{written}{self.closer}"
        return self._marked(json.dumps({"name": name, self.arguments_key: arguments}, ensure_ascii=False))

    def _marked(self, call: str) -> str:
        if self.bare:
            return call
        return f"{self.opener}[{call}]" if self.is_list else f"{self.opener}\n{call}\n{self.closer}"


FORMATS = {
    made.name: made
    for made in (
        ToolFormat("hermes", opener="<tool_call>", closer="</tool_call>"),
        ToolFormat("llama3", opener="<|python_tag|>", bare=True, arguments_key="parameters"),
        ToolFormat("mistral", opener="[TOOL_CALLS]", is_list=True, has_short_ids=True),
        ToolFormat("gemma4", opener="<|tool_call>", closer="<tool_call|>", quote=QUOTE),
        ToolFormat("json", bare=True),
    )
}
"""Formats by their names in --tool-call-parser."""


def find_format(parser: str, template: str | None) -> ToolFormat | None:
    """Return the format with this name; "auto" takes the one whose marks the chat template has, "none" is None."""
    if parser != "auto":
        return FORMATS.get(parser)
    # Marks that are text in other formats' templates come last.
    marked = (FORMATS[name] for name in ("gemma4", "mistral", "hermes", "llama3"))
    return next((known for known in marked if known.opener in (template or "")), FORMATS["json"])


def read_json(text: str) -> Any:
    """Return the value of JSON that a model or client wrote. Raises ValueError or RecursionError if it is not JSON.

    Half of an escaped surrogate pair is valid JSON, but no template or answer could hold its text: this raises
    UnicodeEncodeError, which is a ValueError.
    """
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value


T = TypeVar("T")
_Steps = Generator[None, str, T]
"""A reader that is sent one character after the other."""

_SEPARATORS = " \t\r\n,;[]"
"""Characters between and around calls."""
_ARGUMENTS = ("arguments", "parameters")
_NAME = re.compile(r"[\w.-]+")
_MAX_NAME = 256
"""Most characters of a name without quotes; longer ones are text."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is new of one call: its id and its name once, then pieces of its arguments, which are JSON."""

    index: int
    """Index of the call in its answer."""
    id: str = ""
    name: str = ""
    arguments: str = ""


class TextDelta(NamedTuple):
    """New text, and its place among the characters of text and calls together."""

    text: str
    start: int
    end: int
    """White space from before a call may come with the text behind it; it lies outside of this place."""


News = list[TextDelta | ToolCallDelta]
"""What is new of text and calls, in order."""


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """How calls are found in the answers to a request."""

    form: ToolFormat
    names: frozenset[str]
    """Names of known tools."""
    parallel: bool = True
    """Whether an answer may hold several calls."""
    forced: bool = False
    """Whether the prompt ends with the opener, and the answer is a call."""


class _CallReader:
    """Reads one object with a name and arguments, a character at a time."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: list[str] = []
        """Pieces not yet taken."""
        self.has_arguments = False
        self.is_done = False
        self.has_failed = False
        self._steps = self._read_object()
        next(self._steps)

    def read(self, character: str) -> None:
        """Read the next character."""
        try:
            self._steps.send(character)
        except StopIteration:
            self.is_done = True
        except (ValueError, RecursionError):
            self.has_failed = True

    def _read_object(self) -> _Steps[None]:
        yield from _next_mark("{")
        mark = yield from _next_mark('"}')
        while mark == '"':
            key = str(read_json((yield from _read_nested(mark))))
            yield from _next_mark(":")
            first = yield from _next_mark()
            if first == "{" and key in _ARGUMENTS:
                yield from _read_nested(first, self.arguments.append)
                self.has_arguments = True
                mark = yield from _next_mark(",}")
            elif first in '"{[':
                self._take(key, read_json((yield from _read_nested(first))))
                mark = yield from _next_mark(",}")
            else:
                mark = yield from self._read_scalar(first)
            if mark == ",":
                mark = yield from _next_mark('"')

    def _read_scalar(self, character: str) -> _Steps[str]:
        """Read a number or a word. Return the mark after it."""
        if character in "}],:":
            raise ValueError
        text = ""
        while character not in ",}" and not character.isspace():
            text += character
            character = yield
        json.loads(text)
        return character if not character.isspace() else (yield from _next_mark(",}"))

    def _take(self, key: str, value: Any) -> None:
        if key == "name" and isinstance(value, str):
            self.name = value
        elif key in _ARGUMENTS and isinstance(value, str):
            # Some models write the arguments' JSON into a string.
            self.arguments.append(value)
            self.has_arguments = True


class _GemmaReader(_CallReader):
    """Reads the arguments of a call whose name is known, as Gemma 4 writes them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def _read_object(self) -> _Steps[None]:
        yield from read_arguments(self.arguments.append)
        self.has_arguments = True


def _next_mark(allowed: str = "") -> _Steps[str]:
    """Return the next character that is not whitespace. Raises ValueError if it is not allowed."""
    character = yield
    while character.isspace():
        character = yield
    if allowed and character not in allowed:
        raise ValueError
    return character


def _read_nested(character: str, take: Callable[[str], None] | None = None) -> _Steps[str]:
    """Read a string, an object or a list from its first character on, and return it unless `take` gets it."""
    read: list[str] = []
    take = take or read.append
    depth, in_string = 0, False
    while True:
        take(character)
        if character == '"':
            in_string = not in_string
        elif in_string:
            if character == "\\":
                take((yield))
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
        if depth == 0 and not in_string:
            return "".join(read)
        character = yield


class ToolCallParser:
    """Splits an answer into text and tool calls; the result does not depend on how the answer is cut into pieces.

    The text is what was written outside of calls; whitespace between a call and the text's beginning or end is dropped.
    What only looked like a call is text. Models get stuck in whitespace: a run is kept in pieces, none of which is
    looked at again before something else comes.
    """

    def __init__(self, calls: ToolCalls) -> None:
        self._form = form = calls.form
        self._names = calls.names
        self._parallel = calls.parallel
        self._bare = form.bare
        self._any_name = not form.bare
        self._step = self._read_between if calls.forced else self._read_text
        self._raw: list[str] = []
        """Characters since the last call that may belong to the next one, or turn out to be text."""
        self._tail = ""
        """The end of `_raw` that may begin a call or a mark."""
        self._spaces: list[str] = []
        """Whitespace that may turn out not to be part of the text."""
        self._held = ""
        """Characters after `_spaces` that may begin a mark."""
        self._reader = _CallReader()
        self._name = ""
        self._begun = False
        self._called = False
        """Whether a call has ended since the last text."""
        self._has_text_since_call = False
        """Whether text was let through since the last call."""
        self._has_text = False
        """Whether text was ever let through."""
        self._in_list = False
        """Whether the calls are in a list that is still open."""
        self._position = 0
        """Characters read."""
        self.text_from = 0
        """Where the calls so far end, with their marks; later text lies behind."""
        self._text: list[str] = []
        """Text that is not in `_news` yet; it lies at `_text_start` to `_text_end` in the answer."""
        self._text_start = self._text_end = 0
        self._news: News = []
        self._num_calls = 0
        """Calls that have begun."""

    def push(self, piece: str) -> News:
        """Add a piece of the answer. Return what is new."""
        for character in piece:
            self._position += 1
            self._step(character)
        return self._take_news()

    def finish(self) -> News:
        """End the answer. What was held back is text, unless it is whitespace after a call."""
        unfinished = self._step in (self._read_name, self._read_call) and not self._begun
        ignored = _SEPARATORS if self._called else ""
        if unfinished or (self._step == self._read_between and "".join(self._raw).strip(ignored)):
            self._give_up()
        rest = "".join([*self._spaces, self._held])
        self._held = ""
        self._spaces.clear()
        if rest.strip() or self._has_text_since_call or not self._num_calls:
            self._add_text(rest, self._position)
        return self._take_news()

    def _take_news(self) -> News:
        if self._begun:
            self._add_call(arguments="".join(self._reader.arguments))
            self._reader.arguments.clear()
        self._flush_text()
        news, self._news = self._news, []
        return news

    def _read_text(self, character: str) -> None:
        if not self._held:
            if character.isspace():
                self._spaces.append(character)
                return
            if self._bare and character in "{[":
                self._await_call(self._spaces)
                self._spaces, self._bare = [], False
                self._step(character)
                return
        self._held += character
        opener = self._form.opener
        if opener and self._held == opener:
            self._await_call([opener])
            self._held, self._any_name, self._called = "", True, False
        else:
            self._let_through(len(self._held) - overlap_length(self._held, opener))

    def _let_through(self, length: int) -> None:
        """Let this many held characters through as text, except whitespace at their end."""
        held, self._held = self._held[:length], self._held[length:]
        text = held.rstrip()
        if text:
            is_first = self._num_calls and not self._has_text
            content = text.lstrip() if is_first else "".join([*self._spaces, text])
            self._add_text(content, self._position - len(self._held) - len(held) + len(text))
            self._spaces.clear()
            self._has_text_since_call, self._has_text, self._bare = True, True, False
        self._spaces += held[len(text) :]

    def _await_call(self, raw: list[str]) -> None:
        """Expect calls and separators from here on; `raw` has been read already."""
        self._raw, self._tail, self._step = raw, "", self._read_between

    def _read_between(self, character: str) -> None:
        self._raw.append(character)
        if not self._tail and character in _SEPARATORS:
            if character == "[":
                self._in_list = True
            elif character == "]" and self._in_list and self._called:
                self._in_list = False
                self._raw.clear()  # not text, whatever follows
                self.text_from = self._position
            return
        self._tail = tail = self._tail + character
        closer, opener = self._form.closer, self._form.opener
        if tail == "{":
            self._reader, self._step = _CallReader(), self._read_call
            self._reader.read(character)
        elif closer and tail == closer and self._called:
            self._raw, self._step, self._has_text_since_call = [], self._read_text, False
            self.text_from = self._position
        elif opener and tail == opener:
            if self._called:  # the separators before it are not text, whatever follows
                self._raw, self.text_from = [opener], self._position - len(opener)
            self._tail, self._any_name, self._called = "", True, False
        elif any(mark.startswith(tail) and mark != tail for mark in (closer, opener)):
            return
        elif (self._form.is_list or self._form.quote) and (character.isalnum() or character == "_"):
            self._name, self._step = character, self._read_name
        else:
            self._give_up()

    def _read_name(self, character: str) -> None:
        self._raw.append(character)
        if character == "{":
            # Of a further opener, the first character is a separator, which is not here any more.
            name = self._name.removeprefix(self._form.opener[1:]).removesuffix("[ARGS]").partition("[CALL_ID]")[0]
            name = name.strip(_SEPARATORS)
            if self._form.quote:
                # Some models write a namespace before the name: "call:google:mcp:add".
                name = name.rpartition(":")[2].strip() if name.startswith("call:") else ""
            if (name or self._form.quote) and not _NAME.fullmatch(name):
                self._give_up()
                return
            self._name = name
            self._reader, self._step = _GemmaReader(name) if self._form.quote else _CallReader(), self._read_call
            in_json = name and not self._form.quote
            for one in f'{{"name": {json.dumps(name)}, "arguments": {{' if in_json else character:
                self._reader.read(one)
            self._report_found()
        elif character == "\n" or len(self._name) > _MAX_NAME:
            self._give_up()
        else:
            self._name += character

    def _read_call(self, character: str) -> None:
        if not self._begun:
            self._raw.append(character)
        self._reader.read(character)
        self._report_found()
        if self._reader.has_failed and self._step == self._read_between:  # the character lies behind a broken call
            self.text_from -= 1
            self._step(character)

    def _report_found(self) -> None:
        """Report what the reader has found so far."""
        reader = self._reader
        if self._name and reader.has_arguments:
            reader.is_done = True
        has_ended = reader.has_failed or reader.is_done
        if reader.name is not None and not self._begun and not reader.has_failed:
            if not self._any_name and reader.name not in self._names:
                self._give_up()
                return
            self._begun, self._raw, self._has_text_since_call = True, [], False
            self._num_calls += 1
            self._add_call(id=self._form.new_id(), name=reader.name)
        if not self._begun:
            if has_ended:
                self._give_up()
            return
        if has_ended:
            ended = reader.has_failed or reader.has_arguments
            self._add_call(arguments="".join(reader.arguments) if ended else "{}")
            self._await_call([])
            self._begun, self._name, self._called = False, "", True
            self.text_from = self._position

    def _add_call(self, *, id: str = "", name: str = "", arguments: str = "") -> None:
        """Add what is new of the last call."""
        self._flush_text()
        index = self._num_calls - 1
        if not (id or arguments) or (index and not self._parallel):
            return
        last = self._news[-1] if self._news else None
        if isinstance(last, ToolCallDelta) and last.index == index:
            self._news[-1] = replace(last, arguments=last.arguments + arguments)
        else:
            self._news.append(ToolCallDelta(index, id, name, arguments))

    def _add_text(self, text: str, end: int) -> None:
        if not self._text:
            self._text_start = max(self.text_from, end - len(text))
        self._text.append(text)
        self._text_end = end

    def _flush_text(self) -> None:
        if text := "".join(self._text):
            self._news.append(TextDelta(text, self._text_start, self._text_end))
        self._text.clear()

    def _give_up(self) -> None:
        """Treat what was taken for the beginning of a call as text."""
        self._held = "".join(self._raw)
        self._raw, self._name, self._called, self._in_list = [], "", False, False
        self._step, self._bare = self._read_text, False
        self._let_through(len(self._held) - overlap_length(self._held, self._form.opener))
