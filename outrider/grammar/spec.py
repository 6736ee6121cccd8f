"""What an answer must look like, as a request says it; torch-free and without the grammar library."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import Enum


class GrammarKind(Enum):
    """In which language a grammar is written."""

    JSON_OBJECT = "json_object"
    """Any JSON object; has no source."""
    JSON_SCHEMA = "json_schema"
    """The source is a JSON schema, as JSON."""
    REGEX = "regex"
    """The source is a regular expression that the whole answer matches."""
    CHOICE = "choice"
    """The source is a JSON list of texts, of which the answer is one."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts that an answer may be."""

    kind: GrammarKind
    source: str = ""

    @classmethod
    def of_choices(cls, choices: list[str]) -> Grammar:
        """One of these texts."""
        return cls(GrammarKind.CHOICE, json.dumps(choices, ensure_ascii=False))

    @property
    def choices(self) -> list[str]:
        """The texts of a CHOICE."""
        return [str(choice) for choice in json.loads(self.source)]

    @property
    def digest(self) -> str:
        """Names the grammar by its content: SHA-256, hexadecimal."""
        return hashlib.sha256(f"{self.kind.value}\n{self.source}".encode()).hexdigest()

    @property
    def field(self) -> str:
        """The field of gRPC's `Grammar` message that holds the source; messages name it."""
        return f"grammar.{self.kind.value}"
