"""Log-probabilities of committed tokens equal the reference sampler's, rounded to float32."""

from __future__ import annotations

import interpreter  # noqa: F401  # loops to computed bounds
import numpy as np
import pytest
import torch
from sampling_cases import Case, Round, make_round, random_logits

from kernels.logprobs import logprobs
from kernels.sampling_state import MAX_TOP_LOGPROBS, LogprobOutputs, WalkOutputs
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import RequestSampler

DEPTH = 12


def chain(wanted: int | None, length: int) -> Case:
    params = SamplingParams(num_logprobs=wanted, temperature=0.0)
    return Case(params, [1, 2], [3], parents=list(range(-1, length - 1)), token_ids=list(range(length)))


def walked(trial: Round, committed: list[int], vocab_size: int) -> WalkOutputs:
    """As if `committed` tokens of each row had been sampled along its chain, the last one with any id."""
    device = trial.tokens.root.device
    out = WalkOutputs.new(len(trial.cases) + 1, DEPTH, device)
    out.num_tokens[:], out.tokens[:], out.accepted[:] = 0, -1, -1
    for row, count in enumerate(committed):
        out.num_tokens[row] = count
        for place in range(count):
            out.tokens[row, place] = place if place < count - 1 else (7 * row + 3) % vocab_size
            if place < count - 1:
                out.accepted[row, place] = trial.index(row, place)
    return out


def check(trial: Round, logits: torch.Tensor, committed: list[int]) -> LogprobOutputs:
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
    check(trial, random_logits(len(trial.tokens.rows), vocab_size + 2, 5, device), [11, 2, 3, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_and_narrow_logits(device: str, dtype: torch.dtype) -> None:
    trial = make_round([chain(20, 3), chain(7, 3)], 4100, device)
    logits = random_logits(len(trial.tokens.rows), 4100, 6, device).to(dtype)
    logits[1], logits[5] = 3.0, torch.floor(logits[5].float()).to(dtype)
    # Large logits may all stand in one column of the tiles, and others be impossible.
    logits[2] = -torch.inf
    logits[2, 5::2048], logits[2, 7::300] = 9.0, 8.0
    check(trial, logits, [4, 4])


def test_fewer_possible_tokens_than_wanted(device: str) -> None:
    trial = make_round([chain(20, 1)], 2500, device)
    logits = torch.full((len(trial.tokens.rows), 2500), -torch.inf, device=device)
    logits[:, [3, 2400, 90]] = torch.tensor([0.5, 1.5, 0.5], device=device)
    check(trial, logits, [2])


def test_the_torch_reference_agrees() -> None:
    trial = make_round([chain(20, 11), chain(None, 3), chain(0, 2), chain(5, 0)], 40, "cpu")
    check(trial, random_logits(len(trial.tokens.rows), 41, 5, "cpu").round(decimals=1), [11, 2, 3, 1])


def test_shapes_are_checked() -> None:
    trial = make_round([chain(20, 1)], 40, "cpu")
    walk, logits = walked(trial, [1], 40), random_logits(5, 40, 0, "cpu")
    with pytest.raises(ValueError, match="outputs"):
        logprobs(logits, 40, trial.tokens, trial.tables, walk, LogprobOutputs.new(2, DEPTH + 1, "cpu"))
    with pytest.raises(ValueError, match="logits"):
        logprobs(logits[:, :30], 40, trial.tokens, trial.tables, walk, LogprobOutputs.new(2, DEPTH, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [49152, 128256])
def test_large_vocabularies(vocab_size: int) -> None:
    trial = make_round([chain(20, 11), chain(5, 3)], vocab_size, "cuda")
    check(trial, random_logits(len(trial.tokens.rows), vocab_size, 5, "cuda"), [11, 4])
