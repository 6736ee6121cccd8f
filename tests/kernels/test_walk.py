"""The walk commits what the reference executor's loop would, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_cases import Case, Round, make_round, random_logits, walk_outputs

from kernels.reference.tree import walk as reference_walk
from kernels.sampling import sample_rows
from kernels.sampling_state import ILLEGAL_TOKEN, LAST_TOKEN, SampleBuffers, WalkOutputs
from kernels.tree import walk
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import AcceptRule, LogitsProcessor, RequestSampler, TokenHistory, choose, walk_tree

VOCAB = 6
TOKENS = st.integers(0, VOCAB - 1)


@st.composite
def trees(draw: st.DrawFn) -> Case:
    """Nodes with different tokens below one parent, over a vocabulary so small that walks go far."""
    nodes: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 14))):
        node = (draw(st.integers(-1, len(nodes) - 1)), draw(TOKENS))
        if node not in nodes:
            nodes.append(node)
    return Case(
        SamplingParams(
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 5)),
            frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
        ),
        prompt=draw(st.lists(TOKENS, min_size=1, max_size=3)),
        output=draw(st.lists(TOKENS, max_size=2)),
        parents=[parent for parent, _ in nodes],
        token_ids=[token_id for _, token_id in nodes],
        samples=draw(st.integers(0, 5)) > 0,
    )


def expected_walk(trial: Round, logits: torch.Tensor, row: int, max_depth: int) -> tuple[list[int], list[int]]:
    """Committed tokens and accepted nodes by the reference sampler, node by node."""
    case = trial.cases[row]
    below = dict(zip(zip(case.parents, case.token_ids, strict=True), range(len(case.parents)), strict=True))
    sampler = RequestSampler(case.params, case.prompt, trial.vocab_size)
    sampler.commit(case.output)
    tokens: list[int] = []
    accepted: list[int] = []
    node: int | None = -1
    while node is not None and len(tokens) < max_depth:
        position = len(case.prompt) + len(case.output) + len(tokens)
        tokens.append(sampler.sample(logits[trial.index(row, node)].cpu(), tokens, position))
        node = below.get((node, tokens[-1]))
        if node is not None:
            accepted.append(node)
    return tokens, accepted[: len(tokens) - 1]


def packed_outputs(num_rows: int, max_depth: int, device: torch.device) -> WalkOutputs:
    """Outputs as columns of one table, as a round's one copy to the host wants them."""
    table = torch.full((num_rows, 2 * max_depth + 3), 77, dtype=torch.int32, device=device)
    tokens, accepted = table[:, 2 : 2 + max_depth], table[:, 2 + max_depth : -1]
    return WalkOutputs(table[:, 0], tokens, accepted, table[:, 1])


def check(trial: Round, logits: torch.Tensor, max_depth: int) -> None:
    buffers = trial.buffers()
    out = packed_outputs(len(trial.cases) + 1, max_depth, logits.device)
    counts = trial.tables.counts.clone()
    sample_rows(logits, trial.vocab_size, trial.tokens, trial.tables, buffers)
    walk(trial.tokens, trial.tables, buffers, out, max_row_tokens=20, vocab_size=trial.vocab_size)
    assert not out.error.any()
    assert int(out.num_tokens[-1]) == 0
    for row, case in enumerate(trial.cases):
        tokens, accepted = expected_walk(trial, logits, row, max_depth) if case.samples else ([], [])
        assert int(out.num_tokens[row]) == len(tokens)
        assert out.tokens[row].tolist() == tokens + [-1] * (max_depth - len(tokens))
        indices = [trial.index(row, node) for node in accepted]
        assert out.accepted[row].tolist() == indices + [-1] * (max_depth - len(indices))
        if tokens:
            assert int(trial.tables.int_params[int(trial.tokens.table_rows[row]), LAST_TOKEN]) == tokens[-1]
        if case.params.penalized:
            added = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=trial.vocab_size)
            counts[int(trial.tokens.table_rows[row])] += added.to(counts)
    assert torch.equal(trial.tables.counts, counts)


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases=st.lists(trees(), min_size=1, max_size=3), seed=st.integers(0, 9), max_depth=st.sampled_from([3, 8, 20]))
def test_walks_equal_the_reference(device: str, cases: list[Case], seed: int, max_depth: int) -> None:
    trial = make_round(cases, VOCAB, device, seed=seed)
    check(trial, random_logits(len(trial.tokens.rows), VOCAB, seed, device), max_depth)


@settings(max_examples=examples(30))
@given(cases=st.lists(trees(), min_size=1, max_size=3), seed=st.integers(0, 9), max_depth=st.sampled_from([3, 8, 20]))
def test_the_torch_reference_does_too(cases: list[Case], seed: int, max_depth: int) -> None:
    trial = make_round(cases, VOCAB, "cpu", seed=seed)
    check(trial, random_logits(len(trial.tokens.rows), VOCAB, seed, "cpu"), max_depth)


def chain_round(device: str, length: int) -> tuple[Round, SampleBuffers]:
    """A chain of distinct tokens 1, 2, ... of a penalized request, and results that accept all of it."""
    params = SamplingParams(temperature=0.0, presence_penalty=0.5)
    case = Case(params, [0], [], parents=list(range(-1, length - 1)), token_ids=list(range(1, length + 1)))
    trial = make_round([case], length + 5, device)
    buffers = trial.buffers()
    buffers.bad.zero_()
    buffers.sampled[: length + 1] = torch.arange(1, length + 2, dtype=torch.int32)
    return trial, buffers


def test_a_whole_chain_is_accepted(device: str) -> None:
    trial, buffers = chain_round(device, 30)
    out = walk_outputs(2, 64, device)
    walk(trial.tokens, trial.tables, buffers, out, max_row_tokens=31, vocab_size=trial.vocab_size)
    assert out.num_tokens.tolist() == [31, 0]
    assert out.tokens[0, :31].tolist() == list(range(1, 32))
    assert out.accepted[0, :31].tolist() == [*range(1, 31), -1]


def check_accepted(out: WalkOutputs, num_tokens: int) -> None:
    """The first row commits the begin of a chain round."""
    assert out.tokens[0].tolist() == [*range(1, num_tokens + 1)] + [-1] * (8 - num_tokens)
    accepted = [*range(1, num_tokens)]
    assert out.accepted[0].tolist() == accepted + [-1] * (8 - len(accepted))


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("reference", [False, True])
def test_unusable_logits_on_the_walk_fail_the_row_behind_what_was_accepted(
    device: str, place: int, reference: bool
) -> None:
    trial, buffers = chain_round("cpu" if reference else device, 3)
    run = reference_walk if reference else walk
    buffers.bad[place] = 1
    out, counts = walk_outputs(2, 8, trial.tokens.root.device), trial.tables.counts.clone()
    run(trial.tokens, trial.tables, buffers, out, max_row_tokens=4, vocab_size=trial.vocab_size, lossy=False)
    assert out.error.tolist() == [1, 0]
    assert out.num_tokens.tolist() == [place, 0]
    check_accepted(out, place)
    counts[0, 1 : place + 1] += 1
    assert torch.equal(trial.tables.counts, counts)
    # Off the walk they do not matter.
    buffers.bad.zero_()
    buffers.bad[3], buffers.sampled[2] = 1, 0
    run(trial.tokens, trial.tables, buffers, out, max_row_tokens=4, vocab_size=trial.vocab_size, lossy=False)
    assert out.error.tolist() == [0, 0]
    assert out.num_tokens.tolist() == [3, 0]


@pytest.mark.parametrize("token", [-1, 8, 2**31 - 1])
@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("reference", [False, True])
def test_a_token_outside_the_vocabulary_fails_the_row_behind_what_was_accepted(
    device: str, token: int, lossy: bool, reference: bool
) -> None:
    trial, buffers = chain_round("cpu" if reference else device, 3)
    assert trial.vocab_size == 8
    run = partial(reference_walk if reference else walk, max_row_tokens=4)
    out, counts = walk_outputs(2, 8, trial.tokens.root.device), trial.tables.counts.clone()
    for place, (error, num_tokens) in enumerate([*((ILLEGAL_TOKEN, place) for place in range(4)), (0, 4)]):
        buffers.sampled[:4] = torch.arange(1, 5, dtype=torch.int32)
        # Off the walk, in a row of padding, it does not matter.
        buffers.sampled[place] = token
        run(trial.tokens, trial.tables, buffers, out, vocab_size=8, lossy=lossy)
        assert out.error.tolist() == [error, 0]
        assert out.num_tokens.tolist() == [num_tokens, 0]
        check_accepted(out, num_tokens)
        counts[0, 1 : num_tokens + 1] += 1
        assert torch.equal(trial.tables.counts, counts)


RULES = st.sampled_from([(1.0, 1.0), (1.0, 0.5), (0.25, 1.0), (0.375, 0.75), (1.0, 0.0625), (0.015625, 1.0)])
FILTERS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.75, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.875]),
    min_p=st.sampled_from([0.0, 0.0625]),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.sampled_from([0.0, 0.5]),
)


@st.composite
def lossy_trees(draw: st.DrawFn) -> Case:
    case = draw(trees())
    return replace(case, params=draw(FILTERS), thresholds=draw(RULES), masked=draw(st.booleans()))


def lossy_walk(trial: Round, logits: torch.Tensor, row: int) -> tuple[list[int], list[int]]:
    """Committed tokens and accepted nodes by the rule's reference."""
    case, rule = trial.cases[row], AcceptRule(*trial.cases[row].thresholds)
    history = TokenHistory(case.prompt, trial.vocab_size)
    history.extend(case.output)

    def sample(node: int, path: Sequence[int], children: Sequence[int]) -> int:
        if not rule.applies_to(case.params):
            return trial.expected(logits, row, node)
        index = trial.index(row, node)
        values = logits[index, : trial.vocab_size].cpu().numpy()
        mask = trial.allowed(index) if case.masked else None
        candidates = LogitsProcessor(case.params).process(values, history, path, mask)
        return choose(candidates, children, case.params, case.position(node), rule)

    return walk_tree(case.parents, case.token_ids, sample)


def check_lossy(cases: list[Case], vocab_size: int, seed: int, device: str, candidates: int = 2048) -> None:
    trial = make_round(cases, vocab_size, device, seed=seed)
    # Every row of the mask must leave a token.
    trial.mask |= 1
    logits = random_logits(len(trial.tokens.rows), vocab_size, seed, device, scale=1.5)
    buffers, out = trial.buffers(candidates), walk_outputs(len(cases) + 1, 20, device)
    sample_rows(logits, vocab_size, trial.tokens, trial.tables, buffers, vocab_mask=trial.mask, lossy=True)
    walk(trial.tokens, trial.tables, buffers, out, max_row_tokens=20, vocab_size=vocab_size, lossy=True)
    for row, case in enumerate(cases):
        tokens, accepted = lossy_walk(trial, logits, row) if case.samples else ([], [])
        assert out.tokens[row, : int(out.num_tokens[row])].tolist() == tokens
        assert out.accepted[row, : len(accepted)].tolist() == [trial.index(row, node) for node in accepted]


@settings(max_examples=examples(4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases=st.lists(lossy_trees(), min_size=1, max_size=3), seed=st.integers(0, 9))
def test_lossy_walks_equal_the_rule(device: str, cases: list[Case], seed: int) -> None:
    check_lossy(cases, VOCAB, seed, device)


@settings(max_examples=examples(40))
@given(cases=st.lists(lossy_trees(), min_size=1, max_size=3), seed=st.integers(0, 9))
def test_lossy_walks_of_the_torch_reference_do_too(cases: list[Case], seed: int) -> None:
    check_lossy(cases, VOCAB, seed, "cpu")


@pytest.mark.parametrize("candidates", [16, 2048])
def test_rejected_children_leave_the_rest_of_a_large_row(device: str, candidates: int) -> None:
    """Likely children, thresholds of almost one, many seeds: where none passes, several tiles are searched."""
    vocab_size = 2500
    likely = random_logits(20, vocab_size, 2, "cpu", scale=1.5).topk(2).indices.tolist()
    cases = []
    for seed in range(6):
        params = SamplingParams(seed=seed, top_p=(1.0, 0.875)[seed % 2], temperature=0.5)
        # Each case takes three tokens of the round.
        cases.append(Case(params, [1], [], [-1, -1], likely[3 * seed], thresholds=(0.999, 1.0)))
    check_lossy(cases, vocab_size, 2, device, candidates)
