"""Between grammars and protobuf."""

from __future__ import annotations

from outrider.errors import InvalidRequestError
from outrider.grammar.spec import Grammar, GrammarKind
from outrider.v1 import common_pb2

MAX_CHOICES_ON_WIRE = 4096
"""A message of some megabytes holds a million empty texts; they are counted before an object is made of each."""


def encode_grammar(grammar: Grammar | None) -> common_pb2.Grammar | None:
    """A grammar as a message; None stays None, which leaves the field unset."""
    match grammar:
        case None:
            return None
        case Grammar(kind=GrammarKind.JSON_OBJECT):
            return common_pb2.Grammar(json_object=True)
        case Grammar(kind=GrammarKind.JSON_SCHEMA):
            return common_pb2.Grammar(json_schema=grammar.source)
        case Grammar(kind=GrammarKind.REGEX):
            return common_pb2.Grammar(regex=grammar.source)
        case _:
            return common_pb2.Grammar(choice=common_pb2.Grammar.Choices(texts=grammar.choices))


def decode_grammar(message: common_pb2.Grammar) -> Grammar:
    """The grammar of a message that was sent. Raises InvalidRequestError if it says nothing, or far too much."""
    match message.WhichOneof("kind"):
        case "json_object" if message.json_object:
            return Grammar(GrammarKind.JSON_OBJECT)
        case "json_schema":
            return Grammar(GrammarKind.JSON_SCHEMA, message.json_schema)
        case "regex":
            return Grammar(GrammarKind.REGEX, message.regex)
        case "choice":
            count = len(message.choice.texts)
            if count > MAX_CHOICES_ON_WIRE:
                raise InvalidRequestError("grammar.choice", f"holds {count} choices", "send fewer")
            return Grammar.of_choices(list(message.choice.texts))
    raise InvalidRequestError("grammar", "says nothing", "set json_object, json_schema, regex or choice")
