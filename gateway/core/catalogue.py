"""The model that this gateway serves, as its verify replicas report it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gateway.core.reasoning import ReasoningMarkers, find_markers
from gateway.core.request import OutputFields, SamplingFields
from gateway.core.tokenizer import Tokenizer
from gateway.core.tool_parser import ToolFormat, find_format
from gateway.core.validation import validate
from outrider.chat_template import read_config
from outrider.config.gateway import GatewayOptions
from outrider.errors import ConfigError, InvalidRequestError, NotFoundError, UnavailableError
from outrider.logs import get_logger
from outrider.protocol.generation import VerifyInfo

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayModel:
    """The model behind this gateway, with its tokenizer."""

    name: str
    context_length: int
    vocab_size: int
    tokenizer: Tokenizer
    created: int
    """Unix time at which this gateway first served the model."""
    fingerprint: str
    """Changes with the model, its tokenizer, and the release of the replica that was the first to report it."""
    dtype: str = ""
    """What verify computes in: "float32", "bfloat16" or "float16"; empty if verify does not say."""
    defaults: dict[str, float | int] = field(default_factory=dict)
    """Values for sampling fields that a request leaves out, and the most tokens of any answer; see `load_defaults`."""
    reasoning: ReasoningMarkers | None = None
    """The markers around what the model thinks before it answers; None if it writes none."""
    tool_format: ToolFormat | None = None
    """How the model writes tool calls; None leaves them in the text."""

    def check_name(self, name: str | None) -> None:
        """Raise NotFoundError unless `name` is empty or this model's."""
        if name and name != self.name:
            raise NotFoundError("model", f"model: {name[:80]!r} is not served here; use {self.name!r}")


class Catalogue:
    """Holds the served model. All replicas must serve the same one; a replica that is the only one may change it."""

    def __init__(self, options: GatewayOptions) -> None:
        """Load the tokenizer that --tokenizer names. Without one, `accept` reads tokenizer and defaults from the folder
        that verify names. Raises ConfigError."""
        self._options = options
        self._own_tokenizer = Tokenizer.load(options.tokenizer) if options.tokenizer is not None else None
        self._identity: dict[str, object] = {}
        """Properties that all replicas must agree on; empty before the first one has reported."""
        self._model: GatewayModel | None = None
        self._lock = asyncio.Lock()

    @property
    def model(self) -> GatewayModel:
        """The served model. Raises UnavailableError before any verify replica has reported it."""
        if self._model is None:
            raise UnavailableError("no verify service has been reached yet; try again shortly", code="model_not_ready")
        return self._model

    async def accept(self, info: VerifyInfo, is_only_one: Callable[[], bool]) -> None:
        """Take what a replica serves; `is_only_one` says whether no other replica is ready. Raises ConfigError."""
        identity = {
            "model": info.model,
            "tokenizer": info.tokenizer_hash,
            "vocabulary": info.vocab_size,
            "context": info.context_length,
            "dtype": info.dtype,
        }
        async with self._lock:
            known = self._identity
            if identity == known:
                return
            if known and not is_only_one():
                differences = [
                    f"{name} {one} against {known[name]}" for name, one in identity.items() if one != known[name]
                ]
                raise ConfigError(
                    f"it serves {info.model}, the other replicas {known['model']}: {', '.join(differences)}"
                )
            tokenizer = self._own_tokenizer
            if tokenizer is None:
                tokenizer = await asyncio.to_thread(Tokenizer.load, Path(info.model_path))
            _check_tokenizer(tokenizer, info)
            defaults = {}
            if self._options.generation_config == "auto":
                defaults = await asyncio.to_thread(load_defaults, self._options.tokenizer or Path(info.model_path))
            template = tokenizer.chat_template
            reasoning = find_markers(self._options.reasoning_parser, None if template is None else template.source)
            template = tokenizer.tool_template
            digest = hashlib.sha256("\n".join(map(str, (*identity.values(), info.version))).encode()).hexdigest()
            self._model = GatewayModel(
                name=info.model,
                context_length=info.context_length,
                vocab_size=info.vocab_size,
                tokenizer=tokenizer,
                created=int(time.time()),
                fingerprint=f"outrider-{digest[:12]}",
                dtype=info.dtype,
                defaults=defaults,
                reasoning=reasoning,
                tool_format=find_format(self._options.tool_call_parser, None if template is None else template.source),
            )
            self._identity = identity
            _logger.info("serving %s with a context of %d tokens", info.model, info.context_length)
            if defaults:
                _logger.info("defaults of sampling, from generation_config.json: %s", defaults)


def _check_tokenizer(tokenizer: Tokenizer, info: VerifyInfo) -> None:
    if info.tokenizer_hash and tokenizer.digest and info.tokenizer_hash != tokenizer.digest:
        raise ConfigError(
            f"the tokenizer here has SHA-256 {tokenizer.digest}, verify's {info.tokenizer_hash}; "
            "point --tokenizer at the folder of the served model"
        )
    if not info.vocab_size > 0 or info.context_length < 2:
        raise ConfigError(f"it names a vocabulary of {info.vocab_size} and a context of {info.context_length} tokens")


_SAMPLING_NAMES = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
_SAMPLING_NAMES["max_new_tokens"] = "max_tokens"
"""Names of fields in generation_config.json, and in requests."""


class _SamplingDefaults(SamplingFields, OutputFields):
    """The limits of fields that defaults share with requests."""


def load_defaults(folder: Path) -> dict[str, float | int]:
    """Return the defaults in a model folder's generation_config.json; `max_tokens` is the most of any answer.

    A value that no request may have is left out, with a warning. Raises ConfigError.
    """
    config = read_config(folder / "generation_config.json")
    defaults = {}
    for name, ours in _SAMPLING_NAMES.items():
        try:
            value = getattr(validate(_SamplingDefaults, {ours: config.get(name)}), ours)
        except InvalidRequestError as error:
            advice = "it is left out (--generation-config none leaves all out)"
            _logger.warning("generation_config.json: %s: %s; %s", name, error.problem, advice)
            continue
        if value is not None:
            defaults[ours] = value
    return defaults
