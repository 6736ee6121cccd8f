"""Whatever verify may do to a draft service, as steps that hypothesis strings together."""

from __future__ import annotations

from growth_rig import Rig, continuation
from hypothesis import strategies as st

steps = st.one_of(
    st.tuples(st.just("turn"), st.booleans()),
    st.tuples(st.just("open"), st.integers(1, 40)),
    st.tuples(st.just("commit"), st.integers(0, 9), st.integers(1, 4), st.integers(0, 40)),
    st.tuples(st.just("miss"), st.integers(0, 9), st.lists(st.integers(0, 39), min_size=1, max_size=12)),
    st.tuples(st.sampled_from(["stale", "gap", "pause", "resume", "close"]), st.integers(0, 9)),
    st.tuples(st.just("slow"), st.booleans()),
    st.tuples(st.just("lose")),
    st.tuples(st.just("detach")),
)


def act(rig: Rig, number: int, step: tuple) -> None:
    numbers = sorted(rig.open_requests)
    if step[0] == "turn":
        rig.turn(wait=step[1])
    elif step[0] == "open":
        rig.open(number, [1, *range(2, 1 + step[1])])
    elif step[0] == "slow":
        rig.runner.auto_ready = not step[1]
    elif step[0] == "lose":
        rig.requests.send_nodes()
        rig.peer.received.clear()
    elif step[0] == "detach":
        rig.requests.detach(rig.peer)
        rig.open_requests.clear()
    elif numbers:
        which = numbers[step[1] % len(numbers)]
        request = rig.open_requests[which]
        match step:
            case ("commit", _, count, credit):
                rig.commit(which, continuation(request.tokens, count), credit)
            case ("miss", _, tokens):
                rig.commit(which, tokens)
            case ("stale", _):
                tokens = request.tokens[-1:]
                del request.tokens[-1:]
                rig.commit(which, tokens)
            case ("gap", _):
                held = request.tokens[:]
                request.tokens += [1, 2]
                rig.commit(which, [3])
                request.tokens[:] = held
                rig.close(which)
            case ("pause", _):
                rig.pause(which)
            case ("resume", _):
                rig.resume(which)
            case ("close", _):
                rig.close(which)
    for request in rig.open_requests.values():
        request.check()
