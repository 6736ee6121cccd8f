"""Both sides make one check of both hellos."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from outrider.errors import InvalidRequestError
from outrider.protocol.speculation import PROTOCOL_VERSION, Hello
from outrider.sampling.noise import NOISE_VERSION
from outrider.tree.handshake import MAX_PROJECTION_BYTES, HandshakeError, agree

VERIFY = Hello(
    PROTOCOL_VERSION,
    NOISE_VERSION,
    token_ids_hash="cafe",
    vocab_size=100,
    hidden_size=64,
    num_layers=12,
    max_positions=4096,
)
DRAFT = Hello(PROTOCOL_VERSION, NOISE_VERSION)
OFFER: dict[str, object] = {
    "hidden_size": 64,
    "feature_layers": (3, 5, 9),
    "projection_columns": 64,
    "projection_hash": "ab" * 32,
}


def test_a_draft_that_states_nothing_takes_all_from_the_target() -> None:
    terms = agree(VERIFY, DRAFT)
    assert (terms.vocab_size, terms.max_positions, terms.feature_layers) == (100, 0, ())


@pytest.mark.parametrize(("theirs", "legal"), [(100, 100), (128, 100), (90, 90)])
def test_padded_vocabularies_may_differ_and_the_smaller_one_counts(theirs: int, legal: int) -> None:
    assert agree(VERIFY, replace(DRAFT, vocab_size=theirs)).vocab_size == legal


def test_a_draft_may_serve_shorter_sequences() -> None:
    assert agree(VERIFY, replace(DRAFT, max_positions=2048)).max_positions == 2048


def test_a_tokenizer_is_compared_where_both_name_one() -> None:
    assert agree(VERIFY, replace(DRAFT, token_ids_hash="cafe"))
    assert agree(replace(VERIFY, token_ids_hash=""), replace(DRAFT, token_ids_hash="beef"))


def test_layers_up_to_the_one_behind_the_final_norm_can_be_had() -> None:
    draft = replace(DRAFT, hidden_size=64, feature_layers=(13, 0, 6), features_token="secret")
    terms = agree(VERIFY, draft)
    assert (terms.feature_layers, terms.features_token) == ((13, 0, 6), "secret")
    assert (terms.projection_columns, terms.projection_hash) == (0, "")


def test_a_projection_may_be_offered_that_makes_features_smaller() -> None:
    terms = agree(VERIFY, replace(DRAFT, **OFFER))  # type: ignore[arg-type]
    assert (terms.hidden_size, terms.projection_columns, terms.projection_hash) == (64, 64, "ab" * 32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol_version": 77}, ("protocol_version", str(PROTOCOL_VERSION), "77")),
        ({"noise_version": 99}, ("noise_version", str(NOISE_VERSION), "99")),
        ({"token_ids_hash": "beef"}, ("token_ids_hash", "cafe", "beef")),
        ({"hidden_size": 32}, ("hidden_size", "64", "32")),
        ({"hidden_size": 64, "feature_layers": (3, 14)}, ("feature_layers", "12", "(3, 14)")),
        ({"hidden_size": 64, "feature_layers": (3, 3)}, ("feature_layers", "12", "(3, 3)")),
        ({"hidden_size": 64, "feature_layers": tuple(range(9))}, ("feature_layers", "8", "9")),
        ({"feature_layers": (3,)}, ("hidden_size", "64", "0")),
        (OFFER | {"projection_columns": 66}, ("projection_columns", "64", "66")),
        (OFFER | {"projection_columns": 33}, ("projection_columns", "64", "33")),
        (OFFER | {"projection_columns": 64, "feature_layers": (3,)}, ("projection_columns", "64")),
        (OFFER | {"projection_columns": 0}, ("projection_columns", "64", "0")),
        (OFFER | {"projection_columns": 2**32 - 2}, ("projection_columns", "64", "4294967294")),
        (OFFER | {"projection_hash": ""}, ("projection_hash",)),
        (OFFER | {"projection_hash": "g" * 64}, ("projection_hash", "g" * 64)),
        (OFFER | {"projection_hash": "ab" * 5000}, ("projection_hash",)),
    ],
)
def test_what_does_not_fit_is_refused_naming_both_values(changes: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(HandshakeError) as caught:
        agree(VERIFY, replace(DRAFT, **changes))  # type: ignore[arg-type]
    assert all(word in caught.value.message for word in words)


def test_a_projection_too_large_to_be_taken_in_is_refused_naming_both_sizes() -> None:
    large = replace(VERIFY, hidden_size=8192)
    offer = OFFER | {"hidden_size": 8192, "projection_columns": 8192}
    assert agree(large, replace(DRAFT, **offer)).projection_columns == 8192  # type: ignore[arg-type]
    offer["feature_layers"] = tuple(range(8))
    with pytest.raises(HandshakeError, match=f"projection_columns: .*{MAX_PROJECTION_BYTES}.*{8 * 8192 * 8192 * 2}"):
        agree(large, replace(DRAFT, **offer))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 1 << 31])
def test_a_target_without_a_sensible_vocabulary_is_refused(size: int) -> None:
    with pytest.raises(InvalidRequestError, match="vocab_size"):
        agree(replace(VERIFY, vocab_size=size), DRAFT)
