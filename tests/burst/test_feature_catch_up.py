"""A drafter of features that fell behind catches up: what came in many parts is run at once, for many requests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from growth_rig import GOES_ON, GREEDY, Rig, continuation
from hypothesis import given
from hypothesis import strategies as st
from test_growth_with_model import Service

from outrider.config.draft import DraftOptions
from outrider.drafting.model.features import PendingFeatures, with_rows
from outrider.models.drafters.base import DraftModel
from outrider.protocol.speculation import DeclineReason, Features


def rig_of() -> Rig:
    return Rig(DraftOptions(max_positions=300), feature_size=1)


def test_features_that_came_one_by_one_are_run_in_one_forward() -> None:
    rig = rig_of()
    request = rig.open(1, list(range(1, 39)))
    rig.turn()
    for position in range(37):
        rig.features(1, position, 1)
    rig.settle()
    assert rig.runner.extended == [(0, 36)]
    request.check()
    assert request.held()


def test_a_request_that_fell_behind_is_level_again_after_one_forward() -> None:
    rig = rig_of()
    request = rig.open(1, [1, 2, 3])
    rig.features(1, 0, 2)
    rig.settle()
    before = len(rig.runner.extended)
    rig.pause(1)
    for _ in range(40):
        rig.commit(1, continuation(request.tokens, 1))
        rig.features(1, len(request.tokens) - 2, 1)
        rig.turn()
    rig.resume(1)
    rig.settle()
    assert len(rig.runner.extended) == before + 1
    assert rig.runner.rows[0].context == request.tokens[1:-1]
    request.check()
    assert request.held()


def test_all_that_are_behind_are_level_before_the_next_burst() -> None:
    rig = rig_of()
    for number in range(1, 5):
        rig.open(number, [1] + [number] * 19)
    rig.turn()
    for number in range(1, 5):
        rig.features(number, 0, 19)
    rig.turn()
    assert sorted(row for row, _ in rig.runner.extended) == [0, 1, 2, 3]
    assert sum(count for _, count in rig.runner.extended) <= rig.growth._options.prompt_chunk
    rig.settle()
    assert all(request.held() for request in rig.open_requests.values())


def test_tokens_that_bursts_have_run_with_true_features_are_moved_and_not_computed_apart() -> None:
    rig = Rig(DraftOptions(max_positions=300), feature_size=1, **GOES_ON)
    for number in range(1, 5):
        request = rig.open(number, [1, number, 3])
        rig.features(number, 0, 2)
    rig.settle()
    extended = len(rig.runner.extended)
    for _ in range(20):
        for number, request in rig.open_requests.items():
            rig.commit(number, continuation(request.tokens, 2))
            rig.features(number, len(request.tokens) - 3, 2)
        rig.settle()
    assert rig.growth._kv_manager.max_forced < 20
    assert len(rig.runner.extended) == extended
    assert len(rig.runner.rows) == 4
    for row, request in zip(rig.runner.rows.values(), rig.open_requests.values(), strict=True):
        assert len(row.context) > 20
        request.check()


def test_between_two_bursts_no_more_is_run_than_a_chunk() -> None:
    rig = Rig(DraftOptions(max_positions=300), feature_size=1, max_context=1000, num_pages=500)
    for number in (1, 2, 3):
        rig.open(number, [1] + [number] * 99)
    rig.turn()
    for number in (1, 2, 3):
        rig.features(number, 0, 99)
    sizes = []
    for _ in range(4):
        before = len(rig.runner.extended)
        rig.turn()
        sizes.append(sum(count for _, count in rig.runner.extended[before:]))
    assert max(sizes) == rig.growth._options.prompt_chunk == 128
    rig.settle()
    assert all(request.held() for request in rig.open_requests.values())


def behind(num_pages: int) -> Rig:
    """Three requests whose contexts are to be computed in the next turn."""
    rig = Rig(DraftOptions(max_positions=300), feature_size=1, num_pages=num_pages)
    for number in (1, 2, 3):
        rig.open(number, [1, number])
    rig.turn()
    for number in (1, 2, 3):
        rig.commit(number, [number] * 18)
        rig.features(number, 0, 19)
    return rig


def test_a_request_for_which_there_are_no_pages_leaves_the_others_their_forward() -> None:
    rig = behind(num_pages=11)
    rig.settle()
    assert [request.declined for request in rig.gone.values()] == [DeclineReason.OVERLOADED]
    assert rig.runner.forwards[0] == 2
    assert len(rig.open_requests) == 2 and all(request.held() for request in rig.open_requests.values())


def test_a_forward_that_fails_takes_along_whose_context_it_was_to_compute() -> None:
    rig = behind(num_pages=100)
    rig.runner.extend_fault = RuntimeError("no memory")
    rig.turn()
    rig.runner.extend_fault = None
    rig.settle()
    assert [request.declined for request in rig.gone.values()] == [DeclineReason.UNSPECIFIED] * 3


@pytest.mark.parametrize(("num_requests", "apart"), [(1, False), (2, False), (16, True)])
def test_where_many_share_a_burst_fewer_tokens_of_each_are_left_to_it(num_requests: int, apart: bool) -> None:
    figures = {"num_rows": 16, "region": 256, "max_width": 64, "max_seeds": 128, "max_steps": 8, "num_pages": 2000}
    rig = Rig(DraftOptions(max_positions=300), feature_size=1, **figures)
    for number in range(1, num_requests + 1):
        rig.open(number, [1, number])
        rig.features(number, 0, 1)
    rig.settle()
    assert not rig.runner.extended
    for number, request in rig.open_requests.items():
        rig.commit(number, [39 - (number + place) % 20 for place in range(12)])
        rig.features(number, 1, len(request.tokens) - 2)
    rig.turn()
    assert rig.runner.forwards == ([16] if apart else []), "all of them at once between two bursts"
    rig.settle()
    assert all(request.held() for request in rig.open_requests.values())
    assert len(rig.runner.extended) <= num_requests


def joined(store: PendingFeatures, start: int, end: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.concatenate([np.asarray(values) for _, values in store.cut(start, end)])


parts = st.lists(st.tuples(st.integers(0, 120), st.integers(1, 9)) | st.just(None), max_size=120)


@given(parts)
def test_a_store_has_what_it_was_given_in_whatever_parts(given_parts: list[tuple[int, int] | None]) -> None:
    joins: list[int] = []

    def join(values: list[np.ndarray]) -> np.ndarray:
        joins.append(len(values))
        return np.concatenate(values)

    store, here, since, end = PendingFeatures(join), set[int](), 0, 0
    for part in given_parts:
        if part is None:  # as a rule they come in order
            start, count = end, 1
        else:
            start, count = part
        store.add(start, np.arange(start, start + count)[:, None], since)
        here |= {position for position in range(start, start + count) if position >= since}
        end = max(end, start + count)
        for first in range(0, end, 7):
            past = first
            while past in here:
                past += 1
            assert store.end_from(first) == past
            if past > first:
                assert joined(store, first, past)[:, 0].tolist() == list(range(first, past))
        if part is not None and part[1] == 9:
            since = max(since, part[0])
            store.forget(since)
            here = {position for position in here if position >= since}


def test_many_small_parts_become_few_and_let_go_of_what_they_were_cut_from() -> None:
    whole = torch.arange(1000.0)[:, None]
    store = PendingFeatures(lambda values: torch.cat(list(values)))
    for position in range(500):
        store.add(position, whole[position : position + 1], 0)
    found = list(store.cut(0, 500))
    assert len(found) < 500 / 16 + 16
    assert sum(values.untyped_storage().nbytes() > 4 * len(values) for _, values in found) < 16  # type: ignore[attr-defined, arg-type]
    assert joined(store, 0, 500).tolist() == whole[:500].tolist()


class Counted(list):  # type: ignore[type-arg]
    """Counts the values that are read."""

    num_read = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        self.num_read += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
        return super().__getitem__(index)

    def __iter__(self):  # type: ignore[no-untyped-def]
        for value in super().__iter__():
            self.num_read += 1
            yield value


def test_of_a_prompt_of_any_length_few_tokens_and_parts_are_looked_at_in_a_turn() -> None:
    """All requests wait meanwhile."""
    length = 3000
    rig = Rig(DraftOptions(max_positions=4000), feature_size=1, num_pages=1000, max_context=4000)
    request = rig.open(1, [1] * length)
    rig.turn()
    for start in range(0, length - 1, 20):
        rig.features(1, start, min(20, length - 1 - start))
    context = rig.growth._batch_manager.rows[0]
    context.uncached = tokens = Counted(context.uncached)
    context.features._parts = parts = Counted(context.features._parts)
    rig.turn()
    assert rig.runner.extended and len(parts) > 140
    assert tokens.num_read < 1000 and parts.num_read < 140
    assert not request.held()


def pieces_of(width: int, projected: bool, in_ring: bool) -> tuple[list[Features], bytes]:
    """FeaturePieces of several requests, and the ring in which they lie."""
    draw, ring, pieces = np.random.default_rng(3), b"", []
    for number, count in enumerate((1, 3, 1, 2)):
        data = draw.normal(size=(count, width)).astype(np.float32).tobytes()
        place = len(ring) if in_ring else None
        pieces.append(
            Features(number, 4, count, True, b"" if in_ring else data, "float32", number + 1, place, projected)
        )
        ring += data
    return pieces, ring


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("in_ring", [False, True])
def test_a_runner_makes_of_what_came_together_what_it_makes_of_each_alone(
    feature_model: DraftModel, projected: bool, in_ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Service(feature_model).requests.growth.growers[0]._runner  # type: ignore[attr-defined]
    width = feature_model.feature_size if projected else len(feature_model.feature_layers) * feature_model.hidden_size
    pieces, ring = pieces_of(width, projected, in_ring)

    def read(offset: int, size: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(ring[offset : offset + size]), dtype=torch.uint8)

    alone = [runner.project(with_rows([piece], 4 * width, read)[0]) for piece in pieces]
    asked: list[int] = []
    for name in ("project", "finish_product"):
        plain = getattr(feature_model, name)
        monkeypatch.setattr(feature_model, name, lambda rows, plain=plain: (asked.append(len(rows)), plain(rows))[1])
    together = [runner.project(piece) for piece in with_rows(pieces, 4 * width, read)]
    assert asked == [7], "one projection for all of them"
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(runner.join(together), torch.cat(alone))


def test_trees_grow_alike_from_features_that_came_together(feature_model: DraftModel) -> None:
    width = len(feature_model.feature_layers) * feature_model.hidden_size
    held = []
    for together in (False, True):
        service = Service(feature_model)
        requests = [service.open(number, [3, 1, 4, 1, 5, 9 + number], GREEDY) for number in range(3)]
        draw = np.random.default_rng(5)
        data = [draw.normal(size=(5, width)).astype(np.float32).tobytes() for _ in requests]
        pieces = [Features(number, 0, 5, True, part, "float32", number + 1) for number, part in enumerate(data)]
        for piece in with_rows(pieces, 4 * width, None) if together else pieces:
            service.requests.handle(service.peer, piece)
        service.settle()
        held.append([request.held() for request in requests])
    for alone, same in zip(*held, strict=True):
        assert alone.keys() == same.keys() and len(alone) > 5
        assert all(alone[path] == pytest.approx(same[path], abs=1e-4) for path in alone)
