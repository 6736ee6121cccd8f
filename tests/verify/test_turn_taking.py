"""Where drafts share cores with rounds, holds bring what they can: against always waiting, and never."""

from __future__ import annotations

import pytest
from turn_taking import Machine, TurnTaking

from verify_service.speculation.replica import AnswerTimes

STEEP = (0.031, 0.033, 0.0365, 0.055, 0.070)
"""Rounds in which a few nodes cost little and eight cost much."""


def rates(machine: Machine, num_rounds: int, longest: float = 0.05) -> tuple[float, float, float]:
    """Tokens per second of the rule, of waiting always, and of never waiting."""
    found = []
    for wait in ("rule", "always", "never"):
        taking = TurnTaking(machine, wait, longest)
        taking.run(num_rounds)
        found.append(taking.rate)
    return found[0], found[1], found[2]


@pytest.mark.parametrize(
    "machine",
    [
        Machine(),
        Machine(burst=0.025),
        Machine(burst=0.04),
        Machine(rounds=STEEP, answer=0.004, burst=0.012, chance=0.5),
        Machine(rounds=STEEP, answer=0.006, burst=0.018, chance=0.6),
        Machine(chance=0.4),
        Machine(delay=lambda number: 3.0 if number % 7 < 2 else 1.0),
    ],
    ids=["quick", "slow", "slower", "steep", "steep and slow", "guesses badly", "often disturbed"],
)
def test_a_draft_that_is_worth_a_wait_is_waited_for(machine: Machine) -> None:
    rule, always, never = rates(machine, 200)
    assert always > 1.02 * never
    assert rule > 0.97 * always


@pytest.mark.parametrize(
    "machine",
    [Machine(chance=0.15), Machine(burst=0.06), Machine(burst=0.1), Machine(answer=0.06), Machine(answer=0.3)],
    ids=["useless", "too slow", "much too slow", "answers late", "answers later"],
)
def test_a_draft_that_is_not_costs_little(machine: Machine) -> None:
    rule, always, never = rates(machine, 400)
    assert always < 0.8 * never
    assert rule > 0.88 * never


def test_a_slow_beginning_is_forgotten_soon() -> None:
    rule, always, never = rates(Machine(delay=lambda number: 6.0 if number < 6 else 1.0), 100)
    assert never < 0.7 * always and rule > 0.92 * always


def test_after_a_disturbance_holds_come_back() -> None:
    """What was learned while the machine was busy is tried again, though each answer then comes beside a round."""
    taking = TurnTaking(Machine(delay=lambda number: 6.0 if 40 < number < 60 else 1.0))
    taking.run(140)
    tokens, held = taking.request.committed_len, taking.num_held
    taking.run(60)
    assert taking.num_held - held > 50 and taking.request.committed_len - tokens > 2.5 * 60


def test_no_round_is_held_longer_than_it_may() -> None:
    for longest in (0.005, 0.02):
        taking = TurnTaking(Machine(), "rule", longest)
        for _ in range(100):
            before = taking.held
            taking.run(1)
            assert taking.held - before <= longest + 1e-9


def test_a_short_wait_in_vain_makes_nothing_look_quicker() -> None:
    times = AnswerTimes(typical=0.01, late=0.02)
    times.note_timeout(0.001)
    assert (times.typical, times.late) == (0.01, 0.02)
    times.note_timeout(0.02)
    assert times.typical > 0.01
