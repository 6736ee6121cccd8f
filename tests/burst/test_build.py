from __future__ import annotations

from copy import copy

import pytest
from burst_host import Host

from outrider.config.draft import DraftOptions
from outrider.drafting.base import Needs
from outrider.drafting.model.build import build_runner
from outrider.drafting.model.drafter import GrowthOptions
from outrider.drafting.model.torch_runner import TorchRunner
from outrider.errors import ConfigError
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.config import ContextWindow


def test_a_cpu_gets_the_torch_runner(model: DraftModel) -> None:
    runner = build_runner(model, DraftOptions(max_requests=3, max_total_tokens=600))
    shape = runner.shape
    assert isinstance(runner, TorchRunner)
    assert (shape.num_rows, shape.region, shape.branching, shape.max_width) == (3, 64, 4, 8)
    # 600 tokens in pages of 16; a row never needs more than the model's 256 positions.
    assert (shape.num_pages, shape.max_context, shape.lag) == (38, 256, int(model.feature_size > 0))
    host = Host(runner, model)
    host.open(2, list(range(30, 70)))
    assert len(host.step(3, 8)) == 1 + 4 + 8


def test_a_cpu_has_room_for_all_levels_of_a_tree_in_lockstep(plain_model: DraftModel) -> None:
    shape = build_runner(plain_model, DraftOptions(lockstep=True)).shape
    assert (shape.region, shape.max_steps, shape.max_width) == (128, 8, 8)


def test_memory_is_no_more_than_all_rows_can_use(plain_model: DraftModel) -> None:
    shape = build_runner(plain_model, DraftOptions(max_requests=2)).shape
    assert shape.num_pages == 2 * 256 // shape.page_size
    assert build_runner(plain_model, DraftOptions(speculative_eagle_topk=2)).shape.branching == 2


def test_too_few_tokens_are_refused_naming_the_option(plain_model: DraftModel) -> None:
    with pytest.raises(ConfigError, match="--max-total-tokens"):
        build_runner(plain_model, DraftOptions(max_total_tokens=100))


def test_sequences_that_memory_could_never_hold_are_not_served(plain_model: DraftModel) -> None:
    plain_model = copy(plain_model)
    plain_model.max_positions = 4096
    shape = build_runner(plain_model, DraftOptions(max_total_tokens=600)).shape
    assert shape.max_context == shape.num_pages * shape.page_size == 608
    assert (
        GrowthOptions.choose(DraftOptions(), shape, Needs(max_positions=plain_model.max_positions)).max_positions == 608
    )
    plain_model.window = ContextWindow(256)
    assert build_runner(plain_model, DraftOptions(max_total_tokens=600)).shape.max_context == 4096
