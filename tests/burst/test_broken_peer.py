"""A peer that sends what makes no sense, past a door that would have dropped some of it, harms no other's requests."""

from __future__ import annotations

import pytest
from examples import examples
from growth_rig import GOES_ON, GREEDY, VOCAB, Peer, Rig, continuation
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config.draft import DraftOptions
from outrider.drafting.ngram.drafter import NgramDrafter
from outrider.protocol.speculation import Close, Commit, Open, Pause, Resume, VerifyMessage

wild = st.sampled_from([0, 1, -1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, -(2**31)])
number = st.integers(0, 60) | wild
requests = st.integers(1, 3) | wild
tokens = st.lists(st.integers(0, VOCAB - 1) | wild, max_size=40) | st.lists(st.integers(0, VOCAB - 1), min_size=1)
messages = st.one_of(
    st.builds(Open, requests, tokens, number, st.just(GREEDY), number, st.text(max_size=3)),
    st.builds(Commit, requests, number, tokens, number, number, st.none() | number, number),
    st.builds(Pause, requests),
    st.builds(Resume, requests, number),
    st.builds(Close, requests),
)
steps = st.lists(messages | st.integers(1, 30) | st.booleans(), max_size=60)
"""What it sends; an open of a prompt that long, which makes sense; and turns, which may wait for the device."""


def send(rig: Rig, peer: Peer, message: VerifyMessage) -> None:
    """As the engine has it applied."""
    try:
        rig.requests.handle(peer, message)
    except (ValueError, TypeError):
        rig.requests.fail(peer, message)


@pytest.mark.parametrize("shape", [{}, GOES_ON], ids=["one part", "goes on"])
@pytest.mark.parametrize("beside", [False, True], ids=["a model", "beside n-grams"])
@settings(max_examples=examples(25))
@given(trace=steps)
def test_whatever_a_peer_says_others_are_served_and_nothing_of_it_is_left(
    shape: dict[str, int], beside: bool, trace: list[VerifyMessage | int | bool]
) -> None:
    rig = Rig(DraftOptions(max_positions=200), NgramDrafter(DraftOptions()) if beside else None, **shape)
    broken, request = Peer(), rig.open(9, [1, 2, 3])
    for step in trace:
        if isinstance(step, bool):
            rig.turn(wait=step)
            request.check()
        elif isinstance(step, int):
            send(rig, broken, Open(step % 3 + 1, [1] * step, 1, GREEDY, 24))
            rig.commit(9, continuation(request.tokens, 1))
        else:
            send(rig, broken, step)
    rig.requests.detach(broken)
    rig.commit(9, continuation(request.tokens, 1))
    rig.settle()
    assert 9 in rig.open_requests and request.held() and request.mirror.acked_len == len(request.tokens)
    request.check()
    rig.close(9)
    rig.requests.growth.work(float("inf"))
    rig.settle()
    if not rig.growth._active:
        rig.growth._apply()
    rig.check_nothing_left()
