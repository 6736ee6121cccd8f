"""The model that this gateway serves, as its verify replicas report it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from gateway.core.admission import ServedModel
from gateway.core.tokenizer import Tokenizer
from outrider.errors import ConfigError, UnavailableError
from outrider.logs import get_logger
from outrider.protocol.generation import VerifyInfo

_logger = get_logger(__name__)


class Catalogue:
    """Holds the served model; all replicas must serve the same one, and one that comes back may bring another."""

    def __init__(self, tokenizer_folder: Path | None = None) -> None:
        """Without a folder, the tokenizer is read from the one that verify names. Raises ConfigError."""
        self._folder = tokenizer_folder
        self._own_tokenizer = Tokenizer.load(tokenizer_folder) if tokenizer_folder is not None else None
        self._info: VerifyInfo | None = None
        self._model: ServedModel | None = None
        self._lock = asyncio.Lock()

    @property
    def model(self) -> ServedModel:
        """The served model. Raises UnavailableError before any verify replica has reported it."""
        if self._model is None:
            raise UnavailableError("no verify service has been reached yet; try again shortly", code="model_not_ready")
        return self._model

    async def accept(self, info: VerifyInfo, is_only_one: Callable[[], bool]) -> None:
        """Takes what a replica serves; `is_only_one` says whether no other replica is ready. Raises ConfigError."""
        async with self._lock:
            if self._info is not None and _identity(info) == _identity(self._info):
                return
            if self._info is not None and not is_only_one():
                raise ConfigError(
                    f"it serves {info.model}, the other replicas {self._info.model}: {_differences(info, self._info)}"
                )
            tokenizer = self._own_tokenizer
            if tokenizer is None:
                tokenizer = await asyncio.to_thread(Tokenizer.load, Path(info.model_path))
            _check_tokenizer(tokenizer, info)
            self._model = _served(info, tokenizer)
            self._info = info
            _logger.info("serving %s with a context of %d tokens", info.model, info.context_length)


def _identity(info: VerifyInfo) -> dict[str, object]:
    return {
        "model": info.model,
        "tokenizer": info.tokenizer_hash,
        "vocabulary": info.vocab_size,
        "context": info.context_length,
        "dtype": info.dtype,
    }


def _differences(one: VerifyInfo, other: VerifyInfo) -> str:
    pairs = zip(_identity(one).items(), _identity(other).values(), strict=True)
    return ", ".join(f"{name} {mine} against {theirs}" for (name, mine), theirs in pairs if mine != theirs)


def _check_tokenizer(tokenizer: Tokenizer, info: VerifyInfo) -> None:
    if info.tokenizer_hash and tokenizer.digest and info.tokenizer_hash != tokenizer.digest:
        raise ConfigError(
            f"the tokenizer here has SHA-256 {tokenizer.digest}, verify's {info.tokenizer_hash}; "
            "point --tokenizer at the folder of the served model"
        )
    if not info.vocab_size > 0 or info.context_length < 2:
        raise ConfigError(f"it names a vocabulary of {info.vocab_size} and a context of {info.context_length} tokens")


def _served(info: VerifyInfo, tokenizer: Tokenizer) -> ServedModel:
    identity = "\n".join(map(str, (*_identity(info).values(), info.version)))
    return ServedModel(
        name=info.model,
        context_length=info.context_length,
        vocab_size=info.vocab_size,
        tokenizer=tokenizer,
        created=int(time.time()),
        fingerprint="outrider-" + hashlib.sha256(identity.encode()).hexdigest()[:12],
        dtype=info.dtype,
    )
