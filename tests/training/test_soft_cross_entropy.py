from __future__ import annotations

import math

import pytest
import torch

from outrider_tools.training import loss as loss_module
from outrider_tools.training.loss import MIN_HIT, SHARPNESS, TargetLoss, TargetProbs
from outrider_tools.training.target import TargetModel

PLAIN = TargetLoss(lambda piece: piece)


@pytest.mark.parametrize("chunk_logits", [10**9, 45])
def test_loss_and_gradients_equal_autograd(chunk_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", chunk_logits)
    torch.manual_seed(0)
    rows, weight = torch.randn(10, 6, requires_grad=True), torch.randn(15, 6, requires_grad=True)
    probs = torch.rand(10, 15).softmax(1) * torch.rand(10, 1)
    top_ids = torch.randint(-1, 15, (10,))
    loss, hits = PLAIN(rows, weight, TargetProbs(probs, top_ids), torch.tensor(10.0))
    (3 * loss).backward()
    assert rows.grad is not None and weight.grad is not None
    got = rows.grad.clone(), weight.grad.clone()
    rows.grad = weight.grad = None
    logits = rows @ weight.t()
    expected = -(probs * logits.log_softmax(1)).sum(1).mean()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(got, (rows.grad, weight.grad))
    rows.grad = None
    (3 * PLAIN(rows, weight.detach(), TargetProbs(probs, top_ids), torch.tensor(10.0))[0]).backward()
    torch.testing.assert_close(rows.grad, got[0])
    assert hits.tolist() == (logits.argmax(1) == top_ids).tolist()


def test_what_is_wanted_is_the_targets_distribution_cut_to_the_draft_vocabulary(target: TargetModel) -> None:
    hidden = torch.randn(7, target.config.hidden_size)
    logits = target.model.logits(hidden)
    kept = torch.arange(0, target.config.vocab_size, 2)
    kept = kept[kept != int(logits[0].argmax())]
    draft_ids = torch.full((target.config.vocab_size,), -1)
    draft_ids[kept] = torch.arange(kept.numel())
    target_probs = PLAIN.target_probs(target.model, hidden, kept, draft_ids, torch.ones(7, dtype=torch.bool))
    torch.testing.assert_close(target_probs.probs, logits.softmax(1)[:, kept])
    for row, top_ids in enumerate(logits.argmax(1).tolist()):
        assert target_probs.top_ids[row] == (kept.tolist().index(top_ids) if top_ids in kept.tolist() else -1)
    assert target_probs.top_ids[0] == -1


@pytest.mark.parametrize("chunk_logits", [10**9, 45])
@pytest.mark.parametrize("hit_weight", [0.3, 1.0])
def test_the_hit_loss_and_its_gradients_equal_autograd(
    hit_weight: float, chunk_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", chunk_logits)
    torch.manual_seed(0)
    rows, weight = torch.randn(10, 6, requires_grad=True), torch.randn(15, 6, requires_grad=True)
    probs = torch.rand(10, 15).softmax(1) * torch.rand(10, 1)
    # A row that does not count.
    probs[3] = 0
    count = torch.tensor(9.0)
    target_probs = TargetProbs(probs, torch.full((10,), -1))
    loss, _ = TargetLoss(lambda piece: piece, hit_weight)(rows, weight, target_probs, count)
    (3 * loss).backward()
    assert rows.grad is not None and weight.grad is not None
    got = rows.grad.clone(), weight.grad.clone()
    rows.grad = weight.grad = None
    logits, mass = rows @ weight.t(), probs.sum(1)
    plain = -(probs * logits.log_softmax(1)).sum(1)
    hit = torch.minimum((SHARPNESS * logits).softmax(1), probs).sum(1)
    missed = torch.where(mass > 0, -mass * (hit / mass).log().nan_to_num(), 0)
    expected = ((1 - hit_weight) * plain + hit_weight * missed).sum() / count
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(got, (rows.grad.nan_to_num(), weight.grad.nan_to_num()))
    assert not rows.grad[3].nan_to_num().any()


def hit_loss(logits: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Of one row of logits."""
    target_probs = TargetProbs(probs[None], torch.tensor([-1]))
    loss = TargetLoss(lambda piece: piece, 1.0)
    return loss(logits[None], torch.eye(logits.numel()), target_probs, torch.tensor(1.0))[0]


def test_choices_under_shared_noise_agree_as_often_as_the_hit_loss_says() -> None:
    torch.manual_seed(1)
    noise = -torch.empty(50000, 12).exponential_().log()
    for spread in (0.3, 1.0, 3.0):
        truth = (2 * torch.randn(12)).log_softmax(0)
        logits = (truth + spread * torch.randn(12)) / SHARPNESS
        hit = float((-hit_loss(logits, truth.exp())).exp())
        same = (truth + noise).argmax(1) == (SHARPNESS * logits + noise).argmax(1)
        assert hit / (2 - hit) - 0.01 < float(same.float().mean()) < hit + 0.01


def test_a_draft_that_knows_the_target_misses_nothing_but_what_it_has_no_word_for() -> None:
    truth = torch.randn(12).log_softmax(0)
    torch.testing.assert_close(hit_loss(truth / SHARPNESS, 0.7 * truth.exp()), torch.tensor(0.0))
    # Whatever it says: rows weigh what is within its vocabulary.
    assert float(hit_loss(torch.zeros(12), torch.zeros(12))) == 0.0
    far = torch.zeros(12)
    far[0] = 1e4
    assert float(hit_loss(-far, far.bool().float())) == pytest.approx(-math.log(MIN_HIT))
