"""A rank behind rank 0, before it follows."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.config.verify import VerifyOptions
from outrider.models.decoder import CausalLM
from verify_service.engine import rank_worker


@pytest.mark.parametrize("link", [None, object()])
def test_what_lives_when_a_rank_begins_to_follow_is_never_looked_at_by_the_collector(
    link: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []

    def follow(*_: Any) -> None:
        frozen.append(gc.get_freeze_count())

    parts: dict[str, Any] = {
        "load": (Path(), object.__new__(CausalLM)),
        "load_draft": None,
        "link_ranks": link,
        "choose_threads": 1,
        "following_executor": None,
    }
    for name, value in parts.items():
        monkeypatch.setattr(rank_worker, name, lambda *_, value=value: value)
    monkeypatch.setattr(rank_worker.torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(rank_worker, "follow", follow)
    monkeypatch.setattr(rank_worker, "follow_rounds", follow)
    before, living = gc.get_freeze_count(), [[] for _ in range(1000)]  # type: ignore[var-annotated]
    rank_worker.serve(VerifyOptions(), SimpleNamespace(trade=lambda _: None))  # type: ignore[arg-type]
    assert len(frozen) == 1 and frozen[0] >= before + len(living)
