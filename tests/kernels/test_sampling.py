"""Sampling of whole rounds, the shared noise, and log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense_row import dense
from examples import examples
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sampling_cases import Case, Round, make_round, random_logits, walk_outputs

from kernels.reference.sampling import coins
from kernels.reference.sampling import gumbel as torch_gumbel
from kernels.sampling import gumbel, logprobs, sample_rows
from kernels.sampling_state import MAX_TOP_LOGPROBS, LogprobOutputs, WalkOutputs
from outrider.errors import InternalError
from outrider.sampling import noise
from outrider.sampling.params import AnswerEnd, SamplingParams
from outrider.sampling.sampler import LogitsProcessor, RequestSampler, TokenHistory

SEEDS = [0, 1, 2**31, 2**32 - 1, 2**63 + 12345, 2**64 - 1]


def key(seed: int, choice: int) -> list[int]:
    """Seed and choice index as the bit patterns of three int32."""
    return np.array([seed & 0xFFFFFFFF, seed >> 32, choice], np.uint32).view(np.int32).tolist()


def keys_and_positions(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.tensor([key(seed, index) for index, seed in enumerate(SEEDS)], dtype=torch.int32, device=device)
    return keys, torch.arange(7, 7 + len(SEEDS), dtype=torch.int32, device=device)


def agree(ours: torch.Tensor, expected: np.ndarray) -> None:
    """Equal but for the last bit, and that rarely: the float64 logarithms may differ before the rounding."""
    got = ours.cpu().numpy()
    assert got.dtype == expected.dtype == np.float32
    np.testing.assert_array_max_ulp(got, expected, 1)
    assert (got != expected).mean() < 1e-4


@pytest.mark.parametrize("vocab_size", [1, 5, 1024, 3001])
def test_rows_equal_numpy(device: str, vocab_size: int) -> None:
    keys, positions = keys_and_positions(device)
    got = gumbel(keys, positions, vocab_size)
    for row, seed in enumerate(SEEDS):
        agree(got[row], noise.gumbel(seed, row, int(positions[row]), vocab_size=vocab_size))


def test_listed_tokens_have_the_noise_of_the_full_row(device: str) -> None:
    keys, positions = keys_and_positions(device)
    ids = torch.randint(0, 3000, (len(SEEDS), 37), dtype=torch.int32, device=device)
    assert torch.equal(gumbel(keys, positions, 3000, ids), gumbel(keys, positions, 3000).gather(1, ids.long()))


def test_keys_may_be_columns_of_a_wider_table(device: str) -> None:
    keys, positions = keys_and_positions(device)
    table = torch.full((len(SEEDS), 8), -1, dtype=torch.int32, device=device)
    table[:, :3] = keys
    assert torch.equal(gumbel(table[:, :3], positions, 50), gumbel(keys, positions, 50))


def test_the_torch_reference_equals_numpy() -> None:
    keys, positions = keys_and_positions("cpu")
    got = torch_gumbel(keys, positions, torch.arange(999).expand(len(SEEDS), -1))
    for row, seed in enumerate(SEEDS):
        agree(got[row], noise.gumbel(seed, row, int(positions[row]), vocab_size=999))


def test_coins_are_the_first_words_under_the_last_counter() -> None:
    keys, positions = keys_and_positions("cpu")
    for row, (seed, coin) in enumerate(zip(SEEDS, coins(keys, positions), strict=True)):
        word = noise.philox(np.zeros(1, np.uint64), int(positions[row]), row, 1, seed)[0, 0]
        assert float(coin) == (int(word) + 0.5) / 2**32


def test_shapes_of_noise_are_checked() -> None:
    with pytest.raises(ValueError, match="keys"):
        gumbel(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), 5)


@pytest.mark.gpu
def test_a_large_table_equals_numpy() -> None:
    keys, positions = (tensor.cuda() for tensor in keys_and_positions("cpu"))
    got = gumbel(keys, positions, 128256)
    for row, seed in enumerate(SEEDS):
        agree(got[row], noise.gumbel(seed, row, int(positions[row]), vocab_size=128256))


VOCAB = 70
TOKENS = st.integers(0, VOCAB - 1)
# Values that float32 holds, so that both sides compare with the same numbers.
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.75]),
    top_k=st.sampled_from([0, 1, 5, 40, VOCAB]),
    top_p=st.sampled_from([1.0, 0.875, 0.3125]),
    min_p=st.sampled_from([0.0, 0.0625]),
    seed=st.sampled_from([0, 1, 2**63, 2**64 - 1]),
    choice_index=st.integers(0, 2),
    presence_penalty=st.sampled_from([0.0, 0.75]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 0.9, 1.4]),
    logit_bias=st.sampled_from([{}, {3: 5.0, 60: -100.0}]),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_nodes = draw(st.integers(0, 5))
    return Case(
        params=draw(PARAMS),
        prompt=draw(st.lists(TOKENS, min_size=2, max_size=6)),
        output=draw(st.lists(TOKENS, max_size=4)),
        parents=[draw(st.integers(-1, node - 1)) for node in range(num_nodes)],
        token_ids=[draw(TOKENS) for _ in range(num_nodes)],
        extend=draw(st.integers(1, 2)),
        samples=draw(st.integers(0, 4)) > 0,
        masked=draw(st.booleans()),
        end=AnswerEnd(frozenset(draw(st.sets(TOKENS, max_size=20))), draw(st.integers(0, 6))),
    )


def check(trial: Round, logits: torch.Tensor, candidates: int = 2048) -> None:
    """Sample a round and compare every token of it."""
    buffers = trial.buffers(candidates)
    buffers.sampled.fill_(-7)
    sample_rows(logits, trial.vocab_size, trial.tokens, trial.tables, buffers, vocab_mask=trial.mask)
    assert not buffers.bad.any()
    expected = torch.full_like(buffers.sampled, -1)
    for row, case in enumerate(trial.cases):
        for node in range(-1, len(case.parents) if case.samples else -1):
            expected[trial.index(row, node)] = trial.expected(logits, row, node)
    assert torch.equal(buffers.sampled, expected)


# The mask leaves 39 tokens, one less than top-k takes, so that top-k's border lies among those that are not allowed.
MASKED_TO_FEWER_THAN_TOP_K = [
    Case(SamplingParams(temperature=0.0), [40, 28, 31], [], [-1], [17], extend=2, masked=True),
    Case(
        SamplingParams(temperature=0.5, top_k=40, top_p=0.3125, min_p=0.0625, seed=1, choice_index=2,
                       repetition_penalty=1.4),
        [9, 38, 4], [3, 39, 39, 19], [-1, 0, -1, 2], [54, 63, 58, 38], extend=2, masked=True,
    ),
]  # fmt: skip


@pytest.mark.parametrize("candidates", [16, 2048])
# An interpreted round takes a second at worst: shrinking would run hundreds.
@settings(
    max_examples=examples(6),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(cases=st.lists(cases(), min_size=1, max_size=3), seed=st.integers(0, 9))
@example(cases=MASKED_TO_FEWER_THAN_TOP_K, seed=4)
def test_tokens_equal_the_reference_sampler(device: str, candidates: int, cases: list[Case], seed: int) -> None:
    trial = make_round(cases, VOCAB, device, seed=seed)
    check(trial, random_logits(len(trial.tokens.rows), VOCAB + 3, seed, device), candidates)


@settings(max_examples=examples(40))
@given(cases=st.lists(cases(), min_size=1, max_size=3), seed=st.integers(0, 9))
def test_the_torch_reference_equals_the_reference_sampler(cases: list[Case], seed: int) -> None:
    trial = make_round(cases, VOCAB, "cpu", seed=seed)
    check(trial, random_logits(len(trial.tokens.rows), VOCAB + 3, seed, "cpu"))


SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "noise": SamplingParams(seed=5),
    "top-k": SamplingParams(seed=5, top_k=7),
    "top-p": SamplingParams(seed=5, top_p=0.875),
    "min-p": SamplingParams(seed=5, min_p=0.0625),
    "all": SamplingParams(seed=5, temperature=0.75, top_k=50, top_p=0.875, min_p=0.03125, presence_penalty=0.5),
}


def one_row_each(params: list[SamplingParams], vocab_size: int, device: str) -> Round:
    return make_round([Case(each, [1, 2], []) for each in params], vocab_size, device)


@pytest.mark.parametrize("candidates", [16, 2048])
@pytest.mark.parametrize("scale", [0.5, 2.5])
def test_vocabularies_of_several_tiles(device: str, candidates: int, scale: float) -> None:
    vocab_size = 4500
    trial = one_row_each(list(SETTINGS.values()), vocab_size, device)
    check(trial, random_logits(len(trial.tokens.rows), vocab_size, 11, device, scale), candidates)


@pytest.mark.parametrize("candidates", [16, 2048])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        *(SamplingParams(top_k=k, seed=3) for k in (1, 2, 10, 29, 30, 31, 60)),
        # Four levels of 25 equal logits: borders fall inside a level and, with 0.5, between two tokens of one.
        *(SamplingParams(top_p=top_p, seed=3) for top_p in (0.0625, 0.5, 0.75, 0.96875)),
        SamplingParams(top_p=0.5, top_k=40, seed=3),
        SamplingParams(min_p=0.0625, seed=3),
    ],
    ids=str,
)
def test_ties_go_to_the_lowest_id(device: str, candidates: int, params: SamplingParams) -> None:
    row = np.random.default_rng(0).permutation(np.repeat([3.0, 2.5, 0.0, -1.0], 25)).astype(np.float32)
    row[row == 0.0] *= np.random.default_rng(1).choice([1.0, -1.0], 25)
    seeds = [replace(params, seed=seed) for seed in range(4)]
    trial = one_row_each(seeds, 100, device)
    # Two rows of each case are the root and the padding row's stand-in, so one logits row serves them all.
    check(trial, torch.from_numpy(row).to(device).expand(len(trial.tokens.rows), -1).contiguous(), candidates)


@pytest.mark.parametrize(
    ("candidates", "top_p", "min_p"), [(16, 0.25, 0.0), (16, 0.9375, 0.0625), (2048, 0.25, 0.0625), (2048, 0.9375, 0.0)]
)
def test_what_top_p_keeps_does_not_follow_from_ids_tied_at_the_border_of_top_k(
    device: str, candidates: int, top_p: float, min_p: float
) -> None:
    """Likely tokens with high ids, and a border of top-k among equals with low ones."""
    row = torch.full((100,), -1.0)
    row[90:] = 3.0 + torch.arange(10) / 8
    params = [SamplingParams(top_k=k, top_p=top_p, min_p=min_p, seed=seed) for k in (11, 14, 40) for seed in range(3)]
    trial = one_row_each(params, 100, device)
    check(trial, row.to(device).expand(len(trial.tokens.rows), -1).contiguous(), candidates)


@pytest.mark.parametrize(("candidates", "logit"), [(16, 0.0), (2048, 20.0)])
def test_the_likeliest_token_stays_whatever_the_filters(device: str, candidates: int, logit: float) -> None:
    """The smallest top_p there is, the largest min_p, and as few allowed tokens as can be."""
    params = [
        SamplingParams(top_k=k, top_p=top_p, min_p=min_p, seed=1)
        for k in (0, 1, 2, 50) for top_p in (1.0, 0.5, 2.0**-126) for min_p in (0.0, 1.0)
    ]  # fmt: skip
    trial = one_row_each(params, 100, device)
    logits = torch.full((len(trial.tokens.rows), 100), -torch.inf, device=device)
    logits[::2, 99], logits[1::2, [7, 99]] = logit, logit
    check(trial, logits, candidates)


def test_a_row_of_equal_logits_ties_everywhere(device: str) -> None:
    params = [SamplingParams(temperature=0.0), SamplingParams(top_k=33, seed=1), SamplingParams(top_p=0.5, seed=1)]
    trial = one_row_each(params, 100, device)
    for candidates in (16, 2048):
        check(trial, torch.full((len(trial.tokens.rows), 100), -7.25, device=device), candidates)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_widened_first(device: str, dtype: torch.dtype) -> None:
    trial = one_row_each(list(SETTINGS.values()), 300, device)
    check(trial, random_logits(len(trial.tokens.rows), 320, 4, device).to(dtype))


def test_the_smallest_temperatures_count_as_one(device: str) -> None:
    trial = one_row_each([SamplingParams(temperature=t, top_p=0.5, seed=2) for t in (1e-9, 1e-6, 2e-6)], 90, device)
    check(trial, random_logits(len(trial.tokens.rows), 90, 4, device))


def test_a_path_counts_for_its_own_node_alone(device: str) -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=1.0, repetition_penalty=1.5)
    chain = Case(params, [1, 2], [3, 3], parents=[-1, 0, 1, 2, -1], token_ids=[5, 5, 3, 5, 6], extend=3)
    trial = make_round([chain], 12, device)
    check(trial, torch.full((len(trial.tokens.rows), 12), 2.0, device=device) - torch.arange(12, device=device) / 64)


@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for infinities in the interpreter
def test_unusable_logits_are_told_apart_by_row(device: str, params: SamplingParams) -> None:
    """Row by row what the reference refuses, and nothing else."""
    vocab_size = 1300
    biased = replace(params, logit_bias={3: 1.0})
    trial = one_row_each([*[params] * 7, biased], vocab_size, device)
    logits = random_logits(len(trial.tokens.rows), vocab_size, 3, device)
    logits[0, 1200], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 7:] = -torch.inf
    logits[4, 1299], logits[5, 0] = -torch.inf, -3.0e38
    logits[7, 3], logits[7, 4] = 1.0, torch.nan
    buffers = trial.buffers()
    sample_rows(logits, vocab_size, trial.tokens, trial.tables, buffers)
    for row in range(8):
        try:
            expected = trial.expected(logits, row, -1)
        except InternalError:
            expected = -1
        assert int(buffers.sampled[row]) == expected
        assert int(buffers.bad[row]) == (expected == -1)
    assert buffers.bad[:8].tolist() == [1, 1, 1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_allows_nothing_is_an_error_and_one_that_hides_nan_too(device: str, temperature: float) -> None:
    cases = [Case(SamplingParams(temperature=temperature), [1], [], masked=masked) for masked in (True, True, False)]
    trial = make_round(cases, 64, device)
    trial.mask[0], trial.mask[1] = 0, ~1
    logits = torch.zeros(len(trial.tokens.rows), 64, device=device)
    logits[1, 0] = torch.nan
    buffers = trial.buffers()
    sample_rows(logits, 64, trial.tokens, trial.tables, buffers, vocab_mask=trial.mask)
    assert buffers.bad.tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("candidates", [16, 2048])
def test_rows_for_lossy_acceptance_hold_what_the_filters_left(device: str, candidates: int) -> None:
    params = [
        *(each for each in SETTINGS.values() if not each.greedy),
        # The border of one filter lies above or below what the other one needs to see.
        *(SamplingParams(top_k=k, min_p=min_p) for k in (2, 4, 30) for min_p in (0.5, 0.0625, 2.0**-12)),
        *(SamplingParams(top_p=top_p, min_p=min_p) for top_p in (0.25, 0.96875) for min_p in (0.5, 2.0**-12)),
    ]
    trial = make_round([Case(each, [1], [], thresholds=(1.0, 0.5)) for each in params], 90, device)
    logits = random_logits(len(trial.tokens.rows), 90, 8, device)
    buffers = trial.buffers(candidates)
    sample_rows(logits, 90, trial.tokens, trial.tables, buffers, lossy=True)
    for row, each in enumerate(params):
        history = TokenHistory([1], 90)
        expected = dense(LogitsProcessor(each).process(logits[row].cpu().numpy(), history, []), 90)
        np.testing.assert_array_equal(buffers.processed[row, :90].cpu().numpy(), expected)
        total = np.logaddexp.reduce(expected.astype(np.float64))
        assert float(buffers.totals[row]) == pytest.approx(total, abs=1e-12)
        assert int(buffers.sampled[row]) == trial.expected(logits, row, -1)


def test_sizes_are_checked() -> None:
    trial = one_row_each([SamplingParams()], 40, "cpu")
    other = one_row_each([SamplingParams()], 41, "cpu")
    logits = random_logits(len(trial.tokens.rows), 40, 0, "cpu")
    with pytest.raises(ValueError, match="logits"):
        sample_rows(logits, 41, other.tokens, other.tables, other.buffers())
    with pytest.raises(ValueError, match="tables"):
        sample_rows(logits, 40, trial.tokens, other.tables, trial.buffers())
    with pytest.raises(ValueError, match="buffers"):
        sample_rows(logits, 40, trial.tokens, trial.tables, other.buffers())
    with pytest.raises(ValueError, match="mask"):
        sample_rows(logits, 40, trial.tokens, trial.tables, trial.buffers(), vocab_mask=trial.mask[:, :1])


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [49152, 128256])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_large_vocabularies(vocab_size: int, scale: float) -> None:
    params = [replace(each, seed=seed) for seed in range(4) for each in SETTINGS.values()]
    params += [SamplingParams(top_k=k, top_p=0.875, seed=k) for k in (50, 5000, 40000)]
    trial = make_round([Case(each, [1, 2], [3]) for each in params], vocab_size, "cuda")
    check(trial, random_logits(len(trial.tokens.rows), vocab_size, 1, "cuda", scale))


@pytest.mark.gpu
def test_a_captured_round_follows_its_inputs() -> None:
    vocab_size = 5000
    trial = one_row_each(list(SETTINGS.values()), vocab_size, "cuda")
    logits, buffers = random_logits(len(trial.tokens.rows), vocab_size, 1, "cuda"), trial.buffers()

    def run() -> None:
        sample_rows(logits, vocab_size, trial.tokens, trial.tables, buffers)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in (2, 3):
        logits.copy_(random_logits(len(trial.tokens.rows), vocab_size, seed, "cuda"))
        trial.tokens.positions.add_(seed)
        graph.replay()
        replayed = buffers.sampled.clone()
        run()
        assert torch.equal(replayed, buffers.sampled)


DEPTH = 12


def chain(wanted: int | None, length: int) -> Case:
    params = SamplingParams(num_logprobs=wanted, temperature=0.0)
    return Case(params, [1, 2], [3], parents=list(range(-1, length - 1)), token_ids=list(range(length)))


def walked(trial: Round, committed: list[int], vocab_size: int) -> WalkOutputs:
    """As if `committed` tokens of each row had been sampled along its chain, the last one with any id."""
    device = trial.tokens.root.device
    out = walk_outputs(len(trial.cases) + 1, DEPTH, device)
    out.tokens[:], out.accepted[:] = -1, -1
    for row, count in enumerate(committed):
        out.num_tokens[row] = count
        for place in range(count):
            out.tokens[row, place] = place if place < count - 1 else (7 * row + 3) % vocab_size
            if place < count - 1:
                out.accepted[row, place] = trial.index(row, place)
    return out


def check_logprobs(trial: Round, logits: torch.Tensor, committed: list[int]) -> LogprobOutputs:
    # Every second row of a larger table.
    whole = LogprobOutputs.new(2 * len(trial.cases) + 2, DEPTH, logits.device)
    out = LogprobOutputs(whole.logprobs[::2], whole.top_ids[::2], whole.top_logprobs[::2])
    out.logprobs.fill_(5.0)
    walk = walked(trial, committed, trial.vocab_size)
    logprobs(logits, trial.vocab_size, trial.tokens, trial.tables, walk, out)
    sampler = RequestSampler(SamplingParams(), [1], trial.vocab_size)
    for row, case in enumerate(trial.cases):
        wanted = case.params.num_logprobs
        count = 0 if wanted is None else committed[row]
        assert (out.logprobs[row, count:] == 5.0).all()
        for place in range(count):
            row_logits, token_id = logits[trial.index(row, place - 1)].cpu(), int(walk.tokens[row, place])
            value, top = sampler.logprobs(row_logits, token_id, min(wanted or 0, trial.vocab_size))
            np.testing.assert_array_max_ulp(out.logprobs[row, place].cpu().numpy(), np.float32(value), 1)
            ids, values = out.top_ids[row, place].tolist(), out.top_logprobs[row, place].cpu().numpy()
            assert ids == [entry[0] for entry in top] + [-1] * (MAX_TOP_LOGPROBS - len(top))
            np.testing.assert_array_max_ulp(values[: len(top)], np.array([e[1] for e in top], np.float32), 1)
            assert np.isneginf(values[len(top) :]).all()
            if token_id in ids:
                assert float(out.logprobs[row, place]) == float(values[ids.index(token_id)])
    return out


@pytest.mark.parametrize("vocab_size", [20, 33, 2048, 5000])
def test_values_equal_the_reference(device: str, vocab_size: int) -> None:
    trial = make_round([chain(20, 11), chain(None, 3), chain(0, 2), chain(5, 0)], vocab_size, device)
    check_logprobs(trial, random_logits(len(trial.tokens.rows), vocab_size + 2, 5, device), [11, 2, 3, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_and_narrow_logits(device: str, dtype: torch.dtype) -> None:
    trial = make_round([chain(20, 3), chain(7, 3)], 4100, device)
    logits = random_logits(len(trial.tokens.rows), 4100, 6, device).to(dtype)
    logits[1], logits[5] = 3.0, torch.floor(logits[5].float()).to(dtype)
    # Large logits may all stand in one column of the tiles, and others be impossible.
    logits[2] = -torch.inf
    logits[2, 5::2048], logits[2, 7::300] = 9.0, 8.0
    check_logprobs(trial, logits, [4, 4])


def test_fewer_possible_tokens_than_wanted(device: str) -> None:
    trial = make_round([chain(20, 1)], 2500, device)
    logits = torch.full((len(trial.tokens.rows), 2500), -torch.inf, device=device)
    logits[:, [3, 2400, 90]] = torch.tensor([0.5, 1.5, 0.5], device=device)
    check_logprobs(trial, logits, [2])


def test_the_torch_reference_agrees() -> None:
    trial = make_round([chain(20, 11), chain(None, 3), chain(0, 2), chain(5, 0)], 40, "cpu")
    check_logprobs(trial, random_logits(len(trial.tokens.rows), 41, 5, "cpu").round(decimals=1), [11, 2, 3, 1])


def test_shapes_of_logprobs_are_checked() -> None:
    trial = make_round([chain(20, 1)], 40, "cpu")
    walk, logits = walked(trial, [1], 40), random_logits(5, 40, 0, "cpu")
    with pytest.raises(ValueError, match="outputs"):
        logprobs(logits, 40, trial.tokens, trial.tables, walk, LogprobOutputs.new(2, DEPTH + 1, "cpu"))
    with pytest.raises(ValueError, match="logits"):
        logprobs(logits[:, :30], 40, trial.tokens, trial.tables, walk, LogprobOutputs.new(2, DEPTH, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [49152, 128256])
def test_logprobs_of_large_vocabularies(vocab_size: int) -> None:
    trial = make_round([chain(20, 11), chain(5, 3)], vocab_size, "cuda")
    check_logprobs(trial, random_logits(len(trial.tokens.rows), vocab_size, 5, "cuda"), [11, 4])
