"""What a round may hold: prefill, roots, recomputed tokens, nodes; and which pages are anybody's."""

from __future__ import annotations

import threading

import pytest
from fake_device import VOCAB, FakeDevice, count_up, fake_engine, submit
from harness import Answer, make_request
from local_draft import LocalDraft, chain
from page_integrity import check_memory
from threaded_engine import ThreadedEngine

from outrider.cache.pages import RadixCache
from outrider.sampling.params import SamplingParams
from outrider.tree.author import TreeAuthor
from verify_service.engine.memory import Memory
from verify_service.engine.request import Request


def rounds_of(device: FakeDevice, request: Request) -> list[tuple[int, int]]:
    """Extension and nodes of each round that a request took part in."""
    return [(extend, nodes) for entries in device.rounds for one, extend, nodes in entries if one is request]


def run(engine: ThreadedEngine, *answers: Answer) -> None:
    engine.start()
    assert all(answer.done.wait(10) for answer in answers)
    engine.stop()


def test_chunks_reach_the_root_or_stop_before_it() -> None:
    for root_apart, expected in ((False, [4, 4, 2, 1]), (True, [4, 4, 1, 1, 1])):
        device = FakeDevice()
        engine = fake_engine(device, chunk_size=4, root_apart=root_apart)
        answer = submit(engine, prompt_len=10, max_tokens=2)
        run(engine, answer)
        assert [extend for extend, _ in rounds_of(device, answer.request)] == expected


def test_a_prompt_is_cut_the_same_way_whatever_runs_beside_it() -> None:
    device = FakeDevice()
    engine = fake_engine(device, chunk_size=8)
    prompts = submit(engine, 13, 2), submit(engine, 6, 2), submit(engine, 3, 2), submit(engine, 9, 2)
    run(engine, *prompts)
    found = [[extend for extend, _ in rounds_of(device, answer.request)] for answer in prompts]
    assert found == [[8, 5, 1], [6, 1], [3, 1], [8, 1, 1]]
    sizes = [sum(extend for _, extend, _ in entries if extend > 1) for entries in device.rounds]
    assert max(sizes) <= 8


def test_a_prompt_s_end_cuts_what_is_computed_again_after_a_preemption() -> None:
    device = FakeDevice()
    engine = fake_engine(device, num_pages=9, keep_prefixes=False, chunk_size=16, max_nodes=0)
    old, young = submit(engine, 6, max_tokens=16), submit(engine, 6, max_tokens=16)
    run(engine, old, young)
    assert engine.scheduler.num_preemptions == 1
    extends = [extend for extend, _ in rounds_of(device, young.request)]
    again = extends.index(6, 1)
    assert extends[again : again + 2] == [6, again]


@pytest.mark.parametrize("keep_prefixes", [True, False])
def test_prompts_that_memory_has_no_room_for_together_are_computed_once(keep_prefixes: bool) -> None:
    # All of them find free pages when they come, before any prompt has taken its own.
    device = FakeDevice()
    engine = fake_engine(device, num_pages=64, keep_prefixes=keep_prefixes, chunk_size=16, root_apart=True, max_nodes=0)
    lengths = [180, 60, 140, 100, 20] * 3
    answers = [submit(engine, length, max_tokens=4, skip_prefix_cache=True) for length in lengths]
    run(engine, *answers)
    assert engine.scheduler.num_preemptions == 0
    extends = [sum(extend for extend, _ in rounds_of(device, answer.request)) for answer in answers]
    assert extends == [length + 3 for length in lengths]


@pytest.mark.parametrize("skips_cache", [False, True])
def test_pages_of_a_prefix_that_requests_share_are_asked_for_once(skips_cache: bool) -> None:
    device = FakeDevice()
    engine = fake_engine(device, num_pages=64, root_apart=True, max_nodes=0)
    first = submit(engine, 160, max_tokens=1)
    engine.start()
    assert first.done.wait(10)
    all_are_here = threading.Event()

    def wait_for_all() -> None:
        assert all_are_here.wait(10)

    device.during = wait_for_all
    # 41 pages each, 39 of which the cache has.
    late = [submit(engine, 160, max_tokens=4, skip_prefix_cache=skips_cache) for _ in range(6)]
    all_are_here.set()
    assert all(answer.done.wait(10) for answer in late)
    engine.stop()
    assert max(map(len, device.rounds)) == (1 if skips_cache else 6)
    assert engine.scheduler.num_preemptions == 0
    check_memory(engine.memory)


@pytest.mark.parametrize("used", [True, False])
def test_a_prefix_is_looked_for_once_while_no_pages_come_back_and_only_where_some_are_used(
    used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    find = RadixCache.num_held
    monkeypatch.setattr(
        RadixCache, "num_held", lambda cache, *given, **named: looked.append(1) or find(cache, *given, **named)
    )
    device = FakeDevice()
    engine = fake_engine(device, num_pages=64, root_apart=True, max_nodes=0)
    first = submit(engine, 160, max_tokens=1)
    while not first.done.is_set():
        engine._step()
    # What the first one left is another tenant's to the one that waits.
    long = submit(engine, 160, max_tokens=60, skip_prefix_cache=not used)
    beside = [submit(engine, 3, max_tokens=6 + count, skip_prefix_cache=True) for count in range(0 if used else 3)]
    waiting = submit(engine, 160, max_tokens=4, tenant="another")
    while not waiting.done.is_set():
        engine._step()
    assert all(answer.done.is_set() for answer in (long, *beside))
    assert len(device.rounds) > 60
    assert len(looked) == used


def test_running_requests_go_on_beside_the_prefill_of_another() -> None:
    device = FakeDevice()
    engine = fake_engine(device, chunk_size=4, root_apart=True)
    first = submit(engine, prompt_len=2, max_tokens=12)
    late: list[Answer] = []

    def come() -> None:
        if len(device.rounds) == 3:
            late.append(submit(engine, prompt_len=17, max_tokens=2))

    device.during = come
    run(engine, first)
    assert [extend for extend, _ in rounds_of(device, late[0].request)] == [4, 4, 4, 4, 1, 1]
    assert all(len(entries) == 2 for entries in device.rounds[3:9])


def test_generated_tokens_are_recomputed_beside_roots_after_a_preemption() -> None:
    device = FakeDevice()
    limits = {"root_apart": True, "deterministic": True, "max_extend": 3, "chunk_size": 16, "max_nodes": 0}
    engine = fake_engine(device, num_pages=9, keep_prefixes=False, **limits)
    old, young = submit(engine, 6, max_tokens=16), submit(engine, 6, max_tokens=16)
    run(engine, old, young)
    assert engine.scheduler.num_preemptions == 1
    assert young.token_ids == [count_up(position) for position in range(6, 22)]
    extends = [extend for extend, _ in rounds_of(device, young.request)]
    again = extends.index(5, 1)
    num_generated = again - 1
    assert extends[:again] == [5] + [1] * num_generated
    # Five tokens of the prompt as a chunk; then its last one and what was generated, three at a time; then on.
    recomputed = [min(3, num_generated + 1 - done) for done in range(0, num_generated + 1, 3)]
    assert num_generated > 3 and extends[again:] == [5, *recomputed] + [1] * (16 - num_generated - 1)


def test_requests_take_turns_where_a_round_has_room_for_few() -> None:
    device = FakeDevice()
    engine = fake_engine(device, max_round_tokens=2, root_apart=True, max_nodes=0)
    answers = [submit(engine, max_tokens=6) for _ in range(5)]
    run(engine, *answers)
    decode = [[one for one, extend, _ in entries if extend == 1] for entries in device.rounds[1:]]
    assert max(map(len, decode)) == 2
    shares = [[entries.count(answer.request) for entries in decode[:10]] for answer in answers]
    assert {sum(share) for share in shares} == {4}, "ten rounds of two are four for each of five"


def test_nodes_keep_to_what_a_round_can_hold() -> None:
    device = FakeDevice()
    engine = fake_engine(device, max_round_tokens=6, max_depth=3)

    def guess(author: TreeAuthor) -> None:
        chain(author, [count_up(author.committed_len + ahead) for ahead in range(8)])

    engine.draft_connected(LocalDraft(engine, VOCAB, guess))
    answers = [submit(engine, max_tokens=30), submit(engine, max_tokens=50)]
    run(engine, *answers)
    totals = [sum(extend + nodes for _, extend, nodes in entries) for entries in device.rounds[1:]]
    assert max(totals) == 6
    assert max(nodes for entries in device.rounds for _, _, nodes in entries) == 3
    for answer in answers:
        assert answer.token_ids == [count_up(3 + index) for index in range(len(answer.token_ids))]


@pytest.mark.parametrize(("share", "pages"), [(True, 3), (False, 2)])
def test_generated_tokens_are_shared_or_not(share: bool, pages: int) -> None:
    memory = Memory(16, 4, share_generated=share)
    tokens = list(range(9))

    def request(tokens: list[int], prompt_len: int) -> Request:
        made = make_request(Answer(), tokens, SamplingParams(), VOCAB)
        made.prompt_len = prompt_len
        return made

    first = request(tokens, 9)
    memory.attach(first)
    assert memory.reserve(first, 13)
    first.tokens += [40, 41, 42, 43]
    first.cached_len = 12
    memory.release(first)
    assert memory.radix.num_pages == pages
    for prompt_len, found in ((13, pages), (6, 3 if share else 1)):
        again = request([*tokens, 40, 41, 42, 43], prompt_len)
        memory.attach(again)
        assert len(again.pages) == found and again.cached_len == 4 * found
        memory.pool.release(again.pages)


def test_a_round_that_only_decodes_is_laid_out_as_any_other() -> None:
    device = FakeDevice()
    engine = fake_engine(device, num_pages=32, root_apart=True, max_round_tokens=3)
    scheduler, seen = engine.scheduler, []

    def compare() -> None:
        running = scheduler.running
        plain = scheduler._plain_round()
        if plain:
            assert [(one.request, one.num_extend) for one in scheduler._general_round()] == [
                (one, 1) for one in running
            ]
        seen.append((len(running), bool(plain)))

    device.during = compare
    answers = [submit(engine, prompt_len, max_tokens=9) for prompt_len in (1, 6, 9)]
    run(engine, *answers)
    assert (3, True) in seen and (3, False) in seen
    assert not scheduler._plain_round(), "nobody runs"
