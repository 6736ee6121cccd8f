"""A grower that only finds nodes: pauses, credit, memory, refusals and what verify is told are not its own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from draft_fakes import VOCAB, RecordingPort, ScriptedDrafter, commit_message, open_message

from outrider.config.draft import DraftOptions
from outrider.drafting import requests as requests_module
from outrider.drafting.base import AnyDrafter
from outrider.drafting.node_grower import NodeGrower
from outrider.drafting.requests import Requests
from outrider.drafting.tree_growth import Grower, Refusal, Tree, TreeGrowth, TreeLimits
from outrider.protocol.speculation import Decline, DeclineReason, Pause, Resume


class ChainGrower(Grower):
    """Counts upwards below the root for as long as more nodes may be appended."""

    def __init__(self, growth: TreeGrowth, limits: TreeLimits) -> None:
        super().__init__(growth, limits)
        self.tips: dict[Tree, int] = {}
        self._todo: set[Tree] = set()

    @property
    def idle(self) -> bool:
        return not self._todo

    def open(self, tree: Tree) -> None:
        self.tips[tree] = 0
        self._todo.add(tree)

    def follow(self, tree: Tree, known: int, *, missed: bool) -> None:
        if not tree.author.is_live(self.tips[tree]) or missed:
            self.tips[tree] = tree.author.root

    def changed(self, tree: Tree) -> None:
        self._todo.add(tree)

    def close(self, tree: Tree) -> None:
        del self.tips[tree]
        self._todo.discard(tree)

    def grow(self, deadline: float, interrupted: Callable[[], bool], *, wait: bool = True) -> None:
        for tree in self._todo:
            author = tree.author
            while author.num_live < self.growth.most_nodes(tree, self.limits) and self.growth.has_memory:
                token = (author.node(self.tips[tree]).token + 1) % VOCAB
                added = self.growth.append(tree, self.tips[tree], token, -0.1, self.limits.sources.start)
                if added is None:
                    break
                self.tips[tree] = added
        self._todo.clear()


def serve(monkeypatch: pytest.MonkeyPatch, num_growers: int = 1, max_nodes: int = 1000) -> Requests:
    def build(drafter: AnyDrafter, options: DraftOptions) -> TreeGrowth:
        growth = TreeGrowth(max_nodes)
        for number in range(num_growers):
            ChainGrower(growth, TreeLimits(1000, 48, -math.inf, range(number, number + 1), shared=num_growers > 1))
        return growth

    monkeypatch.setattr(requests_module, "build_growth", build)
    return Requests(ScriptedDrafter(), DraftOptions())


def turn(requests: Requests) -> None:
    requests.growth.grow(math.inf, lambda: False)
    requests.send_nodes()


def test_no_more_is_appended_than_there_is_credit_for(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, peer = serve(monkeypatch), RecordingPort()
    requests.handle(peer, open_message([5, 6], credit=7))
    turn(requests)
    assert [grow.token_ids for grow in peer.grows()] == [[7, 8, 9, 10, 11, 12, 13]]
    requests.handle(peer, commit_message(2, [7, 8], credit=9))
    turn(requests)
    (grow,) = peer.grows()
    assert (grow.acked_len, requests.growth.num_live) == (4, 9)


def test_nothing_grows_while_a_tree_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, peer = serve(monkeypatch), RecordingPort()
    requests.handle(peer, open_message([5, 6], credit=7))
    requests.handle(peer, Pause(1))
    turn(requests)
    assert [len(grow.token_ids) for grow in peer.grows()] == [0]
    requests.handle(peer, Resume(1, credit=3))
    turn(requests)
    assert [len(grow.token_ids) for grow in peer.grows()] == [3]


def test_memory_is_shared_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, peer = serve(monkeypatch, max_nodes=20), RecordingPort()
    for number in (1, 2):
        requests.handle(peer, open_message([5, 6], request=number, credit=30))
    turn(requests)
    assert {grow.request: len(grow.token_ids) for grow in peer.grows()} == {1: 10, 2: 10}


@pytest.mark.parametrize("shared", [True, False])
def test_beside_another_grower_a_drafter_is_asked_about_few_nodes_of_many_requests(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    drafter = ScriptedDrafter(lambda node: {VOCAB - 1: 0.6, VOCAB - 2: 0.3})

    def build(_: AnyDrafter, options: DraftOptions) -> TreeGrowth:
        growth = TreeGrowth(10000)
        if shared:
            ChainGrower(growth, TreeLimits(20, 48, -math.inf, range(1), shared=True))
        NodeGrower(drafter, growth, TreeLimits(1000, 48, -math.inf, range(1, 2), shared=shared))
        return growth

    monkeypatch.setattr(requests_module, "build_growth", build)
    requests, peer, numbers = Requests(drafter, DraftOptions()), RecordingPort(), range(1, 9)
    for number in numbers:
        requests.handle(peer, open_message([5, 6], request=number, credit=900 if shared else 100))
    lengths, asked = dict.fromkeys(numbers, 2), []
    for _ in range(12):
        drafter.asked.clear()
        while not requests.growth.idle:
            turn(requests)
        asked.append(len(drafter.asked))
        authors = {tree.handle: tree.author for tree in requests._trees.values()}
        roots = {node.request for node in drafter.asked if node.parent == -1}
        assert roots == set(authors)
        # What it said is in the trees, also what it said last.
        for node in drafter.asked if shared else ():
            assert VOCAB - 1 in authors[node.request].children(node.node)
        for number in numbers:
            requests.handle(peer, commit_message(lengths[number], [7], request=number, credit=900 if shared else 100))
            lengths[number] += 1
    if shared:
        assert all(8 <= count <= 32 for count in asked[1:])
    else:
        assert min(asked) > 100


@pytest.mark.parametrize("num_growers", [1, 2])
def test_a_tree_is_declined_when_nothing_grows_it_any_more(monkeypatch: pytest.MonkeyPatch, num_growers: int) -> None:
    requests, peer = serve(monkeypatch, num_growers), RecordingPort()
    requests.handle(peer, open_message([5, 6]))
    growers = requests.growth.growers
    for number, grower in enumerate(growers):
        (tree,) = grower.tips  # type: ignore[attr-defined]
        requests.growth.refuse(grower, tree, Refusal(DeclineReason.OVERLOADED, "full"))
        assert requests.growth.has_updates
        turn(requests)
        declined = [message.reason for message in peer.take() if isinstance(message, Decline)]
        assert declined == [DeclineReason.OVERLOADED] * (number == num_growers - 1)
    assert not len(requests) and not requests.growth.num_live
