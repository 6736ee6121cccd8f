"""A tiny model folder, a scripted verify service, and a gateway before it."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_world import World, open_world
from scripted_verify import ScriptedVerify
from tiny_tokenizers import byte_level_tokenizer

from gateway.core.tokenizer import Tokenizer

# Certificates are made as for the layer below.
sys.path.append(str(Path(__file__).parent.parent / "rpc"))

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-model")
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture
def verify(tokenizer_folder: Path, tokenizer: Tokenizer) -> ScriptedVerify:
    return ScriptedVerify(tokenizer_folder, tokenizer)


@pytest.fixture
async def world(verify: ScriptedVerify, tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(verify, tmp_path) as running:
        yield running
