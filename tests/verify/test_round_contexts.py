"""What a drafter inside rounds sees of long contexts: their first tokens and their last ones."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from cuda_harness import VOCAB, make_paged_engine
from harness import run_all, tokens
from torch import Tensor

from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.attention.paged import PagedBatch
from outrider.cache.kv import KVCache
from outrider.drafting.model.context import WHOLE, cut_context, num_sink_pages
from outrider.models.decoder import CausalLM
from outrider.models.drafters.config import ALL_SEEN, MIN_SINKS, ContextWindow
from outrider.models.drafters.heads import StandaloneDraft
from outrider.sampling.params import SamplingParams
from verify_service.engine.round import Growth

WINDOW = ContextWindow(24)


class Seen(NamedTuple):
    """The context of a row in a forward, place by place."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]


class Ledger(StandaloneDraft):
    """Writes down in its KV what each place is given, and notes what forwards find there. It knows the texts."""

    def __init__(self, model: CausalLM, texts: list[list[int]]) -> None:
        super().__init__(model, "")
        self.window = WINDOW
        self.num_layers = self.num_heads = self.num_kv_heads = 1
        self.head_dim = self.hidden_size = self.feature_size = model.config.hidden_size
        self.feature_layers = (0,)
        """Embeddings of the tokens."""
        self.seen: set[Seen] = set()
        self.num_wrong = self.num_apart = 0
        """Features that are not the token's before; tokens computed apart from what a round committed, but for the
        first ones of contexts that are cut."""
        self._next = {
            (token, place): after
            for text in texts
            for place, (token, after) in enumerate(zip(text, [*text[1:], 0], strict=True))
        }

    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(batch, PagedBatch) and features is not None
        there = batch.slots >= 0
        inputs = torch.stack((batch.token_ids, batch.positions), 1)[there]
        kv.k_layers[0][batch.slots[there].long(), 0, :2] = inputs.float()
        kv.v_layers[0][batch.slots[there].long(), 0] = features[there]
        self._note_contexts(batch, kv)
        if batch.mask is None:
            are_first = (batch.cached_len == 0) & (batch.positions[batch.first[:-1].clamp(max=len(there) - 1)] > 0)
            self.num_apart += int(there.sum()) - int(batch.first.diff()[are_first].sum())
        ids = [
            self._next.get((token, position + 1), 0)
            for token, position in zip(batch.token_ids.tolist(), batch.positions.tolist(), strict=True)
        ]
        return torch.tensor(ids).float().unsqueeze(1), features

    def logits(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(rows[:, 0].long(), VOCAB) * 20.0

    def _note_contexts(self, batch: PagedBatch, kv: KVCache) -> None:
        first = batch.first.tolist()
        for row, (table, length) in enumerate(zip(batch.table_rows.tolist(), batch.cached_len.tolist(), strict=True)):
            own = first[row + 1] - first[row]
            if not own or int(batch.slots[first[row]]) < 0:
                continue
            # Tree slots are no context.
            places = torch.arange(length + (own if batch.region_base is None else 0))
            pages = batch.page_tables[table, places // batch.page_size].long()
            slots = pages * batch.page_size + places % batch.page_size
            token_ids, positions = kv.k_layers[0][slots, 0, :2].int().T.tolist()
            self.seen.add(Seen(tuple(token_ids), tuple(positions)))
            self._check_features(token_ids, positions, kv.v_layers[0][slots, 0])

    def _check_features(self, token_ids: list[int], positions: list[int], features: Tensor) -> None:
        """Each place but the first, and but that behind a gap, has the feature of the token before its own."""
        gap = positions[0] if positions else 0
        sinks = num_sink_pages(WINDOW, self.page_size) * self.page_size if gap else 0
        wanted = self.model.embedding[torch.tensor(token_ids[:-1], dtype=torch.long)]
        wrong = (features[1:] - wanted).abs().amax(1) > 1e-5
        self.num_wrong += sum(bool(one) for place, one in enumerate(wrong, 1) if place != sinks)

    page_size = 0


@pytest.mark.parametrize(("page_size", "num_pages", "width"), [(2, 1024, 3), (4, 86, 4)])
def test_contexts_are_the_first_tokens_and_the_last(
    model: CausalLM, page_size: int, num_pages: int, width: int
) -> None:
    source = random.Random(page_size)
    shared = [source.randrange(VOCAB) for _ in range(70)]
    prompts = [[source.randrange(VOCAB) for _ in range(size)] for size in (12, 90, 30, 60, 110, 5, 75, 40)]
    prompts = [shared[: 70 * (place % 2)] + prompt for place, prompt in enumerate(prompts)]
    asked = [(prompt, SamplingParams(temperature=0.0)) for prompt in prompts]
    plain, _ = make_paged_engine(model, num_pages=1024, page_size=page_size)
    plain.start()
    truth = tokens(run_all(plain, asked, 4, max_tokens=40))
    plain.stop()

    texts = [prompt + answer for prompt, answer in zip(prompts, truth, strict=True)]
    draft = Ledger(model, texts)
    draft.page_size = page_size
    engine, executor = make_paged_engine(
        model, num_pages=num_pages, page_size=page_size, draft=draft, growth=Growth(3, 12)
    )
    engine.start()
    answers = run_all(engine, asked, width, max_tokens=40)
    engine.stop()

    assert tokens(answers) == truth
    assert executor.drafts is not None and not executor.drafts.failed
    assert sum(answer.num_accepted for answer in answers) > 0.3 * sum(map(len, truth))
    assert draft.num_wrong == 0
    gaps = [check_seen(seen, texts, page_size) for seen in draft.seen]
    assert max(gaps) > 100 and len(set(gaps)) > 6 and gaps.count(0) > 6
    if num_pages == 86:
        assert engine.scheduler.num_preemptions > 0
    if page_size == 2:
        # What is left out is not computed, and what is seen is once.
        assert draft.num_apart <= sum(min(len(prompt), 2 * WINDOW.size) for prompt in prompts)


def check_seen(seen: Seen, texts: list[list[int]], page_size: int) -> int:
    """What a forward found is a text as it is, or cut; returns how much is left out."""
    length, gap = len(seen.tokens), seen.positions[0]
    assert seen.positions == tuple(range(gap, gap + length))
    assert length <= 2 * max(WINDOW.size, page_size) + page_size + 8
    # Of a token at position p KV lies at p - 1.
    sinks = num_sink_pages(WINDOW, page_size) * page_size if gap else 0
    wanted = [(*text[1 : sinks + 1], *text[1 + sinks + gap : 1 + gap + length]) for text in texts]
    assert seen.tokens in wanted
    return gap


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_context_is_cut_once_in_a_window(page_size: int) -> None:
    cut, cuts, window = WHOLE, 0, ContextWindow(100)
    for length in range(1, 2000):
        found = cut_context(cut, length, window, page_size)
        left = length - found.gap
        if found != cut:
            cuts += 1
            assert found.sinks >= MIN_SINKS and found.gap % page_size == 0 == found.sinks % page_size
            assert 0 <= left - found.sinks - max(window.size, found.sinks) < page_size
        # With large pages nothing can be left out of a little more than a window.
        room = page_size + num_sink_pages(window, page_size) * page_size
        assert left <= max((2 if found.gap else 1.5) * window.size, window.size + room)
        cut = found
    assert 2 <= cuts <= 2000 // (100 - 16 - page_size if page_size < 64 else 20)
    assert cut_context(WHOLE, 5000, ALL_SEEN, page_size) is WHOLE
