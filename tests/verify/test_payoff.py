"""Speculation that costs more than it brings is left out, and used again when it pays."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from fake_device import FakeDevice, fake_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_peer import Clock, Recorder, follow, request, tree

from outrider.tree.messages import Commit, Open
from verify_service.budget import WIDTHS, CostModel
from verify_service.drafts import Drafts
from verify_service.payoff import MIN_REQUESTS, Payoff


class World(NamedTuple):
    """What rounds take and bring; a plain round takes a second."""

    num_requests: int
    seconds: float
    """Of a round with speculation, all that it costs the host counted in."""
    accepted: float
    """Draft tokens of a request that a round commits on average."""

    @property
    def gain(self) -> float:
        return (1 + self.accepted) / self.seconds


worlds = st.builds(World, st.integers(MIN_REQUESTS, 128), st.floats(1.0, 2.5), st.floats(0.0, 1.5))


def run(payoff: Payoff, world: World, num_rounds: int, seed: int = 1) -> float:
    """Run rounds; tokens per second over those of plain rounds."""
    luck, tokens, seconds = random.Random(seed), 0, 0.0
    for _ in range(num_rounds):
        took, brought = 1.0, world.num_requests
        if payoff.speculates:
            took = world.seconds
            spread = world.num_requests * world.accepted
            brought += round(max(luck.gauss(spread, spread**0.5), 0.0))
        took *= luck.uniform(0.98, 1.02)
        payoff.observe(world.num_requests, brought, took)
        tokens, seconds = tokens + brought, seconds + took
    return tokens / seconds / world.num_requests


@settings(deadline=None, max_examples=50)
@given(worlds, st.integers(0, 1000))
def test_no_slower_than_plain_rounds_nor_than_speculation(world: World, seed: int) -> None:
    payoff = Payoff(lambda tokens: 1.0)
    run(payoff, world, 1000, seed)
    speed = run(payoff, world, 8000, seed)
    assert speed >= 0.98
    assert speed >= 0.96 * world.gain


def test_a_loss_of_five_percent_is_found_soon_and_then_costs_next_to_nothing() -> None:
    payoff, world = Payoff(lambda tokens: 1.0), World(64, 1.26, 0.2)
    assert world.gain == pytest.approx(0.95, abs=0.01)
    run(payoff, world, 128)
    assert not payoff.speculates
    assert run(payoff, world, 1000) >= 0.98


def test_speculation_that_clearly_pays_is_never_interrupted() -> None:
    payoff, world = Payoff(lambda tokens: 1.0), World(64, 1.2, 0.8)
    assert all(run(payoff, world, 1) > 1 and payoff.speculates for _ in range(3000))


def test_other_text_or_a_new_draft_brings_speculation_back() -> None:
    payoff, world = Payoff(lambda tokens: 1.0), World(64, 1.3, 0.1)
    run(payoff, world, 300)
    assert not payoff.speculates
    run(payoff, World(64, 1.3, 1.0), 5000)
    assert payoff.speculates
    run(payoff, world, 300)
    assert not payoff.speculates
    payoff.restart()
    assert payoff.speculates


def test_few_requests_always_speculate() -> None:
    payoff = Payoff(lambda tokens: 1.0)
    run(payoff, World(64, 1.3, 0.1), 300)
    assert not payoff.speculates
    run(payoff, World(MIN_REQUESTS - 1, 1.3, 0.1), 1)
    assert payoff.speculates
    run(payoff, World(MIN_REQUESTS - 1, 1.3, 0.1), 1000)
    assert payoff.speculates


def test_a_trial_during_which_requests_come_and_go_proves_nothing() -> None:
    payoff, rounds = Payoff(lambda tokens: 1.0), 0
    while payoff.speculates:
        rounds += 1
        payoff.observe(64, 64, 1.3)
    for _ in range(4):
        payoff.observe(40, 40, 0.1)
    assert payoff.speculates, "fewer requests were fast, and not because they went without drafts"
    assert rounds <= 128


class Speculating:
    """Requests with a draft that has guessed once."""

    def __init__(self) -> None:
        self.drafts, self.port = Drafts(vocab_size=50, max_nodes=64, clock=Clock()), Recorder()
        self.drafts.connected(self.port)
        self.one = request([1, 2])
        self.drafts.admit(self.one)
        (opened,) = self.port.take(self.drafts)
        assert isinstance(opened, Open)
        self.drafts.receive(self.port, [tree(opened.request, 1, 2, [7, 7])], 100.0)

    def commit(self, rounds: int) -> list[Commit]:
        for _ in range(rounds):
            self.one.tokens.append(7)
            follow(self.drafts, self.one)
        told = [message for message in self.port.take(self.drafts) if isinstance(message, Commit)]
        assert all(commit.length_before + len(commit.token_ids) <= len(self.one.tokens) for commit in told)
        return told


def test_suspended_drafts_hear_little_and_then_of_every_token() -> None:
    world = Speculating()
    world.drafts.suspend(True)
    link = world.drafts.link(world.one)
    assert link is not None and not link.expects
    told = world.commit(100)
    assert len(told) <= 4
    assert not link.expects, "nobody waits for them"
    world.drafts.suspend(False)
    told += world.commit(1)
    assert [token for commit in told for token in commit.token_ids.tolist()] == [7] * 101
    assert len(world.commit(5)) == 5


def test_rounds_of_an_engine_whose_drafts_are_suspended_take_no_nodes() -> None:
    engine, world = fake_engine(FakeDevice()), Speculating()
    engine.scheduler._drafts = world.drafts
    engine.memory.attach(world.one)
    world.one.cached_len = len(world.one.tokens) - 1
    assert engine.memory.reserve(world.one, 2)
    engine.scheduler.running.append(world.one)
    entries = engine.scheduler.plan()
    assert engine.scheduler.choose(entries).choice.num_nodes
    world.drafts.suspend(True)
    offer = engine.scheduler.choose(entries)
    assert not offer.choice.num_nodes and not offer.awaited


def test_the_least_time_of_a_round_is_that_of_the_start() -> None:
    cost = CostModel([1.0] * len(WIDTHS))
    for _ in range(200):
        cost.observe(64, 2.0)
    assert cost.seconds(64) > 1.5
    assert cost.least_seconds(64) == 1.0
