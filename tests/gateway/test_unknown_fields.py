"""Fields that are not known: refused with the nearest name, or left out where the operator wants it so."""

from __future__ import annotations

from pathlib import Path

from gateway_world import World, open_world
from scripted_verify import ScriptedVerify

BODY = {
    "messages": [{"role": "user", "content": "x", "mood": "good"}],
    "max_token": 9,
    "response_format": {"type": "text"},
}


async def test_they_are_refused_with_the_nearest_name(world: World) -> None:
    response = await world.http.post("/v1/chat/completions", json=BODY)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] in ("max_token", "messages[0].mood")
    del (body := {**BODY, "messages": [{"role": "user", "content": "x"}]})["response_format"]
    error = (await world.http.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["param"] == "max_token" and "did you mean max_tokens?" in error["message"]


async def test_null_is_taken_as_parts_of_an_answer_come_back_with_what_a_newer_client_knows(world: World) -> None:
    call = {"id": "fc_1", "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    items = [{"role": "user", "content": "x"}, {**call, "status": None, "caller": None, "namespace": None}, output]
    assistant = {"role": "assistant", "content": "x", "reasoning": None, "reasoning_details": None}
    messages = [{"role": "user", "content": "x"}, assistant, {"role": "user", "content": "x"}]
    for path, body in (
        ("/v1/responses", {"input": items}),
        ("/v1/chat/completions", {"messages": messages, "mm_processor_kwargs": None}),
        ("/generate", {"text": "x", "sampling_params": {"custom_params": None}, "bootstrap_host": None}),
    ):
        world.verify.set_answer("ok")
        answer = await world.http.post(path, json=body)
        assert answer.status_code == 200, answer.text


async def test_they_may_be_left_out_at_any_depth(verify: ScriptedVerify, tmp_path: Path) -> None:
    async with open_world(verify, tmp_path, ignore_unknown_fields=True) as world:
        world.verify.set_answer("ok")
        assert (await world.http.post("/v1/chat/completions", json=BODY)).status_code == 200
        params = {"temperature": 0, "custom_params": {"a": 1}}
        answer = await world.http.post("/generate", json={"text": "x", "sampling_params": params, "bootstrap": 1})
        assert answer.status_code == 200
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            assert (await world.http.post(path, json=body | {"bootstrap": 1})).status_code == 200
        wrong = await world.http.post("/v1/chat/completions", json=BODY | {"temperature": 9})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "temperature"


async def test_probes_of_other_servers_are_answered(world: World) -> None:
    assert (await world.http.get("/ping")).json() == {"status": "ok"}
    assert (await world.http.get("/load")).json() == {"server_load": 0}


async def test_the_document_is_a_page_without_scripts_or_strange_addresses(world: World) -> None:
    response = await world.http.get("/docs")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    text, document = response.text, (await world.http.get("/openapi.json")).json()
    assert all(path in text for path in document["paths"])
    assert all(f'id="{name}"' in text for name in document["components"]["schemas"])
    assert "<script" not in text and "style=" not in text and "http:" not in text and "https:" not in text
