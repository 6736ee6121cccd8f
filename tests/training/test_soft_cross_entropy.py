from __future__ import annotations

import pytest
import torch

from outrider.training import loss as loss_module
from outrider.training.loss import Wanted, soft_cross_entropy, wanted_at
from outrider.training.target import Target


@pytest.mark.parametrize("chunk_logits", [10**9, 45])
def test_loss_and_gradients_equal_autograd(chunk_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", chunk_logits)
    torch.manual_seed(0)
    rows, weight = torch.randn(10, 6, requires_grad=True), torch.randn(15, 6, requires_grad=True)
    chances = torch.rand(10, 15).softmax(1) * torch.rand(10, 1)
    best = torch.randint(-1, 15, (10,))
    loss, hits = soft_cross_entropy(rows, weight, Wanted(chances, best))
    (3 * loss).backward()
    assert rows.grad is not None and weight.grad is not None
    got = rows.grad.clone(), weight.grad.clone()
    rows.grad = weight.grad = None
    logits = rows @ weight.t()
    expected = -(chances * logits.log_softmax(1)).sum(1).mean()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(got, (rows.grad, weight.grad))
    assert hits.tolist() == (logits.argmax(1) == best).tolist()


def test_what_is_wanted_is_the_targets_distribution_cut_to_the_draft_vocabulary(target: Target) -> None:
    hidden = torch.randn(7, target.config.hidden_size)
    logits = target.model.logits(hidden)
    kept = torch.arange(0, target.config.vocab_size, 2)
    kept = kept[kept != int(logits[0].argmax())]
    draft_ids = torch.full((target.config.vocab_size,), -1)
    draft_ids[kept] = torch.arange(kept.numel())
    wanted = wanted_at(target.model, hidden, kept, draft_ids)
    torch.testing.assert_close(wanted.chances, logits.softmax(1)[:, kept])
    for row, best in enumerate(logits.argmax(1).tolist()):
        assert wanted.best[row] == (kept.tolist().index(best) if best in kept.tolist() else -1)
    assert wanted.best[0] == -1
