"""Arguments of calls as Gemma 4 writes them, `{city:<|"|>Paris<|"|>,days:3}`, made JSON while they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import NoReturn

from gateway.core.tokenizer import overlap_length

QUOTE = '<|"|>'
"""A token of its own, before and behind each string; nothing within a string is escaped."""

_ESCAPES = '"\\/bfnrtu'
"""What may stand behind a backslash in JSON."""
_NULLS = ("null", "none", "nil")
"""The template writes a null of the history as `None`."""


def read_arguments(take: Callable[[str], None]) -> Generator[None, str, None]:
    """Is sent an object a character at a time, and ends behind its last one. `take` gets the same in JSON.

    Models drift, so JSON is read, too, and a word that is no JSON is a string. What has no place in an object or a list
    is left out: of anything that comes to an end the result is JSON.
    """
    opened: list[str] = []
    has_item = False
    """Whether the innermost object or list has one."""
    character = yield
    while True:
        if character in "}]" and opened:
            take("}" if opened.pop() == "{" else "]")
            if not opened:
                return
            has_item = True
            character = yield
            continue
        if character.isspace() or character == ",":
            character = yield
            continue
        comma = "," if has_item else ""
        if opened and opened[-1] == "{":
            key: list[str] = []
            character = yield from _read_word(character, ":,}", key.append, _in_json)
            while character not in ":,}":
                character = yield
            if character != ":":
                continue
            take(f"{comma}{''.join(key)}:")
            character = yield
            while character.isspace():
                character = yield
        elif comma:
            take(comma)
        if character in "{[":
            take(character)
            opened.append(character)
            has_item = False
            character = yield
        else:
            character = yield from _read_word(character, ",}]", take, _scalar)
            has_item = True


def _read_word(
    character: str, ends: str, take: Callable[[str], None], written: Callable[[str], str]
) -> Generator[None, str, str]:
    """Reads a string, or a bare word up to one of `ends`; `written` makes JSON of the word. Returns what follows it."""
    if character == '"':
        take(character)
        while (character := (yield)) != '"':
            if character == "\\":
                take(character)
                character = yield
                take(character if character in _ESCAPES else "\\" + _in_json(character)[1:-1])
            else:
                take(_in_json(character)[1:-1])
        take(character)
        return (yield)
    word = ""
    while character not in ends:
        word += character
        if word == QUOTE:
            yield from _read_quoted(take)
            return (yield)
        character = yield
    take(written(word.strip()))
    return character


def _read_quoted(take: Callable[[str], None]) -> Generator[None, str, None]:
    """Reads a string from behind its first quote to the end of its last."""
    take('"')
    held = ""
    while held != QUOTE:
        held += yield
        length = 0 if held == QUOTE else len(held) - overlap_length(held, QUOTE)
        if length:
            take(_in_json(held[:length])[1:-1])
            held = held[length:]
    take('"')


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _scalar(word: str) -> str:
    try:
        json.loads(word, parse_constant=_refuse)
    except ValueError:
        if word.lower() in _NULLS:
            return "null"
        return word.lower() if word.lower() in ("true", "false") else _in_json(word)
    return word


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
