"""Features are multiplied with a draft's projection before they are stored, where that makes them smaller."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_harness import VOCAB, jobs, texts
from feature_draft import FeatureDraft, ProjectedDraft, random_projection
from harness import Answer, run_all, tokens
from local_draft import oracle
from threaded_engine import ThreadedEngine

from outrider.cache.kv import FeatureStore
from outrider.errors import ConfigError
from outrider.models.decoder import CausalLM
from outrider.tree.handshake import PROJECTED

LAYERS = (3, 0, 1)
Start = Callable[..., ThreadedEngine]


def projected(engine: ThreadedEngine, truth: list[Answer], seed: int = 1, columns: int = 48) -> ProjectedDraft:
    return ProjectedDraft(engine, VOCAB, oracle(texts(truth), VOCAB), random_projection(LAYERS, 64, columns, seed))


def raw(engine: ThreadedEngine, truth: list[Answer], layers: tuple[int, ...]) -> FeatureDraft:
    return FeatureDraft(engine, VOCAB, oracle(texts(truth), VOCAB), layers)


def store_of(engine: ThreadedEngine) -> FeatureStore:
    store = engine._executor._features  # type: ignore[attr-defined]
    assert isinstance(store, FeatureStore)
    return store


@pytest.mark.parametrize(
    ("kind", "columns", "num_pages"),
    [("torch", 64, 24), ("paged", 48, 256), ("paged", 64, 24), ("deterministic", 48, 256)],
)
def test_every_committed_position_arrives_as_a_product(
    model: CausalLM, truth: list[Answer], start: Start, kind: str, columns: int, num_pages: int
) -> None:
    engine = start(kind, num_pages=num_pages)
    draft = projected(engine, truth, columns=columns)
    draft.connect()
    engine.start()
    assert tokens(run_all(engine, jobs(), 4)) == tokens(truth)
    engine.stop()
    assert draft.check(model, 1e-3, preempted=num_pages == 24) > 145
    assert draft.begun is not None and (draft.begun.width, draft.begun.wants_projection) == (columns, True)
    assert store_of(engine).width == columns and store_of(engine).inputs == (0, 1, 3)


def test_a_draft_that_comes_back_is_not_asked_for_its_projection_again(
    model: CausalLM, truth: list[Answer], start: Start
) -> None:
    engine = start("paged")
    first, second, third = (projected(engine, truth) for _ in range(3))
    first.connect()
    engine.start()
    assert tokens(run_all(engine, jobs()[:4])) == tokens(truth[:4])
    store = store_of(engine)
    second.connect()
    engine.draft_disconnected(first)
    assert tokens(run_all(engine, jobs()[:4])) == tokens(truth[:4])
    engine.draft_disconnected(second)
    third.connect()
    assert tokens(run_all(engine, jobs()[:4])) == tokens(truth[:4])
    engine.stop()
    assert [draft.begun.wants_projection for draft in (first, second, third) if draft.begun] == [True, False, False]
    assert store_of(engine) is store, "what was stored is of use for all of them"
    for draft in (first, second, third):
        assert draft.check(model, 1e-3) > 50


def test_a_second_draft_with_another_projection_gets_raw_features(
    model: CausalLM, truth: list[Answer], start: Start
) -> None:
    engine = start("paged")
    first, second = projected(engine, truth, 1), projected(engine, truth, 2)
    first.connect()
    engine.start()
    assert tokens(run_all(engine, jobs()[:4])) == tokens(truth[:4])
    second.connect()
    run_all(engine, jobs()[:1], speculate=False)
    assert tokens(run_all(engine, jobs())) == tokens(truth)
    engine.stop()
    assert second.begun is not None and not second.begun.projected and second.begun.width == 3 * 64
    assert store_of(engine).parts == (0, 1, 3, PROJECTED)
    assert first.check(model, 1e-3) > 70 and second.check(model, 1e-3) > 50


def test_a_projection_that_nobody_uses_gives_way(model: CausalLM, truth: list[Answer], start: Start) -> None:
    engine = start("torch")
    first, second = projected(engine, truth, 1), projected(engine, truth, 2, columns=32)
    first.connect()
    engine.start()
    assert tokens(run_all(engine, jobs()[:2])) == tokens(truth[:2])
    engine.draft_disconnected(first)
    second.connect()
    run_all(engine, jobs()[:1], speculate=False)
    assert tokens(run_all(engine, jobs())) == tokens(truth)
    engine.stop()
    assert store_of(engine).parts == (PROJECTED,) and store_of(engine).width == 32
    assert second.check(model, 1e-3) > 145


@pytest.mark.parametrize("raw_first", [False, True])
def test_raw_and_projected_drafts_get_their_own(
    model: CausalLM, truth: list[Answer], start: Start, raw_first: bool
) -> None:
    engine = start("paged")
    drafts = [raw(engine, truth, (3, 2)), projected(engine, truth)]
    drafts = drafts if raw_first else drafts[::-1]
    for draft in drafts:
        draft.connect()
    engine.start()
    run_all(engine, jobs()[:1], speculate=False)
    assert tokens(run_all(engine, jobs())) == tokens(truth)
    engine.stop()
    for draft in drafts:
        assert draft.check(model, 1e-3) > 50


def test_a_store_that_cannot_be_had_leaves_the_engine_as_it_was(
    model: CausalLM, truth: list[Answer], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise ConfigError("no room")

    engine = start("torch")
    first = raw(engine, truth, (1,))
    first.connect()
    engine.start()
    assert tokens(run_all(engine, jobs()[:2])) == tokens(truth[:2])
    monkeypatch.setattr("verify_service.executors.base.FeatureStore", fail)
    second = projected(engine, truth)
    second.connect()
    run_all(engine, jobs()[:1], speculate=False)
    first.texts.clear()
    assert tokens(run_all(engine, jobs())) == tokens(truth)
    assert not engine.features.preparing and not second.texts
    monkeypatch.undo()
    engine.draft_disconnected(second)
    second.connect()
    run_all(engine, jobs()[:1], speculate=False)
    assert tokens(run_all(engine, jobs())) == tokens(truth)
    engine.stop()
    assert first.check(model) > 145 and second.check(model, 1e-3) > 50


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_matrix_of_any_format_is_taken_in_the_model_s_own(dtype: str) -> None:
    projection = random_projection((2, 0), 16, 6, dtype=dtype)
    store = FeatureStore((1,), 16, 8, torch.float32, torch.device("cpu"), projection)
    states = [torch.randn(3, 16) for _ in range(3)]
    with torch.inference_mode():
        store.write(torch.tensor([5, -1, 2]), states)
        into = torch.empty(2, 6)
        store.gather(torch.tensor([2, 5]), (PROJECTED,), into)
        layer = torch.empty(2, 16 + 6)
        store.gather(torch.tensor([2, 5]), (PROJECTED, 1), layer)
    matrix = torch.frombuffer(bytearray(projection.data), dtype=getattr(torch, dtype)).view(6, 32).float()
    expected = torch.cat([states[2], states[0]], 1)[[2, 0]] @ matrix.T
    torch.testing.assert_close(into, expected)
    torch.testing.assert_close(layer, torch.cat([expected, states[1][[2, 0]]], 1))
