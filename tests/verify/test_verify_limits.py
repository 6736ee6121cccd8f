"""Options that leave no room for a request are refused at start, not at every request."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from verify_service import main
from verify_service.engine.build import _limits
from verify_service.engine.memory import Memory


def test_a_cache_that_the_tree_alone_fills_is_refused() -> None:
    config = SimpleNamespace(max_positions=2048, vocab_size=61)
    model = SimpleNamespace(config=config, device=SimpleNamespace(type="cpu"))
    options = VerifyOptions(max_draft_tokens=600)
    with pytest.raises(ConfigError, match="max-draft-tokens"):
        _limits(options, Path("unused"), model, Memory(32, 16))  # type: ignore[arg-type]


@pytest.mark.parametrize("door", ["address", "metrics_address"])
async def test_a_taken_port_is_told_before_the_model_is_loaded(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "start_engine", lambda *arguments: pytest.fail("an engine was started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = VerifyOptions(
            **{"address": "127.0.0.1:0", "metrics_address": "", door: f"127.0.0.1:{taken.getsockname()[1]}"}
        )
        option = "--" + door.replace("_", "-")
        with pytest.raises(ConfigError, match=f"{option}: cannot bind"):
            await main.serve(options, asyncio.Event())
