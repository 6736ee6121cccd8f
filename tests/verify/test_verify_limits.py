"""Options that leave no room for a request are refused at start, not at every request."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from verify_service import main
from verify_service.engine import build
from verify_service.engine.build import _limits
from verify_service.engine.loading import load


def write_model(folder: Path, positions: int) -> None:
    """A model without weights: there is nothing to read in its files but what it is."""
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32,
              "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": positions}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")


def test_a_cache_that_the_tree_alone_fills_is_refused() -> None:
    config = SimpleNamespace(max_positions=2048, vocab_size=61)
    model = SimpleNamespace(config=config, device=SimpleNamespace(type="cpu"), steady_rows=0)
    options = VerifyOptions(max_draft_tokens=600)
    with pytest.raises(ConfigError, match="max-draft-tokens"):
        _limits(options, Path("unused"), model, 32)  # type: ignore[arg-type]


@pytest.mark.parametrize(("pages", "limit"), [(512, 8113), (1024, 0)])
def test_a_context_below_the_model_s_is_told_with_its_reason(
    pages: int, limit: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "count_tokens", lambda path: 61)
    config = SimpleNamespace(max_positions=8192, vocab_size=61)
    model = SimpleNamespace(config=config, device=SimpleNamespace(type="cpu"), steady_rows=0)
    options = VerifyOptions(max_draft_tokens=63)
    with caplog.at_level("INFO", logger="verify_service"):
        limits = _limits(options, tmp_path, model, pages)  # type: ignore[arg-type]
    text = "context of 8113 tokens, not the model's 8192: a KV cache of 8192 has to hold 63 draft tokens, too; "
    assert limits.context_length == (limit or 8192)
    assert caplog.messages == ([f"{text}--max-total-tokens raises it"] if limit else [])


@pytest.mark.parametrize(("context_length", "cache", "most"), [(257, 0, 256), (1010, 1024, 945)])
def test_a_context_that_cannot_be_is_refused_before_weights_are_read(
    tmp_path: Path, context_length: int, cache: int, most: int
) -> None:
    write_model(tmp_path, 2048 if cache else 256)
    options = VerifyOptions(model=str(tmp_path), context_length=context_length, max_total_tokens=cache)
    with pytest.raises(ConfigError, match=f"--context-length: {context_length} is over the {most} "):
        load(options)


@pytest.mark.parametrize(
    ("tokens", "draft_tokens", "page_size", "limit"),
    [
        (15, 63, 16, "15 tokens are too few to warm up; allow at least 512"),
        (512, 63, 3, "512 tokens are too few to warm up; allow at least 513"),
        (527, 700, 16, "527 leave no room beside 700 draft"),
    ],
)
def test_a_cache_that_is_too_small_is_refused_before_weights_are_read(
    tmp_path: Path, tokens: int, draft_tokens: int, page_size: int, limit: str
) -> None:
    write_model(tmp_path, 256)
    options = VerifyOptions(
        model=str(tmp_path), max_total_tokens=tokens, max_draft_tokens=draft_tokens, page_size=page_size
    )
    with pytest.raises(ConfigError, match=f"--max-total-tokens: {limit}"):
        load(options)


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
