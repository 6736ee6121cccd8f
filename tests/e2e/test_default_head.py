"""What a new user gets: the head that ships for the default model, drafting beside n-grams."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from client import chat, generate

from outrider.cli.cluster import Cluster
from outrider.config.draft import DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.models.shipped import shipped_head

QUESTION = "Explain in a few sentences why the sky is blue."


@pytest.fixture(scope="module")
def default_cluster(model_path: Path) -> Iterator[Cluster]:
    assert shipped_head(str(model_path)) is not None, "the default model's head is not in models/"
    options = VerifyOptions(model=str(model_path), dtype="float32", device="cpu", max_total_tokens=8192)
    with Cluster(verify=options, draft=DraftOptions(device="cpu", dtype="float32")) as running:
        yield running


def grown(cluster: Cluster) -> dict[str, float]:
    """Nodes that the draft service has appended, by drafter."""
    page = urllib.request.urlopen(cluster.metrics_url("draft"), timeout=10).read().decode()
    name = 'outrider_draft_nodes_grown_total{source="'
    lines = [line.removeprefix(name).split('"} ') for line in page.splitlines() if line.startswith(name)]
    return {source: float(value) for source, value in lines}


async def test_head_and_n_grams_grow_one_tree_and_change_no_token(default_cluster: Cluster) -> None:
    plain = await generate(default_cluster, chat(QUESTION, speculate=False, max_tokens=40))
    drafted = await generate(default_cluster, chat(QUESTION, max_tokens=40))
    assert drafted.token_ids == plain.token_ids
    nodes = grown(default_cluster)
    assert {"eagle3", "ngram"} <= set(nodes) and nodes["eagle3"] > 0
