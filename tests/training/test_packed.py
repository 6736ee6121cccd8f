from __future__ import annotations

import numpy as np
import pytest
import torch
from training_world import make_head, random_texts, states

from outrider.errors import ConfigError
from outrider_tools.training.attention import Spans
from outrider_tools.training.learner import Learner
from outrider_tools.training.options import TrainerOptions
from outrider_tools.training.target import TargetModel, target_states
from outrider_tools.training.texts import Batches, TextBatch

OPTIONS = TrainerOptions(unroll=4)


def learned(target: TargetModel, batch: TextBatch, compiled: bool) -> tuple[torch.Tensor, ...]:
    """Losses, rates and gradients of a batch."""
    head = make_head(target)
    losses, rates = Learner(target, head, OPTIONS, compiled=compiled).losses(batch)
    (losses * torch.arange(1, 5)).sum().backward()
    return losses.detach(), rates, *(weight.grad for weight in head.parameters() if weight.grad is not None)


# torch's compiler looks at attributes of its own tensors that it warns of.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_batch_is_padded_with_changes_nothing(target: TargetModel, compiled: bool) -> None:
    texts = random_texts(target, 7, 6, 30)
    batches = Batches(texts, 320, OPTIONS.unroll + 1, fixed_shape=True)
    (numbers,) = batches.groups(0)
    padded = batches.batch(numbers)
    assert padded.num_targets < padded.targets.size
    bare = Batches(texts, 320, OPTIONS.unroll + 1).batch(numbers)
    assert bare.token_ids.size < padded.token_ids.size
    torch.testing.assert_close(learned(target, padded, compiled), learned(target, bare, False), rtol=1e-4, atol=1e-5)


def test_a_batch_learns_what_its_sequences_do_alone(target: TargetModel) -> None:
    texts = random_texts(target, 4, 6, 30)
    batches = Batches(texts, 320, OPTIONS.unroll + 1)
    found = learned(target, batches.batch(np.arange(4)), False)
    alone = [batches.batch(np.array([number])) for number in range(4)]
    whole = sum(batch.num_targets for batch in alone)
    expected = [
        sum(parts)
        for parts in zip(
            *([part * batch.num_targets / whole for part in learned(target, batch, False)] for batch in alone),
            strict=True,
        )
    ]
    torch.testing.assert_close(found, tuple(expected), rtol=1e-4, atol=1e-5)


def test_an_epoch_has_every_text_once_in_batches_of_one_shape(target: TargetModel) -> None:
    texts = random_texts(target, 60, 6, 40)
    packing = Batches(texts, 256, 4, fixed_shape=True)
    groups = packing.groups(3)
    assert sorted(np.concatenate(groups).tolist()) == list(range(60))
    assert [group.tolist() for group in groups] != [group.tolist() for group in packing.groups(4)]
    shapes = set()
    for group in groups:
        batch = packing.batch(group)
        shapes.add((batch.token_ids.shape, batch.targets.shape, batch.bounds.shape))
        for begin, end, number in zip(batch.bounds, batch.bounds[1:], group, strict=False):
            assert batch.token_ids[begin:end].tolist() == texts.sequence(int(number)).tolist()
            places = batch.targets[: batch.num_targets]
            own = places[(begin <= places) & (places < end)] - begin
            expected = range(max(4, int(texts.prompt_lens[number]) - 1), end - begin - 1)
            assert own.tolist() == list(expected)[: len(own)]
        assert batch.bounds[-1] == 256 and np.diff(batch.bounds).max() <= packing.longest
    assert len(shapes) == 1
    with pytest.raises(ConfigError, match="batch_tokens 32 is less than the longest text's"):
        Batches(texts, 32, 4, fixed_shape=True)


def test_states_of_spans_are_those_of_each_sequence_alone(target: TargetModel) -> None:
    texts = random_texts(target, 3, 5, 11)
    bounds = torch.from_numpy(texts.offsets).int()
    spans = Spans.of(torch.cat([bounds, bounds[-1:]]), texts.tokens.size, 20)
    found = target_states(target.model, torch.from_numpy(texts.tokens).long(), spans, (1, 3))
    for number in range(3):
        ids = torch.from_numpy(texts.sequence(number)).long()
        place = slice(int(texts.offsets[number]), int(texts.offsets[number + 1]))
        for got, want in zip(found, states(target, ids, (1, 3)), strict=True):
            torch.testing.assert_close(got[place], want, rtol=1e-4, atol=1e-4)
