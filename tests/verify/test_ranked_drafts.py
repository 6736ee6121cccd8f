"""A draft model that is cut over ranks grows the trees that it grows whole, the same on all of them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_harness import RANKS_VOCAB, jobs, make_paged_engine, save_random_head
from harness import Answer, run_all, tokens
from rank_threads import linked
from test_rank_renewal import Graph, Stream
from threaded_engine import ThreadedEngine

from outrider import graphs
from outrider.attention.paged import PromptChunk
from outrider.config.draft import DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.drafting.model.round_drafter import ChoiceShape, RoundShape
from outrider.errors import ConfigError, UnavailableError
from outrider.graphs import GraphPool
from outrider.layers.exchange import Exchange, PeerExchange
from outrider.models.decoder import CausalLM
from outrider.models.drafters import config as head_config
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.config import ContextWindow
from outrider.models.drafters.heads import StandaloneDraft
from outrider.models.drafters.loader import load_draft_model
from outrider.models.loader import load_decoder
from verify_service.engine import loading
from verify_service.engine.round import Growth
from verify_service.executors import ranks
from verify_service.executors.cuda import CudaExecutor
from verify_service.executors.ranks import pack_chunks, unpack_chunks

GROWTH = Growth(3, 16)


@pytest.fixture(scope="module")
def model(ranks_folder: Path) -> CausalLM:
    """The one of `truth`, too."""
    return load_decoder(ranks_folder)


@pytest.fixture(autouse=True)
def small_heads_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_config, "LEAST_SAVED_BYTES", 1)


def itself(part: CausalLM, window: int = 0) -> DraftModel:
    """The target as its own drafter: it knows all of a text."""
    draft = StandaloneDraft(part, "")
    draft.exchange = part.exchange
    draft.window = ContextWindow(window)
    return draft


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE-3 head for the target: it knows little, and what it proposes depends on features."""
    folder = tmp_path_factory.mktemp("head")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 256, "vocab_size": RANKS_VOCAB, "draft_vocab_size": 40}
    save_random_head(folder, sizes)
    return folder


def accepted(answers: list[Answer]) -> list[int]:
    return [answer.num_accepted for answer in answers]


def same_state(leader: Any, follower: Any) -> None:
    """Both have grown the same trees, bit for bit, from the same features and pages."""
    one, other = leader.drafts.drafter, follower.drafts.drafter
    assert torch.equal(one.grown.order, other.grown.order)
    assert torch.equal(one.grown.pool.entries, other.grown.pool.entries)
    assert torch.equal(one.memory.plan.page_tables, other.memory.plan.page_tables)
    assert torch.equal(one.memory.plan.slot_masks, other.memory.plan.slot_masks)
    if one.memory.features is not None:
        assert torch.equal(one.memory.features, other.memory.features)
        assert torch.equal(leader._features._halves, follower._features._halves)


@pytest.mark.parametrize(
    ("num_pages", "deterministic", "window", "world"),
    [(256, False, 0, 2), (24, True, 0, 2), (256, False, 16, 2), (256, False, 0, 4)],
)
def test_trees_of_all_ranks_give_the_text_of_one(
    ranks_folder: Path, truth: list[Answer], num_pages: int, deterministic: bool, window: int, world: int
) -> None:
    followers: list[CudaExecutor] = []
    options: dict[str, Any] = {"growth": GROWTH, "num_pages": num_pages, "deterministic": deterministic}
    with linked(
        ranks_folder, world, part_of_draft=lambda part: itself(part, window), followers=followers, **options
    ) as one:
        one.start()
        # Threads of four ranks take turns.
        asked = jobs()[: 4 if world == 4 else None]
        answers = run_all(one, asked, 4)
        one.stop()
        assert tokens(answers) == tokens(truth[: len(asked)])
        assert sum(accepted(answers)) > 3.6 * len(asked)
        if num_pages == 24:
            assert one.scheduler.num_preemptions > 0
        leader: Any = one._executor
    assert len(followers) == world - 1
    for follower in followers:
        same_state(leader, follower)


def test_a_cut_head_grows_the_trees_of_a_whole_one(
    ranks_folder: Path, head: Path, model: CausalLM, truth: list[Answer], engines: list[ThreadedEngine]
) -> None:
    draft_options = DraftOptions(speculative_algorithm=("EAGLE3",), speculative_draft_model_path=str(head))

    def load(part: CausalLM) -> DraftModel:
        return load_draft_model(draft_options, part.device, part.dtype, exchange=part.exchange)

    # One at a time, so that what a request's tree may have does not hang on the others.
    whole, _ = make_paged_engine(model, draft=load(model), growth=GROWTH)
    engines.append(whole)
    whole.start()
    expected = run_all(whole, jobs()[:6], 1)
    followers: list[CudaExecutor] = []
    with linked(ranks_folder, 2, part_of_draft=load, growth=GROWTH, followers=followers) as engine:
        engine.start()
        found = run_all(engine, jobs()[:6], 1)
        engine.stop()
        leader: Any = engine._executor
    assert tokens(found) == tokens(expected) == tokens(truth[:6])
    assert accepted(found) == accepted(expected) and sum(accepted(found)) > 5
    drafter, alone = leader.drafts.drafter._model, whole._executor.drafts.drafter._model  # type: ignore[attr-defined]
    assert 2 * drafter.num_kv_heads == alone.num_kv_heads and 2 * drafter.output.num_out == alone.output.num_out
    same_state(leader, followers[0])


def test_a_drafter_that_fails_on_rank_0_ends_the_engine(
    ranks_folder: Path, truth: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are a step ahead of it, or wait for it."""
    with linked(ranks_folder, 2, part_of_draft=itself, growth=GROWTH) as engine:
        executor: Any = engine._executor

        def fail(shape: object) -> None:
            raise ValueError("no such step")

        monkeypatch.setattr(executor.drafts.drafter.choices, "run", fail)
        engine.start()
        (answer,) = run_all(engine, jobs()[:1])
        engine.stop()
    error = answer.updates[-1].error
    assert isinstance(error, UnavailableError)
    assert "drafting on all ranks failed on rank 0: ValueError: no such step" in error.message


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU captures, too: what it replays runs as it did."""
    for name, value in {"mem_get_info": (0, 0), "current_device": 0, "graph_pool_handle": 0, "synchronize": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(GraphPool, "_record", lambda pool, shape: Graph(pool, shape))
    monkeypatch.setattr(graphs, "allow_threads", lambda: False)
    monkeypatch.setattr(ranks, "compile_aside", nullcontext)


def test_ranks_capture_and_replay_in_step(ranks_folder: Path, truth: list[Answer], no_device: None) -> None:
    followers: list[CudaExecutor] = []
    with linked(ranks_folder, 2, part_of_draft=itself, growth=GROWTH, followers=followers) as engine:
        leader: Any = engine._executor
        shapes = [RoundShape(4 * rows, rows) for rows in (1, 2, 4)]
        with torch.inference_mode():
            leader.drafts.drafter.capture(shapes, [ChoiceShape(16, shape.rows) for shape in shapes])
        engine.start()
        answers = run_all(engine, jobs(), 4)
        engine.stop()
    assert tokens(answers) == tokens(truth)
    assert sum(accepted(answers)) > 50
    follower: Any = followers[0]
    for executor in (leader, follower):
        drafter = executor.drafts.drafter
        assert len(drafter.extensions) == len(drafter.steps) == len(drafter.choices) == 3
    same_state(leader, follower)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_rank_loads_its_part_or_rank_0_the_whole(
    ranks_folder: Path, head: Path, model: CausalLM, monkeypatch: pytest.MonkeyPatch, rank: int, is_cut: bool
) -> None:
    asked: list[Exchange | None] = []

    def record(
        draft_options: DraftOptions, device: torch.device, dtype: torch.dtype, report: object, exchange: Any
    ) -> object:
        asked.append(exchange)
        return SimpleNamespace(token_ids_hash="", hidden_size=64, target_vocab_size=target.config.vocab_size)

    monkeypatch.setattr(head_config, "LEAST_SAVED_BYTES", 1 if is_cut else 1 << 30)
    monkeypatch.setattr(loading, "load_draft_model", record)
    # Made by devices that reach each other alone.
    exchange = object.__new__(PeerExchange)
    exchange.rank, exchange.world = rank, 2
    target = CausalLM(model.config, torch.float32, torch.device("meta"))
    target.device, target.exchange = torch.device("cuda"), exchange
    options = VerifyOptions(speculative_algorithm=("EAGLE3",), speculative_draft_model_path=str(head))
    found = loading.load_draft(options, ranks_folder, target)
    assert asked == ([exchange] if is_cut else [] if rank else [None])
    assert (found is None) == (not asked)


def test_a_draft_that_lacks_tokens_of_the_target_does_not_run_inside_rounds(
    ranks_folder: Path, head: Path, model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SimpleNamespace(token_ids_hash="", hidden_size=64, target_vocab_size=10)
    monkeypatch.setattr(loading, "load_draft_model", lambda *_: small)
    target = CausalLM(model.config, torch.float32, torch.device("meta"))
    target.device = torch.device("cuda")
    options = VerifyOptions(speculative_algorithm=("EAGLE3",), speculative_draft_model_path=str(head))
    with pytest.raises(ConfigError, match="knows 10 tokens, and the target has"):
        loading.load_draft(options, ranks_folder, target)


def test_context_tokens_are_told_as_they_are() -> None:
    chunks = [
        PromptChunk(3, [5, 6], 7, np.array([9, -1], np.int32)),
        PromptChunk(1, [8], 0, np.array([4], np.int32), 16),
    ]
    found, feature_slots = unpack_chunks(pack_chunks(chunks, [10, 11, 12]))
    assert feature_slots == [10, 11, 12]
    for one, other in zip(found, chunks, strict=True):
        assert (one.table_row, one.start, one.offset) == (other.table_row, other.start, other.offset)
        assert (list(one.token_ids), list(one.slots)) == (list(other.token_ids), list(other.slots))
