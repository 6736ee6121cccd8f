"""What a model's generation_config.json says of sampling: the defaults of fields that a request leaves out."""

from __future__ import annotations

from pathlib import Path

from gateway.core.chat_template import read_config
from gateway.core.request import OutputFields, SamplingFields
from gateway.core.validation import validate
from outrider.errors import InvalidRequestError
from outrider.logs import get_logger

_logger = get_logger(__name__)

_FILE = "generation_config.json"
_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""What the file calls fields, and what requests do."""


class _Fields(SamplingFields, OutputFields):
    """What a request may say."""


def load_defaults(folder: Path) -> dict[str, float | int]:
    """Values of sampling fields, and `max_tokens`, the most of any answer, as far as a model folder's file has them.

    A value that no request may have is left out, with a warning. Raises ConfigError.
    """
    config = read_config(folder / _FILE)
    defaults = {}
    for name, ours in _NAMES.items():
        try:
            value = getattr(validate(_Fields, {ours: config.get(name)}), ours)
        except InvalidRequestError as error:
            advice = "it is left out (--generation-config none leaves all out)"
            _logger.warning("%s: %s: %s; %s", _FILE, name, error.problem, advice)
            continue
        if value is not None:
            defaults[ours] = value
    return defaults
