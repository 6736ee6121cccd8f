"""What other projects' clients do, against three real processes; benchmarks/serving/clients.py runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from client import COPY_PROMPT, chat, stream

from outrider.cli.cluster import Cluster

pytestmark = pytest.mark.xdist_group("cluster")

TEXT = "The capital of France is Paris, and the capital of Italy is Rome. 🙂"


def post(cluster: Cluster, path: str, **body: Any) -> Any:
    response = httpx.post(f"{cluster.rest_url}{path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.slow
def test_echoed_logprobs_are_those_of_transformers(cluster: Cluster, model_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ids = post(cluster, "/tokenize", prompt=TEXT)["tokens"]
    # Once to fill the cache, which must hide no position.
    post(cluster, "/v1/completions", prompt=ids, max_tokens=1, temperature=0)
    choice = post(cluster, "/v1/completions", prompt=ids, max_tokens=1, temperature=0, echo=True, logprobs=1)["choices"]
    lists = choice[0]["logprobs"]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="float32")
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    expected = logits.log_softmax(-1)
    own = expected[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    np.testing.assert_allclose(lists["token_logprobs"][1:-1], own, atol=1e-3)
    greedy = [
        value == max(top.values())
        for value, top in zip(lists["token_logprobs"][1:], lists["top_logprobs"][1:], strict=True)
    ]
    assert greedy == [*(expected[:-1].argmax(-1) == torch.tensor(ids[1:])).tolist(), True]
    assert choice[0]["text"].startswith(TEXT) and any(greedy) and not all(greedy)


def test_scores_are_the_same_bitwise_with_and_without_speculation(cluster: Cluster) -> None:
    # As lm-eval asks: token ids, one token, echo. The draft has seen the text before and would guess it.
    ids = post(cluster, "/tokenize", prompt=TEXT)["tokens"]
    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "echo": True, "logprobs": 1, "seed": 1}
    # One at a time: a prompt that is computed beside another one's round is rounded in another way. Guesses that
    # are there before the prompt is computed (a draft has seen it before) do not come beside it.
    for prompt in (ids, ids[:9]):
        found = []
        for speculation in ("on", "off"):
            answer = post(cluster, "/v1/completions", prompt=[prompt], speculation=speculation, **asked)
            found.append((answer["choices"][0]["text"], answer["choices"][0]["logprobs"]))
        (text, values), (other_text, other_values) = found
        assert text == other_text
        # Prompts alone: rounds of another width round the generated tokens' values in another way.
        for name in ("token_logprobs", "top_logprobs"):
            assert values[name][: len(prompt)] == other_values[name][: len(prompt)]


async def test_the_trace_of_a_real_answer_fits_its_tokens(cluster: Cluster) -> None:
    request = chat(COPY_PROMPT, max_tokens=36)
    request.trace = True
    messages = [message async for message in stream(cluster, request)]
    trees = [tree for message in messages for tree in message.rounds]
    usage = messages[-1].usage
    assert sum(tree.num_tokens for tree in trees) == usage.completion_tokens == 36
    assert sum(len(tree.accepted) for tree in trees) == usage.num_accepted_tokens > 0
    assert sum(len(tree.parents) for tree in trees) == usage.num_draft_tokens
    assert {name for tree in trees for name in tree.drafter_names} <= {"eagle3", "ngram", "ngram_shared"}
    body = {"messages": [{"role": "user", "content": COPY_PROMPT}], "max_tokens": 36, "temperature": 0, "trace": True}
    trace = post(cluster, "/v1/chat/completions", ignore_eos=True, **body)["choices"][0]["trace"]
    assert [token["id"] for token in trace["tokens"]] == [t for message in messages for t in message.token_ids]
    assert all(entry["texts"] for entry in trace["rounds"] if entry["parents"])


def test_a_load_generator_finds_models_counters_and_tokens(cluster: Cluster) -> None:
    pytest.importorskip("requests")
    from benchmarks.serving.client_checks import load_generator

    found = load_generator(cluster.rest_url, cluster.gateway_address)
    assert found["drafts"] > 0 and found["accepted_tokens"] > 0


def test_grpcs_health_client_finds_every_service(cluster: Cluster) -> None:
    from benchmarks.serving.client_checks import health

    assert health(cluster.rest_url, cluster.gateway_address)["names"] == 2


def test_sglangs_clients_compare_choices_and_stream(cluster: Cluster) -> None:
    # As its frontend does: the model's name, then choices scored by their prompts' log-probabilities.
    assert httpx.get(f"{cluster.rest_url}/get_model_info").json()["model_path"] == "smollm2"
    assert httpx.get(f"{cluster.rest_url}/health_generate", timeout=60).status_code == 200
    question = "The capital of France is"
    answers = post(
        cluster,
        "/generate",
        text=[f"{question} Paris", f"{question} seven"],
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    right, wrong = (sum(entry[0] for entry in a["meta_info"]["input_token_logprobs"][1:]) for a in answers)
    assert right > wrong
    body = {"text": question, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    whole = post(cluster, "/generate", **body)
    with httpx.stream("POST", f"{cluster.rest_url}/generate", json=body | {"stream": True}, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["text"] == whole["text"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package"), [("openai", "openai"), ("langchain", "langchain_openai")])
def test_chat_clients_get_what_they_expect(cluster: Cluster, name: str, package: str) -> None:
    pytest.importorskip(package)
    from benchmarks.serving.client_checks import CHECKS

    assert CHECKS[name][0](cluster.rest_url, cluster.gateway_address)["text"]


@pytest.mark.slow
def test_lm_eval_scores_alike_with_and_without_speculation(cluster: Cluster, model_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from benchmarks.serving.client_checks import lm_eval
    from outrider.config.verify import VerifyOptions

    drafted = lm_eval(cluster.rest_url, cluster.gateway_address)
    options = VerifyOptions(
        model=str(model_path),
        dtype="float32",
        max_total_tokens=8192,
        served_model_name="smollm2",
        no_speculation=True,
    )
    with Cluster(verify=options) as without:
        plain = lm_eval(without.rest_url, without.gateway_address)
    assert drafted["scores"] == plain["scores"] and drafted["samples"] == plain["samples"]
