"""Every round finds in its pages the KV of its own request's tokens, whatever came, ended and gave way before it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest
from examples import examples
from fake_device import VOCAB, FakeDevice, FakeRound, fake_engine
from harness import PAGE_SIZE, Answer, make_request
from local_draft import LocalDraft, chain
from page_integrity import check_memory, check_owners
from threaded_engine import ThreadedEngine

from outrider.sampling.params import SamplingParams
from outrider.tree.author import TreeAuthor
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Growth, Result


def mix(state: int, token: int) -> int:
    """What stands for the KV of a token behind all those before it, whose state is given."""
    return (state * 1_000_003 + token + 7) % (1 << 61)


def states(tokens: Sequence[int]) -> list[int]:
    return list(accumulate(tokens, mix, initial=5))[1:]


def text(tokens: Sequence[int], count: int) -> list[int]:
    """What the fake target generates behind these tokens; each token depends on all before it."""
    answer: list[int] = []
    state = states(tokens)[-1]
    for _ in range(count):
        answer.append((state >> 7) % VOCAB)
        state = mix(state, answer[-1])
    return answer


class KeepingDevice(FakeDevice):
    """Keeps what was written to each slot, in the order of launches, and whom it keeps a row for."""

    def __init__(self, spin: bool, ahead: bool, num_rows: int) -> None:
        super().__init__(spin)
        self.launches_ahead = ahead  # type: ignore[misc]
        self.rows: set[Request] = set()
        self._num_rows = num_rows
        self._kv: dict[int, int | None] = {}
        self._sampled: dict[Request, int] = {}

    def launch(self, entries: Sequence[Entry], growth: Growth | None = None) -> FakeRound:
        self.rows |= {entry.request for entry in entries}
        assert len(self.rows) <= self._num_rows, "more requests than rows"
        return super().launch(entries, growth)

    def forget(self, request: Request) -> None:
        self.rows.discard(request)

    def result(self, entry: Entry) -> Result:
        request, nodes, end = entry.request, entry.nodes, entry.start + entry.num_extend
        tokens = [*request.tokens, self._sampled[request]] if entry.is_ahead else request.tokens
        slots = [page * PAGE_SIZE + at for page in request.pages for at in range(PAGE_SIZE)]
        wanted = states(tokens[:end])
        assert [self._kv.get(slot) for slot in slots[: entry.start]] == wanted[: entry.start], "KV of other tokens"
        self._kv.update(zip(slots[entry.start : end], wanted[entry.start :], strict=True))
        self._kv.update(dict.fromkeys(slots[end : end + len(nodes)]))
        if not entry.samples:
            return Result()
        assert max(nodes.depths, default=0) <= request.draft_room
        below = {pair: node for node, pair in enumerate(zip(nodes.parents, nodes.token_ids, strict=True))}
        sampled: list[int] = []
        node: int | None = -1
        for token in text(tokens, len(nodes) + 1):
            sampled.append(token)
            if (node := below.get((node, token))) is None:
                break
        accepted = states([*tokens, *sampled])[end : end + len(sampled) - 1]
        self._kv.update(zip(slots[end:], accepted, strict=False))
        self._sampled[request] = sampled[-1]
        return Result(sampled)


class Load:
    """Requests of several clients with shared beginnings; some are cancelled, and drafts come and go."""

    def __init__(self, engine: ThreadedEngine, source: random.Random) -> None:
        self.answers: list[tuple[Answer, list[int]]] = []
        self.cancelled: list[Answer] = []
        self.num_left = source.randint(10, 30)
        self._engine = engine
        self._source = source
        self._drafts: list[LocalDraft] = []
        self._prompt: list[int] = []
        self._beginnings = [[source.randrange(VOCAB) for _ in range(60)] for _ in range(2)]

    def ask(self) -> None:
        source, answer = self._source, Answer()
        if not self._prompt or source.random() < 0.7:  # else one more answer to the last prompt
            self._prompt = source.choice(self._beginnings)[: source.randint(0, 60)]
            self._prompt += [source.randrange(VOCAB) for _ in range(source.randint(1, 40))]
        prompt = self._prompt
        max_tokens, stop = source.randint(1, 80), source.randrange(2 * VOCAB)
        fields = {
            "client": source.choice(("one/0", "one/0", "one/1", "two/0", "three/0")),
            "priority": source.choice((0, 0, 1)),
            "speculate": source.random() < 0.7,
            "tenant": source.choice(("", "", "", "another")),
            "skip_prefix_cache": source.random() < 0.2,
            "stop_token_ids": frozenset([stop]),
        }
        answer.request = make_request(answer, prompt, SamplingParams(temperature=0.0), VOCAB, max_tokens, **fields)
        expected = text(prompt, max_tokens)
        self.answers.append((answer, expected[: expected.index(stop) + 1] if stop in expected else expected))
        self.num_left -= 1
        self._engine.submit(answer.request)

    def happen(self) -> None:
        """Something, or nothing, while a round runs."""
        check_owners(self._engine.scheduler)
        source, chance = self._source, self._source.random()
        while self.num_left and source.random() < 0.4:
            self.ask()
        if chance < 0.05:
            self._drafts.append(LocalDraft(self._engine, VOCAB, self._guess))
            self._engine.draft_connected(self._drafts[-1])
        elif chance < 0.08 and self._drafts:
            self._engine.draft_disconnected(self._drafts.pop())
        elif chance < 0.11:
            answer, _ = source.choice(self.answers)
            if not answer.done.is_set():
                self.cancelled.append(answer)
                self._engine.cancel(answer.request)  # type: ignore[arg-type]

    def _guess(self, author: TreeAuthor) -> None:
        right = text(author.tokens, 5)
        chain(author, [token if self._source.random() < 0.8 else 0 for token in right])
        for _ in range(3):
            author.add(self._source.choice(author.live_ids()), self._source.randrange(VOCAB), -1.0, 0)


@pytest.mark.parametrize("seed", range(examples(12)))
def test_pages_hold_what_their_requests_have_said(seed: int) -> None:
    source = random.Random(seed)
    num_rows, ahead, deterministic = source.choice((1, 2, 3, 5)), source.random() < 0.5, source.random() < 0.3
    device = KeepingDevice(source.random() < 0.5, ahead, num_rows)
    limits = {
        "chunk_size": source.choice((4, 7, 16, 64)),
        "max_nodes": source.choice((0, 4, 24)),
        "max_round_tokens": source.choice((1 << 30, num_rows // 2 + 4)),
        "max_extend": 3 if deterministic else 32,
        "root_apart": deterministic or ahead or source.random() < 0.5,
        "deterministic": deterministic,
        "max_running": num_rows,
    }
    num_pages, keep_prefixes = source.choice((56, 64, 90)), source.random() < 0.8
    engine = fake_engine(device, num_pages, 1e-6, keep_prefixes=keep_prefixes, **limits)
    load = Load(engine, source)
    device.during = load.happen
    while load.num_left or engine._active_requests:
        if not engine._active_requests:
            load.ask()
        engine._step()
    engine.stop()
    engine.run()
    for answer, expected in load.answers:
        if any(answer is one for one in load.cancelled):
            expected = expected[: len(answer.token_ids)]
        assert answer.token_ids == expected
        num_cached = [update.cached_prompt_tokens for update in answer.updates]
        assert answer.request is not None and max(num_cached, default=0) < answer.request.prompt_len
    check_memory(engine.memory)
    assert not device.rows and engine.memory.num_used == engine.memory.radix.num_pages, "a row or a page leaked"
