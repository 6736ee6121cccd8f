"""Tools in the bodies of OpenAI's routes: what may be called, what was called, and what an answer calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.core.request import StrictModel, Text, Tool, ToolCall
from gateway.core.tool_parser import ToolCallDelta
from gateway.http.responses import Body


class ToolBody(StrictModel):
    """A function that the answer may call."""

    type: Literal["function"]
    function: Tool


class NamedFunction(StrictModel):
    """One of the functions."""

    name: Text


class NamedChoice(StrictModel):
    """The function that the answer must call."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(StrictModel):
    """What an earlier answer called."""

    name: Annotated[Text, Field(min_length=1, max_length=256)]
    arguments: Text = Field("", description="JSON, as the answer had it.")


class CallBody(StrictModel):
    """A call of an earlier answer."""

    id: Annotated[Text, Field(max_length=256)]
    type: Literal["function"] = "function"
    index: int | None = Field(None, description="Taken and not used.")
    function: CalledFunction

    def plain(self) -> ToolCall:
        """The call as the gateway's own request has it."""
        return ToolCall(id=self.id, name=self.function.name, arguments=self.function.arguments)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("@word")] | Annotated[NamedChoice, Tag("@named")],
    Discriminator(lambda value: "@named" if isinstance(value, dict | NamedChoice) else "@word"),
]


def tool_fields(tools: Sequence[ToolBody], choice: str | NamedChoice | None, parallel: bool | None) -> dict[str, Any]:
    """Fields of a `Chat`, without the messages."""
    fields: dict[str, Any] = {"tools": [tool.function for tool in tools]}
    fields["parallel_tool_calls"] = parallel is not False
    if isinstance(choice, NamedChoice):
        return fields | {"tool_choice": "required", "tool_name": choice.function.name}
    return fields | {"tool_choice": choice or "auto"}


class FunctionMade(Body):
    """What an answer calls."""

    name: str
    arguments: str
    """JSON."""


class CallMade(Body):
    """A call of an answer."""

    id: str
    type: Literal["function"]
    function: FunctionMade


class FunctionDelta(Body):
    """The name once, then pieces of the arguments."""

    name: str | None = None
    arguments: str


class CallDelta(Body):
    """What a chunk adds to a call; the first one names it."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta

    @classmethod
    def of(cls, delta: ToolCallDelta) -> CallDelta:
        """OpenAI's view of the news of a call."""
        if not delta.id:
            return cls(index=delta.index, function=FunctionDelta(arguments=delta.arguments))
        function = FunctionDelta(name=delta.name, arguments=delta.arguments)
        return cls(index=delta.index, id=delta.id, type="function", function=function)


def calls_made(deltas: Sequence[ToolCallDelta]) -> list[CallMade]:
    """The calls of one answer, of which `deltas` are all news."""
    made = []
    for _, group in groupby(deltas, key=attrgetter("index")):
        head, *more = group
        function = FunctionMade(name=head.name, arguments="".join(delta.arguments for delta in (head, *more)))
        made.append(CallMade(id=head.id, type="function", function=function))
    return made
