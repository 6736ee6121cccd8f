"""How models write calls of tools: the marks around them, and which model uses which."""

from __future__ import annotations

import secrets
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls, each of which is a JSON object with a name and arguments."""

    name: str
    opener: str = ""
    """What calls begin with; empty where the answer's own first character tells them."""
    closer: str = ""
    """What may stand behind a call."""
    bare: bool = False
    """Whether an answer that begins with an object or a list may be calls, if it names a known tool."""
    arguments_key: str = "arguments"
    """Of the object, as the model writes it; all that are known are read."""
    is_list: bool = False
    """Whether calls stand in a list."""
    has_short_ids: bool = False
    """Whether templates want ids of nine letters and digits."""

    @property
    def shown_tokens(self) -> frozenset[str]:
        """Tokens that are part of the text even if the tokenizer calls them special."""
        return frozenset({self.opener, self.closer, "[ARGS]"} - {""})

    def new_id(self) -> str:
        """Names a call."""
        return secrets.token_hex(5)[:9] if self.has_short_ids else f"call_{secrets.token_hex(12)}"

    @property
    def forced_opening(self) -> str:
        """What is put behind the prompt where the answer must be a call."""
        return self.opener if self.is_list or not self.closer else f"{self.opener}\n"


FORMATS = {
    made.name: made
    for made in (
        ToolFormat("hermes", opener="<tool_call>", closer="</tool_call>"),
        ToolFormat("llama3", opener="<|python_tag|>", bare=True, arguments_key="parameters"),
        ToolFormat("mistral", opener="[TOOL_CALLS]", is_list=True, has_short_ids=True),
        ToolFormat("json", bare=True),
    )
}
"""By the name that --tool-call-parser takes."""


def find_format(parser: str, template: str | None) -> ToolFormat | None:
    """The format by its name; "auto" takes the one whose marks the chat template has, "none" is None."""
    if parser != "auto":
        return FORMATS.get(parser)
    # Marks that are text in other formats' templates come last.
    marked = (FORMATS[name] for name in ("mistral", "hermes", "llama3"))
    return next((known for known in marked if known.opener in (template or "")), FORMATS["json"])
