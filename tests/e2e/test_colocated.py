"""`outrider up --draft-placement colocated` on a CPU: gateway and verify, which drafts in its own process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from client import COPY_PROMPT, chat, generate
from rich.console import Console

from outrider.cli.main import make_parser
from outrider.cli.options import make_cluster


async def test_two_services_answer_with_accepted_draft_tokens(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = make_parser(["up"]).parse_args(
        ["up", "--draft-placement=colocated", f"--model={model_path}", "--max-total-tokens=2048"]
    )
    lines: list[str] = []
    cluster = make_cluster(
        arguments, Console(), lambda name, line: lines.append(line), fixed_ports=False, supervise=False
    )
    assert cluster.services == ["verify", "gateway"]
    with cluster:
        assert cluster.drafters == {"verify": ("EAGLE3", "NGRAM")}
        plain, drafted = await asyncio.gather(
            generate(cluster, chat(COPY_PROMPT, speculate=False, max_tokens=24)),
            generate(cluster, chat(COPY_PROMPT, max_tokens=24)),
        )
    assert drafted.token_ids == plain.token_ids
    assert drafted.usage is not None and drafted.usage.num_accepted_tokens > 0
    assert not any("switched off" in line for line in lines)
    assert set(cluster.close().values()) == {"ended"}
