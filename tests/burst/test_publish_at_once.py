"""Nodes that are appended to the authors at once are sent as they would be one by one."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from growth_rig import GOES_ON, VOCAB, Rig, continuation

from outrider.config.draft import DraftOptions
from outrider.drafting.model.publisher import NodePublisher
from outrider.protocol.speculation import Grow
from outrider.tree.author import TreeAuthor


class Notes:
    """What was sent, and how often nodes were appended at once."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.num_batches = 0


def publish(monkeypatch: pytest.MonkeyPatch, num_requests: int, seed: int, *, at_once: bool, **shape: int) -> Notes:
    """What a service sends of requests with changing credits, commits, pauses and misses."""
    notes, extend = Notes(), TreeAuthor.extend

    def counted(author: TreeAuthor, *columns: Any) -> int | None:
        first = extend(author, *columns) if at_once else None
        notes.num_batches += first is not None
        return first

    rig, luck = Rig(**shape), random.Random(seed)
    deliver = rig.deliver

    def note() -> None:
        for one in rig.peer.received:
            assert isinstance(one, Grow)
            columns = (one.parents, one.token_ids, one.scores, one.sources)
            notes.sent.append((one.request, one.epoch, one.base_len, one.acked_len, one.first_id, columns))
        deliver()

    with monkeypatch.context() as patch:
        patch.setattr(TreeAuthor, "extend", counted)
        patch.setattr(rig, "deliver", note)
        for number in range(num_requests):
            rig.open(number, [1, 2, 3 + number], credit=luck.choice((8, 24, 300)))
        for _ in range(30):
            number = luck.randrange(num_requests)
            tokens = rig.open_requests[number].tokens
            match luck.randrange(6):
                case 0:
                    rig.commit(number, [luck.randrange(VOCAB)], credit=luck.choice((4, 24, 300)))
                case 1 | 2:
                    rig.commit(number, continuation(tokens, 2, luck), credit=luck.choice((4, 24, 300)))
                case 3:
                    rig.pause(number)
                    rig.turn(wait=False)
                    rig.resume(number, credit=luck.choice((4, 24)))
                case _:
                    rig.turn(wait=luck.random() < 0.5)
        rig.settle()
    for request in rig.open_requests.values():
        request.check()
    return notes


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("shape", [{}, GOES_ON])
def test_verify_is_told_the_same(monkeypatch: pytest.MonkeyPatch, num_requests: int, shape: dict[str, int]) -> None:
    for seed in range(8):
        one, other = (publish(monkeypatch, num_requests, seed, at_once=way, **shape) for way in (True, False))
        assert one.sent == other.sent
        assert one.num_batches and not other.num_batches


@pytest.mark.parametrize("lone", [1, 2])
def test_room_for_one_node_is_not_taken_by_a_likelier_one_of_a_request_without_room(
    monkeypatch: pytest.MonkeyPatch, lone: int
) -> None:
    rig = Rig(**GOES_ON)
    rig.open(1, [1, 2, 3], credit=24)
    rig.open(2, [1, 2, 4], credit=24)
    publisher, checked = rig.growth._publisher, 0
    rows = publisher._forest.entries.rows

    def room_for_one(context: Any) -> tuple[int, int, float]:
        size = int(context.tree.author.request == lone)
        return size, size, math.inf

    monkeypatch.setattr(publisher, "_room", room_for_one)
    monkeypatch.setattr(publisher, "run", lambda *_: None)
    for _ in range(12):
        rig.turn()
        (own,) = [row for row, context in publisher._contexts.items() if context.tree.author.request == lone] or [-1]
        publisher.prepare()
        has_own = own >= 0 and bool((rows[publisher._find(publisher._forest.floor)] == own).any())
        assert rows[publisher._queue].tolist() == [own] * has_own
        checked += has_own
    assert checked


def test_what_is_told_first_is_the_best_and_no_more_than_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(**GOES_ON)
    rig.open(1, [1, 2, 3], credit=300)
    nodes, run, counts = rig.growth._forest.entries.nodes, NodePublisher.run, list[int]()

    def watched(publisher: NodePublisher, *_: Any) -> None:
        for most in (5, 0):
            queue, before = publisher._queue, rig.requests.growth.num_live
            run(publisher, 0.0, lambda: False, most)
            counts.append(rig.requests.growth.num_live - before)
            assert counts[-1] == min(len(queue), most or 64), "it is late already"
            assert (nodes[queue[: counts[-1]]] > 0).all() and (nodes[queue[counts[-1] :]] == -1).all()

    monkeypatch.setattr(NodePublisher, "run", watched)
    rig.settle()
    assert 5 in counts and max(counts) > 5
    rig.open_requests[1].check()


@pytest.mark.parametrize("seed", range(2))
def test_what_waits_to_be_told_and_becomes_a_root_stays_one(seed: int) -> None:
    options = DraftOptions(max_positions=300, min_path_probability=0.0)
    shape = {"num_rows": 8, "max_steps": 32, "max_width": 64, "max_seeds": 512, "num_pages": 1024}
    rig, luck = Rig(options, **GOES_ON | shape), random.Random(seed)
    for number in range(6):  # so many that what is to be sent is not looked over anew for each commit
        rig.open(number, [1, 2, 3, 4, 5, 6, 7 + number], credit=200)
    forest, queue_of, contexts = rig.growth._forest, rig.growth._publisher, rig.growth._batch_manager.rows
    entries, num_commits = forest.entries, 0
    for _ in range(300):
        if rig.growth._active:
            rig.growth._active.pending.ready = luck.random() < 0.5  # type: ignore[attr-defined]
        if not rig.requests.growth.idle:
            rig.requests.growth.grow(0.0 if luck.random() < 0.7 else math.inf, lambda: True)
        rig.requests.send_nodes()
        rig.deliver()
        for row, context in contexts.items():
            author = context.tree.author
            if context.epoch == author.epoch and context.known == author.committed_len:
                assert entries.nodes[forest.roots[row]] == author.root
        if not queue_of.done and luck.random() < 0.5:
            entry = int(luck.choice(queue_of._queue.tolist()))
            context = contexts[int(entries.rows[entry])]
            path: list[int] = []
            while entries.parents[entry] >= 0:
                path.append(int(entries.tokens[entry]))
                entry = int(entries.parents[entry])
            is_tree = entry == forest.roots[context.row] and context.known == context.tree.author.committed_len
            if path and is_tree and context.known < 150:
                rig.commit(context.tree.author.request, path[::-1], credit=200)
                num_commits += 1
    assert num_commits > 3
    for request in rig.open_requests.values():
        request.check()
