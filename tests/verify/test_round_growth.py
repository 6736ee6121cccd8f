"""Trees that grow inside the round change no token, whatever the drafter; the GPU's executor on torch references."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cuda_harness import VOCAB, jobs, make_paged_engine, texts
from feature_draft import FeatureDraft
from harness import Answer, make_request, run_all
from local_draft import Guess, LocalDraft, chain, noise, oracle
from page_integrity import check_memory
from test_cuda_executor_cpu import check_same
from threaded_engine import ThreadedEngine
from torch import Tensor

from outrider.attention.base import AttentionBackend, AttentionPlan, TokenBatch
from outrider.attention.paged import PagedBatch
from outrider.attention.triton_backend import TritonAttention
from outrider.cache.kv import KVCache
from outrider.layers.rotary import Rotary
from outrider.models.decoder import CausalLM
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.config import MARKOV_INPUT, block_config
from outrider.models.drafters.heads import BlockHead, StandaloneDraft
from outrider.sampling.params import SamplingParams
from outrider.tree.author import TreeAuthor
from outrider.tree.handshake import Terms
from verify_service.engine.round import Growth
from verify_service.executors.cuda import CudaExecutor

GREEDY = SamplingParams(temperature=0.0)
PAGE = 2
Made = list[tuple[ThreadedEngine, CudaExecutor]]


class WithFeatures(StandaloneDraft):
    """The target as its own drafter, that takes features: it knows all of a text but the first token.

    A feature that is not the target's of the position before is noticed: it makes the next token a wrong one.
    """

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model, "")
        self.hidden_size = self.feature_size = model.config.hidden_size
        self.feature_layers = (1,)
        self.checked = 0

    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        assert features is not None
        self.checked += int((features != 0).any(1).sum())
        hidden, _ = super().forward(batch, None, kv, attention)
        return hidden, features


class Clueless(WithFeatures):
    """A drafter that knows nothing."""

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(int(rows.abs().sum() * 1000))
        return torch.randn(len(rows), VOCAB, generator=generator)


@pytest.fixture
def made() -> Iterator[Made]:
    """Engines that a test makes; in the end nothing may be left in them."""
    engines: Made = []
    yield engines
    for engine, executor in engines:
        engine.stop()
        assert engine.scheduler.running == [] and not engine.scheduler.waiting
        check_memory(engine.memory)
        assert engine.memory.num_used == engine.memory.radix.num_pages, "a page leaked"
        assert len(executor.rows) == 0, "a row leaked"


def start(made: Made, model: CausalLM, draft: DraftModel, **options: Any) -> ThreadedEngine:
    engine, executor = make_paged_engine(model, draft=draft, **options)
    made.append((engine, executor))
    engine.start()
    return engine


def block_head(model: CausalLM) -> DraftModel:
    """A DSPARK head of random weights: it knows nothing, but its blocks, states and keys of features are real."""
    config = model.config
    fields = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "block_size": 4,
        "mask_token_id": 1,
        "target_layer_ids": [0, 1],
        "markov_rank": 4,
        "markov_head_type": "rnn",
    }
    head = BlockHead(block_config(fields, {MARKOV_INPUT}, config.num_layers), torch.float32, model.device)
    generator = torch.Generator().manual_seed(3)
    for tensor in head.checkpoint_tensors().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    head.finish_loading()
    return head


DRAFTS = {
    "standalone": lambda model: StandaloneDraft(model, ""),
    "features": WithFeatures,
    "clueless": Clueless,
    "block": block_head,
}


@pytest.mark.parametrize(
    ("name", "width", "num_pages", "deterministic", "growth"),
    [
        ("standalone", 4, 256, False, Growth(3, 16)),
        ("features", 4, 24, True, Growth(3, 16)),
        ("features", 1, 256, False, None),
        ("clueless", 4, 256, False, Growth(2, 12)),
        ("block", 4, 256, False, Growth(4, 16)),
        ("block", 1, 24, True, Growth(3, 12)),
    ],
)
def test_tokens_are_those_of_plain_decoding(
    model: CausalLM, truth: list[Answer], made: Made, name: str, width: int, num_pages: int, deterministic: bool,
    growth: Growth | None,
) -> None:  # fmt: skip
    draft = DRAFTS[name](model)
    engine = start(made, model, draft, num_pages=num_pages, deterministic=deterministic, growth=growth)
    count = len(jobs()) if width > 1 else 4
    answers = run_all(engine, jobs()[:count], width)
    check_same(answers, truth[:count])
    drafts = made[0][1].drafts
    assert drafts is not None and not drafts.failed
    accepted = sum(answer.num_accepted for answer in answers)
    total = sum(len(answer.token_ids) for answer in answers)
    if name in ("standalone", "features") and num_pages > 24:
        assert accepted > 0.4 * total
    if num_pages == 24 and width > 1:
        assert engine.scheduler.num_preemptions > 0
    elif width > 1:
        assert any(update.cached_prompt_tokens for answer in answers for update in answer.updates)


def test_pages_of_one_token_hold_rounds_with_trees(model: CausalLM, truth: list[Answer], made: Made) -> None:
    """Room for trees is then more pages than a round's updates of the page tables have places for."""
    engine = start(made, model, StandaloneDraft(model, ""), num_pages=2048, page_size=1, growth=Growth(3, 24))
    check_same(run_all(engine, jobs(), 8), truth)


class WithoutRegions(TritonAttention):
    """Takes as little as FlashInfer's attention to prompts beside ours."""

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        if isinstance(batch, PagedBatch) and batch.region_base is not None:
            raise ValueError("no tree regions")
        return super().plan(batch, kv, num_heads, rotary)


def test_rounds_whose_attention_knows_no_tree_regions_grow_trees(
    model: CausalLM, truth: list[Answer], made: Made
) -> None:
    engine = start(made, model, StandaloneDraft(model, ""), attention=WithoutRegions(), growth=Growth(3, 16))
    answers = run_all(engine, jobs(), 4)
    check_same(answers, truth)
    assert sum(answer.num_accepted for answer in answers) > 0


class Watched(StandaloneDraft):
    """Sees to it that KV is written to pages of the one request that runs."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model, "")
        self.num_checked = self.num_astray = 0
        self.pages: Callable[[], list[int]] = list

    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        pages = self.pages()
        if isinstance(batch, PagedBatch) and batch.region_base is None and pages:
            written = batch.slots[batch.slots >= 0].tolist()
            self.num_checked += len(written)
            # Raising would but switch the drafter off.
            self.num_astray += sum(slot // PAGE not in pages for slot in written)
        return super().forward(batch, features, kv, attention)


@pytest.mark.parametrize("growth", [None, Growth(3, 4)])
def test_a_drafter_writes_to_pages_of_its_request_alone(
    model: CausalLM, truth: list[Answer], made: Made, growth: Growth | None
) -> None:
    """Also where a round's last token is the last of a page, and the new root's KV belongs to the next."""
    draft = Watched(model)
    engine, executor = make_paged_engine(model, draft=draft, num_pages=512, page_size=PAGE, growth=growth)
    made.append((engine, executor))
    draft.pages = lambda: engine.scheduler.running[0].pages if engine.scheduler.running else []
    engine.start()
    check_same(run_all(engine, jobs()[:4], 1), truth[:4])
    assert draft.num_checked > 0 and draft.num_astray == 0


class Sleepy:
    """Has something grown in 6 of 16 rounds."""

    def __init__(self) -> None:
        self.num_planned = 0
        self.num_learned = 0

    def plan(self, num_rows: int) -> Growth | None:
        self.num_planned += 1
        return Growth(3, 16) if self.num_planned % 16 >= 10 else None

    def rests(self, num_rows: int, num_rounds: int = 1) -> bool:
        return self.num_planned % 16 + min(num_rounds, 3) < 10

    def note(
        self, growth: Growth, num_rows: int, paths: object, num_given: int = 0, seconds: float | None = None
    ) -> None:
        self.num_learned += 1


@pytest.mark.parametrize(
    ("name", "width", "num_pages", "deterministic"),
    [("standalone", 5, 256, False), ("features", 4, 24, False), ("features", 2, 256, True)],
)
def test_a_drafter_that_rested_goes_on_where_it_is(
    model: CausalLM, truth: list[Answer], made: Made, name: str, width: int, num_pages: int, deterministic: bool
) -> None:
    engine, executor = make_paged_engine(
        model, draft=DRAFTS[name](model), num_pages=num_pages, deterministic=deterministic, growth=Growth(3, 16)
    )
    made.append((engine, executor))
    assert engine._growth is not None
    policy = engine._growth.policy = Sleepy()  # type: ignore[assignment]
    engine.start()
    answers = run_all(engine, [*jobs(), *jobs()[:3]], width)
    check_same(answers, [*truth, *truth[:3]])
    # Half of the rounds did nothing for it, and the others took what grew.
    bare = sum(count for bucket, count in executor._uses.items() if bucket.is_bare)
    assert bare > 0.2 * executor._uses.total()
    assert policy.num_learned > 10
    assert sum(answer.num_accepted for answer in answers) > 13


def test_cancelled_requests_give_back_rows_and_pages(model: CausalLM, made: Made) -> None:
    source = random.Random(2)
    engine = start(made, model, StandaloneDraft(model, ""), num_pages=48, growth=Growth(3, 12))
    engine.draft_connected(LocalDraft(engine, VOCAB, noise(4, VOCAB)), Terms())
    waiting: list[Answer] = []
    for _ in range(60):
        answer = Answer()
        prompt = [source.randrange(VOCAB) for _ in range(source.randint(1, 30))]
        request = make_request(answer, prompt, GREEDY, VOCAB, max_tokens=source.randint(1, 12))
        engine.submit(request)
        if source.random() < 0.5:
            engine.cancel(request)
        else:
            waiting.append(answer)
    for answer in waiting:
        assert answer.done.wait(60)
        assert answer.updates[-1].finish_reason is not None


def test_traces_tell_the_trees_and_requests_without_speculation_get_none(model: CausalLM, made: Made) -> None:
    engine = start(made, model, StandaloneDraft(model, ""), growth=Growth(3, 8))
    traced, plain = Answer(), Answer()
    engine.submit(make_request(traced, [3, 1, 4, 1, 5], GREEDY, VOCAB, trace=True))
    engine.submit(make_request(plain, [3, 1, 4, 1, 5], GREEDY, VOCAB, speculate=False))
    assert traced.done.wait(60) and plain.done.wait(60)
    assert traced.token_ids == plain.token_ids
    assert traced.num_accepted > 0 and plain.num_accepted == 0
    trees = [tree for update in traced.updates for tree in update.round_trees if tree.parents]
    assert trees and all(tree.drafter_names == ["test"] for tree in trees)
    assert all(score <= 1e-6 for tree in trees for score in tree.scores)
    assert sum(len(tree.accepted) for tree in trees) >= traced.num_accepted


def test_requests_without_speculation_say_nothing_of_the_drafter(model: CausalLM, made: Made) -> None:
    """Behind any number of them, the first request that is drafted for has trees at once."""
    engine = start(made, model, StandaloneDraft(model, ""))
    answers = [Answer() for _ in range(9)]
    for answer in answers:
        is_last = answer is answers[-1]
        engine.submit(make_request(answer, [3, 1, 4, 1, 5], GREEDY, VOCAB, max_tokens=40, speculate=is_last))
        assert answer.done.wait(60)
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert answers[-1].num_accepted > 20


def sources(answers: list[Answer]) -> dict[str, int]:
    """Accepted draft tokens by the drafter that traces name."""
    counts: dict[str, int] = {}
    for tree in [tree for answer in answers for update in answer.updates for tree in update.round_trees]:
        for node in tree.accepted:
            name = tree.drafter_names[tree.drafters[node]]
            counts[name] = counts.get(name, 0) + 1
    return counts


def run_traced(engine: ThreadedEngine, width: int = 4) -> list[Answer]:
    """The jobs' answers, `width` at a time, with traces."""
    answers: list[Answer] = []
    for start_at in range(0, len(jobs()), width):
        batch = [Answer() for _ in jobs()[start_at : start_at + width]]
        for answer, (prompt, sampling) in zip(batch, jobs()[start_at:], strict=False):
            engine.submit(make_request(answer, prompt, sampling, VOCAB, trace=True))
        for answer in batch:
            assert answer.done.wait(60)
        answers += batch
    return answers


def half_right(answers: dict[tuple[int, ...], list[int]]) -> Guess:
    """Knows the long way to the end of a text in its second half, and nothing in its first."""

    def guess(author: TreeAuthor) -> None:
        text = answers[tuple(author.tokens[: author.prompt_len])]
        middle = author.prompt_len + (len(text) - author.prompt_len) // 2
        if author.committed_len >= middle:
            chain(author, text[author.committed_len : author.committed_len + 12], -0.01)

    return guess


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_draft_service_and_the_round_itself_feed_the_same_rounds(
    model: CausalLM, truth: list[Answer], made: Made, deterministic: bool
) -> None:
    growth = Growth(2, 16)
    engine = start(made, model, StandaloneDraft(model, ""), growth=growth, deterministic=deterministic)
    remote = LocalDraft(engine, VOCAB, half_right(texts(truth)))
    engine.draft_connected(remote, Terms(sources=("ngram",)))
    answers = run_traced(engine)
    check_same(answers, truth)
    accepted = sources(answers)
    assert accepted["test"] > 20 and accepted["ngram"] > 20, accepted
    assert sum(accepted.values()) == sum(answer.num_accepted for answer in answers)
    assert remote.num_resets == 0


@pytest.mark.parametrize("growth", [Growth(3, 16), None])
def test_a_draft_service_that_guesses_at_random_changes_nothing(
    model: CausalLM, truth: list[Answer], made: Made, growth: Growth | None
) -> None:
    engine = start(made, model, WithFeatures(model), num_pages=24, growth=growth)
    engine.draft_connected(LocalDraft(engine, VOCAB, noise(3, VOCAB)), Terms())
    check_same(run_all(engine, jobs(), 4), truth)
    assert engine.scheduler.num_preemptions > 0


def test_a_useless_drafter_gives_way_to_a_draft_service(model: CausalLM, truth: list[Answer], made: Made) -> None:
    engine = start(made, model, Clueless(model))
    engine.draft_connected(LocalDraft(engine, VOCAB, oracle(texts(truth), VOCAB)), Terms(sources=("ngram",)))
    answers = run_traced(engine, 1)
    check_same(answers, truth)
    accepted = sources(answers)
    assert accepted["ngram"] > 0.5 * sum(len(answer.token_ids) for answer in answers)


def test_a_drafter_that_fails_is_switched_off_and_answers_go_on(
    model: CausalLM, truth: list[Answer], made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(StandaloneDraft):
        left = 12

        def forward(self, *parts: Any) -> tuple[Tensor, Tensor | None]:
            self.left -= 1
            if self.left < 0:
                raise ValueError("no more")
            return super().forward(*parts)

    engine = start(made, model, Failing(model, ""), growth=Growth(2, 8))
    with caplog.at_level("ERROR"):
        answers = run_all(engine, jobs(), 4)
    check_same(answers, truth)
    assert sum(answer.num_accepted for answer in answers) > 0
    (line,) = [record.getMessage() for record in caplog.records if "drafting inside rounds" in record.getMessage()]
    assert "switched off: test failed with ValueError: no more" in line


def test_a_device_that_fails_while_it_drafts_ends_the_engine(model: CausalLM, made: Made) -> None:
    class Broken(StandaloneDraft):
        def forward(self, *parts: Any) -> tuple[Tensor, Tensor | None]:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    engine = start(made, model, Broken(model, ""), growth=Growth(2, 8))
    answer = Answer()
    engine.submit(make_request(answer, [3, 1, 4], GREEDY, VOCAB))
    assert answer.done.wait(60) and answer.updates[-1].error is not None and engine.stopping


@pytest.mark.parametrize("optional", [False, True])
def test_a_draft_service_gets_no_features_of_rounds_that_draft(
    model: CausalLM, truth: list[Answer], made: Made, caplog: pytest.LogCaptureFixture, optional: bool
) -> None:
    engine = start(made, model, WithFeatures(model), growth=Growth(2, 16))
    remote = FeatureDraft(engine, VOCAB, oracle(texts(truth), VOCAB), (1,))
    remote.terms = Terms(feature_layers=(1,), features_optional=optional)
    with caplog.at_level("WARNING"):
        remote.connect()
        check_same(run_all(engine, jobs(), 4), truth)
    assert bool(remote.authors or remote.texts) == optional and not remote.messages and not remote.num_begun
    (line,) = [record.getMessage() for record in caplog.records if "features" in record.getMessage()]
    assert "when it drafts inside its rounds" in line


def test_what_both_have_found_is_one_tree_and_accepts_as_much_as_the_better_of_both(
    model: CausalLM, truth: list[Answer], made: Made
) -> None:
    """The drafter inside the round knows two tokens of every text; the draft service twelve, in every second half."""
    greedy = [(job, answer) for job, answer in zip(jobs(), truth, strict=True) if job[1].temperature == 0.0]
    rounds: dict[str, list[int]] = {}
    trees = []
    for case in ("inside", "beside", "both"):
        draft = (Clueless if case == "beside" else WithFeatures)(model)
        engine = start(made, model, draft, growth=Growth(2, 8))
        if case != "inside":
            engine.draft_connected(LocalDraft(engine, VOCAB, half_right(texts(truth))), Terms(sources=("ngram",)))
        for (prompt, sampling), known in greedy:
            answer = Answer()
            engine.submit(make_request(answer, prompt, sampling, VOCAB, trace=True))
            assert answer.done.wait(60) and answer.token_ids == known.token_ids
            rounds.setdefault(case, []).append(sum(bool(update.token_ids) for update in answer.updates))
            trees += [tree for update in answer.updates for tree in update.round_trees if case == "both"]
    for inside, beside, both in zip(rounds["inside"], rounds["beside"], rounds["both"], strict=True):
        assert both <= min(inside, beside)
    assert sum(rounds["both"]) < min(sum(rounds["inside"]), sum(rounds["beside"]))
    assert {name for tree in trees for name in tree.drafter_names} == {"ngram", "test"}
    assert any(len(tree.drafter_names) == 2 for tree in trees)
    for tree in trees:
        assert len(set(zip(tree.parents, tree.token_ids, strict=True))) == len(tree.parents)
        names = [tree.drafter_names[tree.drafters[node]] for node in tree.accepted]
        assert names == sorted(names), "what the draft service had found comes before what grew below it"


def test_masks_of_some_requests_hold_beside_trees_of_others(model: CausalLM, truth: list[Answer], made: Made) -> None:
    words = [list(answer.token_ids[3:5]) for answer in truth]

    def answers(engine: ThreadedEngine) -> list[list[int]]:
        """Two of three requests have a bad word of two tokens, of which masks keep them."""
        found: list[Answer] = []
        for start_at in range(0, len(jobs()), 4):
            batch = list(enumerate(jobs()))[start_at : start_at + 4]
            found += (asked := [Answer() for _ in batch])
            for (number, (prompt, sampling)), answer in zip(batch, asked, strict=True):
                more = {"bad_words": words} if number % 3 else {}
                engine.submit(make_request(answer, prompt, sampling, VOCAB, **more))
            assert all(answer.done.wait(60) for answer in asked)
        return [answer.token_ids for answer in found]

    plain, _ = made_plain = make_paged_engine(model)
    made.append(made_plain)
    plain.start()
    expected = answers(plain)
    assert expected != [answer.token_ids for answer in truth]
    engine = start(made, model, WithFeatures(model), growth=Growth(3, 16))
    engine.draft_connected(LocalDraft(engine, VOCAB, noise(3, VOCAB)), Terms())
    assert answers(engine) == expected
