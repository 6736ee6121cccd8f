"""Answers that are asked for together compute what their prompts share once; real processes."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from outrider.cli.cluster import Cluster

pytestmark = pytest.mark.xdist_group("live")

BODY = {"model": "tiny", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


def num_prefilled(live: Cluster) -> int:
    page = httpx.get(live.metrics_url("verify")).text
    found = re.search(r"^outrider_verify_prefilled_tokens_total (\S+)", page, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def texts(live: Cluster, prompt: list[int], **fields: int) -> list[str]:
    answer = httpx.post(f"{live.rest_url}/v1/completions", json={**BODY, "prompt": prompt, **fields}, timeout=120)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def test_answers_to_one_prompt(live: Cluster) -> None:
    before = num_prefilled(live)
    prompt = [5 + at * at % 47 for at in range(150)]
    answers = texts(live, prompt, n=4)
    # Of the second to fourth no more than the last page.
    assert 150 <= num_prefilled(live) - before <= 150 + 3 * 16
    assert len(answers) == 4 and len(set(answers)) == 1


def test_requests_that_come_together_and_begin_alike(live: Cluster) -> None:
    before = num_prefilled(live)
    prompts = [[5 + at * at % 43 for at in range(140)] + [number] * 10 for number in (6, 7, 8, 9)]
    with ThreadPoolExecutor(4) as clients:
        together = list(clients.map(lambda prompt: texts(live, prompt), prompts))
    assert 150 <= num_prefilled(live) - before <= 150 + 3 * (16 + 10)
    assert together == [texts(live, prompt) for prompt in prompts]
