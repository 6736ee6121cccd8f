"""Tools of OpenAI's routes, and which of them an answer may or must call: nested as in chat, flat as in responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.core.request import MAX_TOOLS, StrictModel, Text, Tool
from outrider.errors import InvalidRequestError


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

    @property
    def called(self) -> str:
        """Its name."""
        return self.function.name


class AllowedTools(StrictModel):
    """Some of the functions, and whether the answer may or must call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(StrictModel):
    """The functions that the answer may call; of the others the model is not told."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def allowed(self) -> tuple[Literal["auto", "required"], list[str], str]:
        """Whether one may or must be called, their names, and the field of each name."""
        place = "tool_choice.allowed_tools.tools[{}].function.name"
        return self.allowed_tools.mode, [one.called for one in self.allowed_tools.tools], place


class _Function(StrictModel):
    type: Literal["function"]


class FlatTool(Tool, _Function):
    """A function that the answer may call."""


class FlatNamedChoice(StrictModel):
    """The function that the answer must call."""

    type: Literal["function"]
    name: Text

    @property
    def called(self) -> str:
        """Its name."""
        return self.name


class FlatAllowedChoice(StrictModel):
    """The functions that the answer may or must call one of; of the others the model is not told."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]

    @property
    def allowed(self) -> tuple[Literal["auto", "required"], list[str], str]:
        """Whether one may or must be called, their names, and the field of each name."""
        return self.mode, [one.name for one in self.tools], "tool_choice.tools[{}].name"


def _choice_kind(value: Any) -> str:
    if isinstance(value, str):
        return "@word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind == "allowed_tools":
        return "@allowed"
    return "@word" if kind is None and not isinstance(value, dict) else "@named"


_Word = Annotated[Literal["none", "auto", "required"], Tag("@word")]
ToolChoice = Annotated[
    _Word | Annotated[NamedChoice, Tag("@named")] | Annotated[AllowedChoice, Tag("@allowed")],
    Discriminator(_choice_kind),
]
FlatToolChoice = Annotated[
    _Word | Annotated[FlatNamedChoice, Tag("@named")] | Annotated[FlatAllowedChoice, Tag("@allowed")],
    Discriminator(_choice_kind),
]


def tool_fields(
    tools: Sequence[Tool],
    choice: str | NamedChoice | AllowedChoice | FlatNamedChoice | FlatAllowedChoice | None,
    parallel: bool | None,
) -> dict[str, Any]:
    """Fields of a `Chat`, without the messages. Raises InvalidRequestError."""
    fields: dict[str, Any] = {"tools": list(tools), "parallel_tool_calls": parallel is not False}
    if isinstance(choice, NamedChoice | FlatNamedChoice):
        return fields | {"tool_choice": "required", "tool_name": choice.called}
    if isinstance(choice, AllowedChoice | FlatAllowedChoice):
        mode, allowed, place = choice.allowed
        known = {tool.name for tool in tools}
        if (index := next((index for index, name in enumerate(allowed) if name not in known), None)) is not None:
            problem = f"{allowed[index][:64]!r} is none of the tools"
            raise InvalidRequestError(place.format(index), problem, "send the name of one")
        fields["tools"] = [tool for tool in tools if tool.name in allowed]
        return fields | {"tool_choice": mode}
    return fields | {"tool_choice": choice or "auto"}
