"""Fields that OpenAI's requests have and this server does not act on."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from gateway.core.fields import StrictModel, Text


class Only:
    """Annotation of a field that takes null and some values, which change nothing here."""

    def __init__(self, *allowed: Any, why: str) -> None:
        """`why` explains a refusal of all other values."""
        self._allowed = allowed
        self._why = why
        words = [json.dumps(value) for value in allowed]
        self._fix = f"leave it out or send {' or '.join(words)}" if words else "leave it out"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Checks the value."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Names the values."""
        return {"enum": [None, *self._allowed], "description": f"Taken at these values only: {self._why}."}

    def _check(self, value: Any) -> Any:
        # 0 == False in Python, not in JSON.
        if value is None or any(type(value) is type(one) and value == one for one in self._allowed):
            return value
        raise PydanticCustomError("unsupported", "{problem}; {fix}", {"problem": self._why, "fix": self._fix})


class HarmlessFields(StrictModel):
    """Fields of both routes that are taken and have no effect on the answer."""

    user: Text | None = Field(
        None, description="Who this is for; under load, users of one API key take turns. Nothing else is done with it."
    )
    safety_identifier: Text | None = Field(None, description="Taken and not used.")
    prompt_cache_key: Text | None = Field(None, description="Taken and not used.")
    metadata: dict[str, Any] | None = Field(None, description="Taken and not used.")
    store: Annotated[Any, Only(False, why="answers are not stored here")] = None
    service_tier: Annotated[Any, Only("auto", "default", why="there is one service tier")] = None
    min_tokens: Annotated[Any, Only(0, why="a least number of tokens is not supported")] = None
    skip_special_tokens: Annotated[Any, Only(True, why="special tokens are never part of the text")] = None


class StreamOptions(StrictModel):
    """What a stream tells besides the text."""

    include_usage: bool | None = Field(None, description="Send the usage in a last chunk without choices.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far in every chunk.")
    include_obfuscation: Annotated[Any, Only(False, why="streams are not padded")] = None
