"""generation_config.json gives the defaults of sampling, and nothing that a request says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gateway_world import World, open_world
from scripted_verify import MODEL, ScriptedVerify

from gateway.core.catalogue import load_defaults
from outrider.errors import ConfigError
from outrider.v1 import gateway_pb2

CONFIG = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5, "do_sample": True}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def folder(tokenizer_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))


def configure(folder: Path, config: Any) -> ScriptedVerify:
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    verify = ScriptedVerify(folder)
    verify.set_answer("one two three")
    return verify


def sampling(world: World) -> dict[str, float]:
    asked = world.verify.requests[-1].sampling
    return {name: round(getattr(asked, name), 3) for name in CONFIG if name != "do_sample"}


async def test_what_a_request_leaves_out_is_as_the_file_says(folder: Path, tmp_path: Path) -> None:
    async with open_world(configure(folder, CONFIG), tmp_path) as world:
        expected = {name: value for name, value in CONFIG.items() if name != "do_sample"}
        await world.openai().chat.completions.create(model=MODEL, messages=HELLO)
        assert sampling(world) == expected
        await world.openai().chat.completions.create(
            model=MODEL, messages=HELLO, temperature=0, extra_body={"top_k": -1}
        )
        assert sampling(world) == expected | {"temperature": 0, "top_k": 0}
        assert [m async for m in world.stub.Generate(gateway_pb2.GatewayServiceGenerateRequest(prompt="x"))]
        assert sampling(world) == expected
        listed = (await world.http.get("/v1/models")).json()["data"][0]
        assert listed["default_sampling_params"] == expected
        assert (await world.http.get("/get_model_info")).json()["preferred_sampling_params"] == expected


async def test_none_leaves_the_file_out(folder: Path, tmp_path: Path) -> None:
    verify = configure(folder, CONFIG | {"max_new_tokens": 1})
    async with open_world(verify, tmp_path, generation_config="none") as world:
        answer = await world.openai().chat.completions.create(model=MODEL, messages=HELLO)
        assert answer.choices[0].message.content == "one two three"
        assert (sampling(world)["temperature"], sampling(world)["top_k"]) == (1, 0)
        assert (await world.http.get("/get_model_info")).json()["preferred_sampling_params"] is None


async def test_max_new_tokens_is_the_most_of_any_answer(folder: Path, tmp_path: Path) -> None:
    async with open_world(configure(folder, {"max_new_tokens": 3}), tmp_path) as world:
        for asked, expected in ((None, 3), (2, 2), (9, 3)):
            await world.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": asked})
            assert world.verify.requests[-1].max_tokens == expected


async def test_completions_stop_after_16_tokens_unless_told_otherwise(world: World) -> None:
    world.verify.set_answer("one")
    for body, expected in (
        ({}, 16),
        ({"max_tokens": 40}, 40),
        ({"prompt": [5] * (world.verify.context_length - 4)}, 4),
    ):
        answer = await world.http.post("/v1/completions", json={"prompt": "x"} | body)
        assert answer.status_code == 200
        assert world.verify.requests[-1].max_tokens == expected


def test_values_that_no_request_may_have_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = {"temperature": 7, "top_k": "many", "top_p": 1.5, "min_p": None, "max_new_tokens": True}
    configure(folder, bad | {"repetition_penalty": 1.25})
    assert load_defaults(folder) == {"repetition_penalty": 1.25}
    for name in ("temperature", "top_k", "top_p", "max_new_tokens"):
        assert any(f"generation_config.json: {name}: " in message for message in caplog.messages)


def test_a_file_that_is_no_json_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read"):
        load_defaults(folder)
