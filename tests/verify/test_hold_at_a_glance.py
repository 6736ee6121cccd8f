"""A round of many requests is not held up by finding out that no wait pays: a glance tells, and says the same."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from scripted_peer import Clock, Recorder, follow, request, tree

from verify_service.speculation.budget import WIDTHS, Budget, Choice, CostModel
from verify_service.speculation.draft_wait import DraftWaitPolicy, DraftWaitState
from verify_service.speculation.drafts import Drafts, SpeculativeRequest

NUM_REQUESTS = 4
events = st.tuples(
    st.integers(0, NUM_REQUESTS - 1),
    st.sampled_from(["hit", "miss", "answer", "part", "nothing"]),
    st.floats(0.0, 0.01),
    st.floats(-3.0, -0.01),
)
"""Which request; what happens to it; how long after the event before; the score of new nodes."""


class LooksClosely(DraftWaitPolicy):
    """Works out every wait, whether or not it may pay."""

    def _is_hopeless(self, awaited: Sequence[DraftWaitState], choice: Choice, now: float) -> bool:
        return False


class History:
    """Requests of two drafts, and what befalls them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._drafts = Drafts(vocab_size=50, max_nodes=64, clock=self.clock)
        for index in range(2):
            self._drafts.connected(Recorder(str(index)))
        self._requests = [request([1, 2]) for _ in range(NUM_REQUESTS)]
        self._epochs, self._nodes = [0] * NUM_REQUESTS, [0] * NUM_REQUESTS
        for one in self._requests:
            self._drafts.admit(one)

    def _spec(self, index: int) -> SpeculativeRequest:
        spec = self._drafts.spec(self._requests[index])
        assert spec is not None
        return spec

    def add(self, index: int, event: str, seconds: float, score: float) -> None:
        self.clock.now += seconds
        one = self._requests[index]
        if event in ("hit", "miss"):
            one.tokens.append(5 if event == "hit" else 40)
            follow(self._drafts, one)
            return
        if event == "answer":
            self._epochs[index], self._nodes[index] = self._epochs[index] + 1, 0
        first, tokens = self._nodes[index] + 1, [] if event == "nothing" else [5]
        self._nodes[index] += len(tokens)
        spec = self._spec(index)
        grow = tree(spec.number, self._epochs[index], one.committed_len, tokens, first, score)
        for port, replica in self._drafts.replicas.items():
            if replica is spec.replica:
                self._drafts.receive(port, [grow], self.clock.now)

    def awaited(self) -> list[DraftWaitState]:
        waits = [self._spec(index).wait for index in range(NUM_REQUESTS)]
        return [wait for wait in waits if wait.expects]


@given(st.lists(events, min_size=1, max_size=12), st.integers(1, 12), st.integers(1, 40), st.floats(1, 60))
def test_a_glance_decides_nothing_else(drawn: list[tuple], times: int, nodes: int, expected: float) -> None:
    history = History()
    budget, choice = Budget(CostModel([0.005] * len(WIDTHS)), 64), Choice(nodes, expected, 0.005, 64)
    for index, event, seconds, score in drawn * times:
        history.add(index, event, seconds, score)
        awaited, now = history.awaited(), history.clock.now
        glanced = DraftWaitPolicy(budget, 0.02).wait_seconds(awaited, NUM_REQUESTS, choice, now=now)
        assert glanced == LooksClosely(budget, 0.02).wait_seconds(awaited, NUM_REQUESTS, choice, now=now)
