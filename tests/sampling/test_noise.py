"""The noise: Philox against its published vectors, and what both sides of the coupling rely on."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.sampling.noise import gumbel, gumbel_of_words, philox

SEEDS = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**32, 2**63, 2**64 - 1])
WORDS = st.integers(0, 2**32 - 1)


# The known answers that come with Random123 for philox4x32-10: counter, key, output.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = philox(np.array([counter[0]], np.uint64), *counter[1:], key=key[0] | key[1] << 32)
    assert tuple(words[0].tolist()) == expected


@given(SEEDS, WORDS, WORDS, st.integers(0, 2**18))
def test_a_value_is_the_documented_function_of_its_key(seed: int, choice: int, position: int, token_id: int) -> None:
    word = int(philox(np.array([token_id // 4], np.uint64), position, choice, 0, seed)[0, token_id % 4])
    expected = -math.log(-math.log1p(-(word + 0.5) / 2**32))
    value = gumbel(seed, choice, position, np.array([token_id]))
    assert value.dtype == np.float32
    np.testing.assert_allclose(value, [expected], rtol=2e-7, atol=1e-9)


@given(SEEDS, WORDS, st.integers(1, 700), st.data())
def test_a_subset_equals_the_same_entries_of_the_row_bitwise(
    seed: int, position: int, vocab_size: int, data: st.DataObject
) -> None:
    row = gumbel(seed, 3, position, vocab_size=vocab_size)
    ids = np.array(data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=80)), np.int32)
    assert row.shape == (vocab_size,)
    assert gumbel(seed, 3, position, ids).tobytes() == row[ids].tobytes()


def test_a_real_vocabulary_has_the_same_noise_whole_and_in_parts() -> None:
    row = gumbel(11, 0, 5, vocab_size=49152)
    assert gumbel(11, 0, 5, np.arange(49152)).tobytes() == row.tobytes()
    for size in (1, 3, 8, 63, 64, 65, 1000, 49151):
        ids = np.arange(49152)[-size:]
        assert gumbel(11, 0, 5, ids).tobytes() == row[ids].tobytes()
        assert gumbel(11, 0, 5, vocab_size=size).tobytes() == row[:size].tobytes()


def test_an_array_of_positions_equals_one_call_for_each() -> None:
    positions, ids = np.array([7, 9, 7, 2**32 - 1]), np.array([1, 1, 50, 3])
    together = gumbel(5, 1, positions, ids)
    each = [gumbel(5, 1, int(p), ids[i : i + 1])[0] for i, p in enumerate(positions)]
    assert together.tolist() == each


def test_every_word_gives_a_finite_value() -> None:
    words = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    noise = gumbel_of_words(words)
    assert np.isfinite(noise).all()
    assert (np.diff(noise) <= 0).all(), "a larger u is a larger E and a smaller G"
    assert noise[0] == pytest.approx(22.8739, abs=1e-3)
    assert noise[-1] == pytest.approx(-3.1300, abs=1e-3)


def test_noise_has_the_moments_of_a_gumbel_variate() -> None:
    noise = np.concatenate([gumbel(1, 0, position, vocab_size=50_000) for position in range(4)]).astype(np.float64)
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_seed_choice_and_position_each_change_the_noise() -> None:
    rows = [
        gumbel(seed, choice, position, vocab_size=64).tobytes()
        for seed in (0, 1, 2**32, 2**63, 2**64 - 1)
        for choice in (0, 1)
        for position in (0, 1)
    ]
    assert len(set(rows)) == len(rows)


def test_version_1_never_changes() -> None:
    expected = [2.5388439, -0.3438142, -0.46303645, 2.3675106]
    np.testing.assert_allclose(gumbel(2**64 - 1, 1, 17, np.array([0, 1, 4095, 49151])), expected, rtol=1e-6)


def test_noise_and_the_reference_sampler_import_without_torch() -> None:
    code = "import sys, outrider.sampling.noise, outrider.sampling.sampler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
