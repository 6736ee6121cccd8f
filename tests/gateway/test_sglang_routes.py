"""What SGLang's clients send and read."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gateway_world import World, open_world
from scripted_verify import EOS, MODEL, ScriptedVerify


async def generate(world: World, **body: Any) -> Any:
    response = await world.http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def events(world: World, **body: Any) -> list[Any]:
    response = await world.http.post("/generate", json=body | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_text_is_answered_with_text_ids_and_meta(world: World) -> None:
    ids = world.verify.set_answer("one two")
    params = {"max_new_tokens": 9, "temperature": 0.5, "top_k": -1, "stop": None, "sampling_seed": 4}
    answer = await generate(world, text="count", sampling_params=params, rid="mine")
    assert answer["text"] == "one two" and answer["output_ids"] == [*ids, EOS]
    meta = answer["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert meta["completion_tokens"] == len(ids) + 1 and meta["prompt_tokens"] > 0 and meta["cached_tokens"] == 3
    assert meta["spec_verify_ct"] > 0 and meta["spec_accept_length"] > 1 and meta["e2e_latency"] > 0
    asked = world.verify.requests[-1]
    assert (asked.max_tokens, asked.sampling.temperature, asked.sampling.seed) == (9, 0.5, 4)


async def test_defaults_are_sglangs(world: World) -> None:
    world.verify.set_answer("x" * 9, eos=False)
    answer = await generate(world, input_ids=[5, 6, 7])
    assert world.verify.requests[-1].max_tokens == 128 and list(world.verify.requests[-1].prompt_token_ids) == [5, 6, 7]
    assert answer["meta_info"]["finish_reason"] == {
        "type": "length",
        "length": answer["meta_info"]["completion_tokens"],
    }


async def test_a_batch_and_several_answers_are_lists(world: World) -> None:
    world.verify.scripts = {i: [*world.verify.set_answer(f"answer {i}"), EOS] for i in range(2)}
    batch = await generate(world, input_ids=[[5], [6, 7]], sampling_params={"n": 2})
    assert [answer["text"] for answer in batch] == ["answer 0", "answer 1"] * 2
    assert [answer["meta_info"]["prompt_tokens"] for answer in batch] == [1, 1, 2, 2]
    assert [answer["text"] for answer in await generate(world, text=["a"])] == ["answer 0"]
    streamed = await events(world, text=["a", "b"])
    assert {event["index"] for event in streamed} == {0, 1}


async def test_what_sglangs_own_programs_always_send_is_taken(world: World) -> None:
    world.verify.set_answer("one")
    # Its frontend names every parameter, and its load generator what it does not want.
    params = {"max_new_tokens": 8, "min_new_tokens": 0, "n": 1, "stop": [], "stop_token_ids": [], "stop_regex": [],
              "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
              "presence_penalty": 0.0, "ignore_eos": False, "regex": None, "json_schema": None,
              "skip_special_tokens": True, "spaces_between_special_tokens": True}  # fmt: skip
    answer = await generate(world, text="x", sampling_params=params, lora_path=None, return_routed_experts=False)
    assert answer["text"] == "one"
    response = await world.http.post("/generate", json={"text": "x", "sampling_params": {"stop_regex": "a+"}})
    assert response.json()["error"]["param"] == "sampling_params.stop_regex"


async def test_each_prompt_may_have_sampling_of_its_own(world: World) -> None:
    world.verify.set_answer("one two three")
    each = [{"max_new_tokens": 2, "temperature": 0}, {"n": 2, "stop": "two", "temperature": 0.5, "regex": "a"}]
    for prompts in ({"text": ["a", "b"]}, {"input_ids": [[5], [6]]}):
        world.verify.requests.clear()
        batch = await generate(world, **prompts, sampling_params=each)
        assert [answer["text"] for answer in batch] == ["one", "one ", "one "]
        asked = [(one.max_tokens, one.sampling.temperature) for one in world.verify.requests]
        assert sorted(asked) == [(2, 0), (128, 0.5), (128, 0.5)]
    single = await generate(world, text="a", sampling_params=each[:1])
    assert single["meta_info"]["completion_tokens"] == 2


async def test_each_prompt_may_have_an_id_and_logprobs_of_its_own(world: World) -> None:
    world.verify.set_answer("ok")
    each = {
        "rid": ["first", "second", "third"],
        "return_logprob": [False, True, True],
        "logprob_start_len": [0, -1, 1],
        "top_logprobs_num": [2, 0, 2],
    }
    for more in ({}, {"stream": True}):
        body = {"input_ids": [[5], [6, 7], [8, 9, 10]], "sampling_params": [{"n": 2}, {}, {}]} | each | more
        if more:
            by_index = {event["index"]: event for event in await events(world, **body)}
            answers = [by_index[index] for index in range(4)]
        else:
            answers = await generate(world, **body)
        metas = [answer["meta_info"] for answer in answers]
        assert [meta["id"] for meta in metas] == ["first_0", "first_1", "second", "third"]
        assert ["output_token_logprobs" in meta for meta in metas] == [False, False, True, True]
        assert metas[2]["input_token_logprobs"] == [] and "output_top_logprobs" not in metas[2]
        assert [entry[1] for entry in metas[3]["input_token_logprobs"]] == [9, 10]
        assert all(len(top) == 2 for top in metas[3]["output_top_logprobs"])
    assert (await generate(world, text="a", rid=["mine"], return_logprob=[True]))["meta_info"]["id"] == "mine"
    shared = await generate(world, text=["a", "b"], rid="mine")
    assert [answer["meta_info"]["id"] for answer in shared] == ["mine_0", "mine_1"]
    several = await generate(world, text="a", sampling_params={"n": 4})
    assert len({answer["meta_info"]["id"] for answer in several}) == 4
    for field, value, place in (
        ("rid", ["a"], "rid"),
        ("return_logprob", [True, 1], "return_logprob[1]"),
        ("logprob_start_len", [0, -2], "logprob_start_len[1]"),
        ("top_logprobs_num", [], "top_logprobs_num"),
        ("top_logprobs_num", "2", "top_logprobs_num"),
    ):
        response = await world.http.post("/generate", json={"text": ["a", "b"], field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, place), response.text


async def test_what_is_wrong_with_one_of_several_has_its_place(world: World) -> None:
    for each, field, words in (
        ([{}], "sampling_params", "1 entry for 2 prompts; send one for each prompt"),
        ([], "sampling_params", "at least one"),
        (7, "sampling_params", "an object or a list"),
        ([{}, 7], "sampling_params[1]", "expected an object"),
        ([{}, {"topk": 1}], "sampling_params[1].topk", "unknown field"),
        ([{}, {"regex": "a", "ebnf": "b"}], "sampling_params[1].ebnf", "does not go with regex"),
        ([{}, {"json_schema": '{"not": {}}'}], "sampling_params[1].json_schema.not", "say what is allowed"),
        ([{}, {"regex": "a", "bad_words": ["b"]}], "sampling_params[1].bad_words", "leave them out"),
        ([{}, {"max_new_tokens": 10_000}], "sampling_params[1].max_new_tokens", "maximum context length"),
    ):
        response = await world.http.post("/generate", json={"text": ["a", "b"], "sampling_params": each})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, field) and words in error["message"], error
    assert world.verify.requests == []


async def test_events_hold_the_text_so_far(world: World) -> None:
    world.verify.set_answer("one two three")
    got = await events(world, text="count")
    texts = [event["text"] for event in got]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == "one two three" and len(texts) > 2
    reasons = [event["meta_info"]["finish_reason"] for event in got]
    assert reasons[:-1] == [None] * (len(got) - 1) and reasons[-1]["type"] == "stop"
    assert "index" not in got[0]


async def long_events(verify: ScriptedVerify, folder: Path, num_tokens: int, **body: Any) -> tuple[list[Any], int]:
    verify.context_length = 1 << 16
    verify.script, verify.round_size = [20 + i % 60 for i in range(num_tokens)], 1
    params = {"max_new_tokens": num_tokens}
    async with open_world(verify, folder, max_logprobs=1 << 24) as world:
        got = await events(world, text="count", sampling_params=params, **body)
    return got, sum(len(json.dumps(event)) for event in got)


@pytest.mark.parametrize("body", [{}, {"return_logprob": True, "top_logprobs_num": 2}], ids=["text", "logprobs"])
async def test_a_stream_costs_no_more_than_in_proportion_to_its_length(
    verify: ScriptedVerify, tmp_path: Path, body: dict[str, Any]
) -> None:
    length = 1500
    got, num_bytes = await long_events(verify, tmp_path, length, **body)
    assert num_bytes < 200 * len(json.dumps(got[-1]))  # half the length would be the factor if each repeated all
    lengths = [len(event["output_ids"]) for event in got]
    assert lengths[:20] == list(range(1, 21)) and lengths[-1] == length  # at first token by token, at last all
    assert all(later > earlier for earlier, later in pairwise(lengths))
    assert max(later - earlier for earlier, later in pairwise(lengths)) <= length // 14
    last = got[-1]["meta_info"]
    assert last["finish_reason"] == {"type": "length", "length": length}
    for event in got[:: len(got) // 10] if body else ():  # every event is whole
        meta = event["meta_info"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == event["output_ids"]
        assert len(meta["output_top_logprobs"]) == meta["completion_tokens"]


async def test_events_that_came_seldom_trace_all_that_is_new(verify: ScriptedVerify, tmp_path: Path) -> None:
    got, _ = await long_events(verify, tmp_path, 1500, trace=True)
    assert len(got) < 1500
    assert [token["id"] for event in got for token in event["trace"]["tokens"]] == got[-1]["output_ids"]
    assert sum(len(event["trace"]["rounds"]) for event in got) == 1500


async def test_a_stop_string_is_named(world: World) -> None:
    world.verify.set_answer("one two three")
    answer = await generate(world, text="count", sampling_params={"stop": ["three", "two"]})
    assert answer["text"] == "one " and answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "two"}


async def test_logprobs_are_triples_of_value_id_and_text(world: World) -> None:
    ids = world.verify.set_answer("ok")
    body = {"input_ids": [9, 8, 7, 6], "return_logprob": True, "top_logprobs_num": 2}
    meta = (await generate(world, **body))["meta_info"]
    assert meta["input_token_logprobs"] == [] and [entry[1] for entry in meta["output_token_logprobs"]] == [*ids, EOS]
    assert all(len(top) == 2 and top[0][2] is None for top in meta["output_top_logprobs"])
    assert not world.verify.requests[-1].HasField("num_prompt_logprobs")
    meta = (await generate(world, **body, logprob_start_len=0, return_text_in_logprobs=True))["meta_info"]
    assert [entry[:2] for entry in meta["input_token_logprobs"]] == [[None, 9], [-1.75, 8], [-0.25, 7], [-1.75, 6]]
    assert meta["input_top_logprobs"][0] is None and meta["input_top_logprobs"][1][1][:2] == [-1.75, 8]
    assert meta["input_token_logprobs"][1][2] == world.verify.tokenizer.token_bytes(8).decode("utf-8", "replace")
    later = (await generate(world, **body, logprob_start_len=2))["meta_info"]["input_token_logprobs"]
    assert later == [[-0.25, 7, None], [-1.75, 6, None]]


async def test_choices_are_scored_without_an_answer(world: World) -> None:
    # As SGLang's own frontend compares choices.
    world.verify.set_answer("never shown")
    answers = await generate(
        world,
        input_ids=[[9, 8], [9, 7]],
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    assert [answer["text"] for answer in answers] == ["", ""]
    assert [len(answer["meta_info"]["input_token_logprobs"]) for answer in answers] == [2, 2]
    assert all(answer["meta_info"]["completion_tokens"] == 0 for answer in answers)


async def test_the_model_and_its_health_are_told(world: World) -> None:
    world.verify.set_answer("ok")
    info = (await world.http.get("/get_model_info")).json()
    assert info["model_path"] == MODEL and info["is_generation"] is True
    assert (await world.http.get("/model_info")).json() == info
    assert (await world.http.get("/health_generate")).status_code == 200
    assert world.verify.requests[-1].max_tokens == 1
    world.verify.ends_silently = True
    world.verify.script = []
    sick = await world.http.get("/health_generate")
    assert (sick.status_code, sick.json()["error"]["code"]) == (503, "answer_incomplete")


async def test_the_mean_accept_length_is_told(world: World) -> None:
    found = (await world.http.get("/server_info")).json()
    assert found["model_path"] == MODEL and found["internal_states"] == [{"avg_spec_accept_length": 0.0}]
    token_ids = world.verify.set_answer("an answer of several rounds")
    answer = await world.http.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 100}})
    assert answer.status_code == 200
    num_tokens = len(token_ids) + 1  # the end, too
    mean = num_tokens / -(-num_tokens // world.verify.round_size)
    found = (await world.http.get("/get_server_info")).json()
    assert found["internal_states"] == [{"avg_spec_accept_length": pytest.approx(mean)}]
