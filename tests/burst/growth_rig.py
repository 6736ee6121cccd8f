"""Requests of a draft service whose model is scripted, and verify's side of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from integrity import check_forest, check_slots
from mirror_integrity import check_mirror
from page_integrity import check_pages
from scripted_rows import Guesses, features_message
from scripted_runner import ScriptedRunner

from outrider.config.draft import DraftOptions
from outrider.drafting.base import AnyDrafter, CombinedDrafter, Needs
from outrider.drafting.model.burst import BurstShape
from outrider.drafting.model.burst_grower import BurstGrower
from outrider.drafting.model.drafter import ModelDrafter
from outrider.drafting.requests import Requests
from outrider.protocol.speculation import Close, Commit, Decline, DeclineReason, DraftMessage, Grow, Open, Pause, Resume
from outrider.sampling.params import SamplingParams
from outrider.tree.mirror import TreeMirror

VOCAB = 40
GREEDY = SamplingParams(temperature=0.0)


def shape(**changes: int) -> BurstShape:
    figures = {
        "num_rows": 4, "region": 64, "branching": 3, "max_seeds": 64, "max_steps": 4, "max_width": 16, "page_size": 4,
        "num_pages": 256, "max_context": 400, "feature_size": 0,
    } | changes  # fmt: skip
    return BurstShape(**figures)


def scripted(path: tuple[int, ...]) -> Guesses:
    """Three guesses that depend on every token of the path."""
    draw = random.Random(hash(path))
    tokens = draw.sample(range(VOCAB), 3)
    best = draw.uniform(0.45, 0.9)
    chances = (best, (1 - best) * 0.6, (1 - best) * 0.3)
    return [(token, float(np.float32(math.log(chance)))) for token, chance in zip(tokens, chances, strict=True)]


def continuation(tokens: Sequence[int], length: int, pick: random.Random | None = None) -> list[int]:
    """What a target commits that mostly agrees with the scripted model."""
    path = list(tokens)
    for _ in range(length):
        guesses = scripted(tuple(path))
        place = 0 if pick is None else pick.choices((0, 1, 2, 3), (6, 2, 1, 1))[0]
        path.append(guesses[place][0] if place < 3 else (guesses[0][0] + 7) % VOCAB)
    return path[len(tokens) :]


def path_scores(held: dict[tuple[int, ...], float]) -> list[float]:
    """Path scores of nodes that are given with their edge scores, the best first."""
    return sorted((sum(held[path[: end + 1]] for end in range(len(path))) for path in held), reverse=True)


GOES_ON = {"region": 256, "max_steps": 8}
"""Of a shape: the runner is a GPU's, so that bursts go on while nothing waits for their end."""


class Peer:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.vocab_size = VOCAB
        self.parts: frozenset[int] | None = None
        self.received: list[DraftMessage] = []

    def send(self, messages: Sequence[DraftMessage]) -> None:
        self.received.extend(messages)


class Verify:
    """One request as verify sees it: its tokens and its mirror. Checks every node against the scripted model."""

    def __init__(self, number: int, tokens: list[int]) -> None:
        self.number = number
        self.tokens = tokens
        self.mirror = TreeMirror(tokens, VOCAB, 256)
        self.declined: DeclineReason | None = None
        self.closed = False

    def take(self, message: DraftMessage) -> None:
        if isinstance(message, Decline):
            self.declined = message.reason
        elif isinstance(message, Grow):
            self.mirror.insert(message)

    def held(self) -> dict[tuple[int, ...], float]:
        """Paths from the root of what the mirror holds, and their edge scores."""
        mirror, held = self.mirror, {}
        if mirror.num_unresolved:
            return {}
        paths: dict[int, tuple[int, ...]] = {mirror.root: ()}
        for slot in mirror.descend():
            paths[slot] = (*paths[mirror.parents[slot]], mirror.token_ids[slot])
            held[paths[slot]] = mirror.scores[slot]
        return held

    def held_sources(self) -> list[int]:
        """Who found the nodes that the mirror holds, in the order of `held`."""
        return [self.mirror.sources[slot] for slot in self.mirror.descend()]

    def check(self, sources: tuple[int, ...] = (0,)) -> None:
        """Nodes of these sources are what the model says after their path."""
        check_mirror(self.mirror)
        held = self.held()
        # Without a resolved root nothing is held.
        for (path, score), source in zip(held.items(), self.held_sources() if held else (), strict=True):
            if source in sources:
                guesses = dict(scripted((*self.tokens, *path[:-1])))
                assert guesses[path[-1]] == score, (path, score)


class Rig:
    """A service's requests and what verify knows of them."""

    def __init__(
        self,
        options: DraftOptions | None = None,
        partner: AnyDrafter | None = None,
        vocab_size: int = VOCAB,
        **changes: int,
    ) -> None:
        """`vocab_size`: of the model."""
        self.runner = ScriptedRunner(scripted, shape(**changes), first_token=1)
        options = options or DraftOptions(max_positions=300)
        # A small region stands for a GPU's: trees grow ahead.
        is_small = options.draft_ahead == "auto" and self.runner.shape.region < GOES_ON["region"]
        self.options = replace(options, draft_ahead="always") if is_small else options
        drafter: AnyDrafter = ModelDrafter(self.runner, ("standalone",), Needs(vocab_size=vocab_size))
        if partner is not None:
            drafter = CombinedDrafter([drafter, partner])
        self.requests = Requests(drafter, self.options)
        first = self.requests.growth.growers[0]
        assert isinstance(first, BurstGrower)
        self.growth = first
        self.peer = Peer()
        self.peer.vocab_size = vocab_size
        self.open_requests: dict[int, Verify] = {}
        self.gone: dict[int, Verify] = {}

    def open(self, number: int, tokens: list[int], credit: int = 24, sampling: SamplingParams = GREEDY) -> Verify:
        request = Verify(number, list(tokens))
        self.open_requests[number] = request
        message = Open(number, list(tokens), len(tokens), sampling, credit)
        self.requests.handle(self.peer, message)
        return request

    def commit(self, number: int, new_tokens: Sequence[int], credit: int = 24) -> None:
        request = self.open_requests[number]
        before = len(request.tokens)
        request.tokens += list(new_tokens)
        request.mirror.commit()
        mirror = request.mirror
        tokens = list(new_tokens)
        self.requests.handle(
            self.peer,
            Commit(number, before, tokens, mirror.epoch, mirror.received_through, mirror.resolved_root, credit),
        )

    def features(self, number: int, start: int, count: int) -> None:
        tokens = self.open_requests[number].tokens
        self.requests.handle(self.peer, features_message(number, tokens, start, count))

    def pause(self, number: int) -> None:
        self.requests.handle(self.peer, Pause(number))

    def resume(self, number: int, credit: int = 24) -> None:
        self.requests.handle(self.peer, Resume(number, credit))

    def close(self, number: int) -> None:
        self.gone[number] = self.open_requests.pop(number)
        self.requests.handle(self.peer, Close(number))

    def turn(self, *, wait: bool = True) -> None:
        """As a turn of the engine."""
        if not self.requests.growth.idle:
            self.requests.growth.grow(math.inf, lambda: not wait)
        self.requests.send_nodes()
        self.deliver()

    def settle(self) -> None:
        """Turn until there is nothing to do."""
        for _ in range(500):
            if self.requests.growth.idle and not self.requests.growth._refused:
                break
            self.turn()
        else:
            raise AssertionError("growth does not come to rest")
        self.requests.send_nodes()
        self.deliver()
        check_forest(self.growth._forest)

    def deliver(self) -> None:
        received, self.peer.received = self.peer.received, []
        for message in received:
            request = self.open_requests.get(message.request)  # type: ignore[union-attr]
            if request is not None:
                request.take(message)
                if request.declined and request.declined is not DeclineReason.GAP:
                    self.gone[request.number] = self.open_requests.pop(request.number)

    def check_nothing_left(self) -> None:
        """Every row, slot and page is free."""
        growth, batch_manager = self.growth, self.growth._batch_manager
        assert not self.runner.rows
        assert not self.runner.page_owner
        assert sorted(batch_manager._free_rows) == list(range(self.runner.shape.num_rows))
        assert growth._kv_manager.pool.num_free == self.runner.shape.num_pages
        check_pages(growth._kv_manager.pool)
        check_slots(growth._forest.slots)
        assert not growth._forest.slots.live.any()
        assert not growth._forest.num_run.any()
        growth._forest._compact()
        assert growth._forest.entries.count == 0
        assert self.requests.growth.num_live == 0
        for group in (
            batch_manager._contexts,
            batch_manager.rows,
            batch_manager._incomplete,
            batch_manager._changed,
            batch_manager._opening,
        ):
            assert not group
