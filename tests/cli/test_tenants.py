"""What a client learns does not depend on what clients of other API keys asked or were told; real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.cli.cluster import Cluster
from outrider.config.gateway import GatewayOptions

pytestmark = pytest.mark.xdist_group("live")

PROMPT = list(range(1, 41))
ANSWER_TOKENS = 96


@pytest.fixture
def locked(live: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """A second gateway, which asks for keys, before services that have answered others without one."""
    keys = tmp_path / "keys"
    keys.write_text("key-alpha\nkey-beta\n")
    options = GatewayOptions(api_key_file=keys, verify=(live.address("verify"),))
    with Cluster(gateway=options, services=("gateway",)) as running:
        yield running


def ask(locked: Cluster, key: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "trace": True, **fields}
    answer = httpx.post(
        f"{locked.rest_url}/v1/completions",
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


def test_answers_prompts_traces_and_cached_tokens_stay_with_their_key(locked: Cluster) -> None:
    first = ask(locked, "key-alpha")
    assert learned(first) == (0, 0)
    text = first["choices"][0]["text"]
    # The other key asks the same, and quotes the first one's answer, which n-grams would go on with.
    other = ask(locked, "key-beta")
    assert learned(other) == (0, 0)
    assert learned(ask(locked, "key-beta", cache_salt="apart")) == (0, 0)
    assert learned(ask(locked, "key-alpha", cache_salt="apart")) == (0, 0)
    # So that the above means something: the same key finds both.
    again = ask(locked, "key-alpha")
    cached, shared = learned(again)
    assert cached > 0 and shared > 0
    assert other["choices"][0]["text"] == again["choices"][0]["text"] == text
