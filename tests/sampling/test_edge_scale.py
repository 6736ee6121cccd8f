from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.sampling.noise import gumbel
from outrider.sampling.params import SamplingParams
from outrider.sampling.proposer import HEAD_SCALE, EdgeScale, HostProposer

SIZE, PLACES, SPREAD = 200, 600, 0.6


def proposed(scale: EdgeScale, temperature: float, logits: np.ndarray, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Best tokens and edge scores at positions 1 on, of logits [PLACES, SIZE]."""
    proposer = HostProposer(1, SIZE, SIZE, None, scale=scale)
    proposer.admit(0, SamplingParams(temperature=temperature, seed=seed))
    tokens, scores = torch.empty(len(logits), 16, dtype=torch.int32), torch.empty(len(logits), 16)
    rows, positions = (torch.from_numpy(part) for part in np.zeros((2, len(logits)), np.int32))
    positions += torch.arange(len(logits), dtype=torch.int32)
    proposer(torch.from_numpy(logits.copy()), rows, positions, tokens, scores)
    return tokens, scores


@pytest.mark.parametrize("temperature", [0.2, 0.5, 1.0, 1.5])
def test_the_best_edge_is_its_chance_at_every_temperature(temperature: float) -> None:
    # The drafter's logits are the target's and Gumbel errors of one scale.
    random = np.random.default_rng(1)
    drafted = random.normal(0, 2, (PLACES, SIZE)).astype(np.float32)
    target = drafted + SPREAD * random.gumbel(size=drafted.shape)
    noise = np.stack([gumbel(7, 0, place + 1, vocab_size=SIZE) for place in range(PLACES)])
    taken = (target / temperature + noise).argmax(1)

    tokens, scores = proposed(EdgeScale(1 / SPREAD, 1 / SPREAD), temperature, drafted, 7)

    found = float((tokens[:, 0].numpy() == taken).mean())
    assert float(scores[:, 0].exp().mean()) == pytest.approx(found, abs=0.05)


def test_a_scale_may_prefer_likely_tokens_to_lucky_ones() -> None:
    noise = gumbel(7, 0, 1, vocab_size=SIZE)
    lucky, likely = int(noise.argmax()), int(noise.argmin())
    logits = np.full((1, SIZE), -40, np.float32)
    # Just not enough without it.
    logits[0, [lucky, likely]] = 0, noise[lucky] - noise[likely] - 0.1

    best = [int(proposed(scale, 1.0, logits, 7)[0][0, 0]) for scale in (EdgeScale(), HEAD_SCALE)]

    assert best == [lucky, likely]


@pytest.mark.parametrize("scale", [EdgeScale(), HEAD_SCALE])
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6, 1e30])
def test_edges_are_chances_at_the_ends_of_the_range(scale: EdgeScale, temperature: float) -> None:
    logits = np.random.default_rng(3).normal(0, 3, (4, SIZE)).astype(np.float32)
    _, scores = proposed(scale, temperature, logits, 1)
    assert scores.isfinite().all()
    assert (scores <= 0).all()
    assert (scores.exp().sum(1) <= 1 + 1e-5).all()


@pytest.mark.parametrize("scale", [EdgeScale(), HEAD_SCALE])
def test_edges_of_a_low_temperature_come_near_those_without_noise(scale: EdgeScale) -> None:
    logits = np.random.default_rng(4).normal(0, 3, (4, SIZE)).astype(np.float32)
    torch.testing.assert_close(
        proposed(scale, 1e-4, logits, 1)[1], proposed(scale, 0.0, logits, 1)[1], atol=5e-3, rtol=0
    )


def test_the_best_edge_is_its_chance_to_be_the_targets_likeliest() -> None:
    # As above, but greedily: the target's likeliest token is never drawn.
    random = np.random.default_rng(5)
    drafted = random.normal(0, 2, (PLACES, SIZE)).astype(np.float32)
    taken = (drafted + SPREAD * random.gumbel(size=drafted.shape)).argmax(1)

    tokens, scores = proposed(EdgeScale(1 / SPREAD, 1 / SPREAD), 0.0, drafted, 7)

    found = float((tokens[:, 0].numpy() == taken).mean())
    assert float(scores[:, 0].exp().mean()) == pytest.approx(found, abs=0.05)
