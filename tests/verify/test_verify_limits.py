"""Options that leave no room for a request are refused at start, not at every request."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from verify_service.main import _limits
from verify_service.memory import Memory


def test_a_cache_that_the_tree_alone_fills_is_refused() -> None:
    model = SimpleNamespace(config=SimpleNamespace(max_positions=2048, vocab_size=61))
    options = VerifyOptions(max_draft_tokens=600)
    with pytest.raises(ConfigError, match="max-draft-tokens"):
        _limits(options, Path("unused"), model, Memory(32, 16))  # type: ignore[arg-type]
