"""A model's guesses that a grammar or the vocabulary forbids are neither sent nor drafted on."""

from __future__ import annotations

import math

from growth_rig import Rig, scripted

from outrider.config.draft import DraftOptions


def allowed(token: int) -> bool:
    return token % 3 != 0


class Thirds:
    """Allows what `allowed` does, everywhere."""

    def allows(self, parent: int, token: int) -> bool:
        return allowed(token)

    def forced(self, parent: int) -> int | None:
        return None


def restrict(rig: Rig) -> None:
    for tree in rig.requests._trees.values():
        tree.author.guide = Thirds()


def legal_paths(tokens: list[int], floor: float, depth: int) -> set[tuple[int, ...]]:
    """What the model knows below a root without a forbidden token on the way."""
    found: set[tuple[int, ...]] = set()
    pool: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for above, path in pool:
        for token, score in scripted((*tokens, *path)):
            if allowed(token) and above + score >= floor and len(path) < depth:
                found.add((*path, token))
                pool.append((above + score, (*path, token)))
    return found


def test_forbidden_guesses_are_not_sent_and_take_nobodys_place() -> None:
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.05, speculative_num_steps=4))
    request = rig.open(1, [1, 2, 3], credit=60)
    restrict(rig)
    rig.settle()
    request.check()
    want = legal_paths(request.tokens, math.log(0.05), 4)
    assert 3 < len(want) < 30
    assert request.held().keys() == want


def test_guesses_that_the_targets_vocabulary_lacks_take_nobodys_place() -> None:
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.001))
    rig.peer.vocab_size = 33
    request = rig.open(1, [1, 2, 3], credit=24)
    rig.settle()
    request.check()
    assert len(request.held()) == 24
    assert all(token < 33 for path in request.held() for token in path)


def test_nothing_is_drafted_below_a_guess_that_is_known_to_be_forbidden() -> None:
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.001))
    rig.open(1, [1, 2, 3], credit=24)
    restrict(rig)
    rig.settle()
    forest = rig.growth._forest
    entries, count = forest.entries, forest.entries.count
    refused = {entry for entry in range(count) if entries.nodes[entry] == -2}
    assert refused
    assert not any(entries.ranks[entry] > -math.inf for entry in refused)


def test_commits_are_followed_as_ever() -> None:
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.01))
    request = rig.open(1, [1, 2, 3], credit=40)
    restrict(rig)
    rig.settle()
    for _ in range(6):
        best = max(request.held().items(), key=lambda item: item[1], default=None)
        rig.commit(1, best[0] if best is not None else [1])
        rig.settle()
        request.check()
        assert all(allowed(token) for path in request.held() for token in path)
    rig.close(1)
    rig.settle()
    rig.check_nothing_left()
