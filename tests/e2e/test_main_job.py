"""Three real processes stream real text, exactly as plain decoding and transformers give it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from client import COPY_PROMPT, chat, generate
from service_process import wait_until
from tiny_service import metric

from outrider.cli.cluster import Cluster
from outrider.models.drafters.kinds import shipped_head
from outrider.v1 import common_pb2

pytestmark = pytest.mark.xdist_group("cluster")

ROOT = Path(__file__).parents[2]
SAMPLED: list[dict[str, float]] = [
    {"temperature": 0.8, "top_p": 0.95, "seed": 7},
    {
        "temperature": 0.8,
        "seed": 8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
    },
    {"temperature": 0.0},
]


def test_greedy_text_is_that_of_transformers(cluster: Cluster, model_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="float32")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    wanted = output[0, inputs["input_ids"].shape[1] :].tolist()
    with openai.OpenAI(base_url=f"{cluster.rest_url}/v1", api_key="none") as client:
        got = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=16, temperature=0)  # type: ignore[arg-type]
    assert got.choices[0].message.content == tokenizer.decode(wanted, skip_special_tokens=True)
    assert got.usage is not None and got.usage.prompt_tokens == inputs["input_ids"].shape[1]


async def test_speculation_changes_no_token(cluster: Cluster) -> None:
    requests = [
        chat(COPY_PROMPT, speculate=speculate, max_tokens=20, **sampling)
        for sampling in SAMPLED
        for speculate in (False, True)
    ]
    answers = await asyncio.gather(*(generate(cluster, request) for request in requests))
    for plain, drafted in zip(answers[::2], answers[1::2], strict=True):
        assert drafted.token_ids == plain.token_ids and drafted.text == plain.text
        assert len(drafted.origins) == len(drafted.token_ids) == 20
        assert set(plain.origins) == {common_pb2.TOKEN_ORIGIN_PLAIN}
        assert plain.usage is not None and plain.usage.num_draft_tokens == 0


def grown(cluster: Cluster, source: str) -> float:
    """Nodes of this drafter that the draft service has appended."""
    return metric(cluster.metrics_url("draft"), "outrider_draft_nodes_grown_total", source=source)


async def test_the_shipped_head_and_n_grams_draft_and_are_accepted_on_text_that_repeats(
    cluster: Cluster, model_path: Path
) -> None:
    assert shipped_head(str(model_path)) is not None, "the default model's head is not in models/"
    answer = await generate(cluster, chat(COPY_PROMPT, max_tokens=32))
    assert answer.usage is not None and answer.usage.num_accepted_tokens > 0
    assert answer.usage.num_accepted_tokens == answer.origins.count(common_pb2.TOKEN_ORIGIN_ACCEPTED)
    assert answer.usage.num_rounds < answer.usage.completion_tokens == 32
    # A draft's figures reach its page a little later.
    wait_until(lambda: grown(cluster, "eagle3") > 0 and grown(cluster, "ngram") > 0)


async def test_a_batch_gives_what_each_request_gives_alone(cluster: Cluster) -> None:
    requests = [chat(f"Count from {start} to {start + 9}.", max_tokens=12) for start in (1, 20, 300, 4000)]
    together = await asyncio.gather(*(generate(cluster, request) for request in requests))
    for place in (0, 3):
        assert (await generate(cluster, requests[place])).token_ids == together[place].token_ids


async def test_answers_of_one_request_differ_and_repeat_under_their_seed(cluster: Cluster) -> None:
    client = openai.AsyncOpenAI(base_url=f"{cluster.rest_url}/v1", api_key="none")

    async def texts() -> list[str | None]:
        got = await client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Invent a name for a boat."}],
            max_tokens=12,
            temperature=1.0,
            seed=11,
            n=2,
        )
        return [choice.message.content for choice in got.choices]

    first, again = await texts(), await texts()
    await client.close()
    assert first == again and first[0] != first[1]


def test_every_metrics_page_passes_promtool(cluster: Cluster) -> None:
    promtool = shutil.which("promtool")
    for name in cluster.services:
        with urllib.request.urlopen(cluster.metrics_url(name)) as response:
            page = response.read()
        assert b"outrider_" in page
        if promtool is not None:
            checked = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, timeout=60)
            complaints = [line for line in checked.stderr.decode().splitlines() if line.strip()]
            # vLLM's names hold a colon, which promtool keeps for recording rules; dashboards need them as they are.
            assert all(line.startswith("vllm:") and "':'" in line for line in complaints), complaints


@pytest.mark.slow
def test_what_the_page_suggests_is_answered_to_the_end_with_help_of_drafts(cluster: Cluster) -> None:
    script = (ROOT / "gateway" / "page" / "main.js").read_text()
    (listed,) = re.findall(r"const EXAMPLES = (\[.*?),\n\];", script, re.DOTALL)
    num_rounds = num_tokens = 0
    with openai.OpenAI(base_url=f"{cluster.rest_url}/v1", api_key="none") as client:
        for question in json.loads(listed + "]"):
            messages: Any = [{"role": "user", "content": question}]
            got = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=512, temperature=0)
            assert got.choices[0].finish_reason == "stop", (question, got.choices[0].message.content)
            assert got.usage is not None and got.usage.model_extra is not None
            num_rounds += got.usage.model_extra["outrider"]["rounds"]
            num_tokens += got.usage.completion_tokens
    assert num_rounds < num_tokens
