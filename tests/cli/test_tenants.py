"""What a client learns does not depend on what clients of other API keys asked or were told; real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_service import tiny_folder, tiny_options

from outrider.cli.cluster import Cluster
from outrider.config.draft import DraftOptions
from outrider.config.gateway import GatewayOptions

PROMPT = list(range(1, 41))
ANSWER_TOKENS = 96


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    keys = tmp_path / "keys"
    keys.write_text("key-alpha\nkey-beta\n")
    with Cluster(
        gateway=GatewayOptions(api_key_file=keys),
        verify=tiny_options(tiny_folder(tmp_path / "tiny")),
        draft=DraftOptions(speculative_algorithm=("NGRAM",)),
    ) as running:
        yield running


def ask(cluster: Cluster, key: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "trace": True, **fields}
    answer = httpx.post(
        f"{cluster.rest_url}/v1/completions",
        json=body | {"max_tokens": ANSWER_TOKENS, "ignore_eos": True},
        headers={"authorization": f"Bearer {key}"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def learned(answer: dict[str, Any]) -> tuple[int, int]:
    """Prompt tokens that came from the radix cache, and nodes that came from other requests' answers."""
    rounds = answer["choices"][0]["trace"]["rounds"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, sum(source == "ngram_shared" for entry in rounds for source in entry["drafters"])


def test_answers_prompts_traces_and_cached_tokens_stay_with_their_key(cluster: Cluster) -> None:
    first = ask(cluster, "key-alpha")
    assert learned(first) == (0, 0)
    text = first["choices"][0]["text"]
    # The other key asks the same, and quotes the first one's answer, which n-grams would go on with.
    other = ask(cluster, "key-beta")
    assert learned(other) == (0, 0)
    assert learned(ask(cluster, "key-beta", cache_salt="apart")) == (0, 0)
    assert learned(ask(cluster, "key-alpha", cache_salt="apart")) == (0, 0)
    # So that the above means something: the same key finds both.
    again = ask(cluster, "key-alpha")
    cached, shared = learned(again)
    assert cached > 0 and shared > 0
    assert other["choices"][0]["text"] == again["choices"][0]["text"] == text
