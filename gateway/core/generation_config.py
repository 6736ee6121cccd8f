"""What a model's generation_config.json says of sampling: the defaults of fields that a request leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.core.chat_template import read_config
from gateway.core.request import OutputFields, SamplingFields, StrictModel
from gateway.core.validation import validate
from outrider.errors import InvalidRequestError
from outrider.logs import get_logger

_logger = get_logger(__name__)

_FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values of sampling fields by their names here, and a limit."""

    sampling: Mapping[str, float | int] = field(default_factory=dict)
    max_tokens: int | None = None
    """Most tokens of any answer, whatever its request asks for; None for no limit but the context's."""

    @classmethod
    def load(cls, folder: Path) -> GenerationDefaults:
        """Reads generation_config.json of a model folder; none without one. Raises ConfigError.

        A value that no request may have is left out, with a warning.
        """
        config = read_config(folder / _FILE)
        sampling = {name: value for name in _SAMPLING if (value := _value(config, name, SamplingFields)) is not None}
        return cls(sampling, _value(config, "max_new_tokens", OutputFields, "max_tokens"))

    def told(self) -> dict[str, float | int]:
        """All of them, as clients are told."""
        return dict(self.sampling) | ({} if self.max_tokens is None else {"max_tokens": self.max_tokens})


def _value(config: Mapping[str, Any], name: str, fields: type[StrictModel], ours: str = "") -> Any:
    """A value of the file that a request may have in the field `ours` of the same name, else None."""
    ours = ours or name
    try:
        return getattr(validate(fields, {ours: config.get(name)}), ours)
    except InvalidRequestError as error:
        _logger.warning(
            "%s: %s: %s; it is left out (--generation-config none leaves all out)", _FILE, name, error.problem
        )
        return None
