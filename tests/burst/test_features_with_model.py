"""Growth with a real drafter of features: what is proposed behind true features is what a fresh start proposes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from growth_rig import GREEDY, Verify
from integrity import check_forest, check_slots
from test_growth_with_model import Service

from outrider.models.drafters.base import DraftModel
from outrider.protocol.speculation import Decline, Features, Grow
from outrider.sampling.params import SamplingParams


def send_features(service: Service, request: Verify, start: int, end: int, width: int) -> None:
    """The target's, which here depend on the position and the token alone."""
    rows = []
    for position in range(start, end):
        draw = np.random.default_rng((position, request.tokens[position]))
        rows.append(draw.normal(size=width).astype(np.float32))
    if rows:
        data = np.stack(rows).tobytes()
        service.requests.handle(service.peer, Features(request.number, start, end - start, False, data, "float32"))


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, seed=5)], ids=["greedy", "sampled"])
def test_behind_true_features_a_tree_scores_as_a_fresh_one_whatever_came_before(
    feature_model: DraftModel, sampling: SamplingParams
) -> None:
    width = len(feature_model.feature_layers) * feature_model.hidden_size
    service, draw, vocab = Service(feature_model), random.Random(4), feature_model.target_vocab_size
    request = service.open(0, [draw.randrange(vocab) for _ in range(30)], sampling)
    sent, compared = len(request.tokens) - 1, 0
    send_features(service, request, 0, sent, width)
    service.settle()
    for number in range(1, 31):
        if len(request.tokens) > 80:  # growth ends some tokens before the longest sequence
            break
        is_miss = number % 3 == 0
        paths = sorted(path for path in request.held() if len(path) <= 3) or [(1,)]
        path = [draw.randrange(vocab) for _ in range(draw.randrange(1, 12))] if is_miss else list(draw.choice(paths))
        service.commit(request, path)
        if not is_miss and draw.random() < 0.7:
            service.settle()  # with features of its own
        if is_miss or draw.random() < 0.5:
            send_features(service, request, sent, len(request.tokens) - 1, width)
            sent = len(request.tokens) - 1
        service.settle()
        assert not service.requests.declines
        check_forest(service.requests.growth.growers[0]._forest)
        check_slots(service.requests.growth.growers[0]._forest.slots)
        if not is_miss or len(request.tokens) > 90:
            continue
        other = Service(feature_model)
        fresh = other.open(0, request.tokens, sampling)
        send_features(other, fresh, 0, sent, width)
        other.settle()
        both = request.held().keys() & fresh.held().keys()
        assert len(both) > 5
        for path in both:
            assert request.held()[path] == pytest.approx(fresh.held()[path], abs=2e-3), (number, path)
        compared += 1
    assert compared > 1


def test_features_of_a_wrong_width_cost_no_other_request_its_tree(feature_model: DraftModel) -> None:
    """As a broken verify engine may say them on a line, past the door."""
    service, width = Service(feature_model), len(feature_model.feature_layers) * feature_model.hidden_size
    broken, other = (service.open(number, list(range(1, 12)), GREEDY) for number in range(2))
    for request in (broken, other):
        send_features(service, request, 0, 10, width)
    data = np.zeros(feature_model.feature_size + 1, np.float32).tobytes()
    wrong = Features(broken.number, 9, 1, True, data, "float32", projected=True)
    try:
        service.requests.handle(service.peer, wrong)
    except ValueError:
        service.requests.fail(service.peer, wrong)
    service.grow()
    declined = [message.request for message in service.peer.received if isinstance(message, Decline)]
    assert declined == [broken.number]
    assert any(message.request == other.number and message.token_ids for message in grown(service))


def grown(service: Service) -> list[Grow]:
    return [message for message in service.peer.received if isinstance(message, Grow)]
