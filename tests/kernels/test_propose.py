"""The best children of draft nodes, against the reference and against the noise as verify has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.reference import proposals as reference
from kernels.sampling import propose
from kernels.sampling_state import GROUP, RANK_BY_NOISE, ProposeBuffers, ProposeTables
from outrider.sampling import noise

SEED = 2**63 + 12345
# Scores are a few dozen at most; noise and sum are float32.
NEAR = {"rtol": 0.0, "atol": 4e-5}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same logits at every run."""
    torch.manual_seed(3)


def make_tables(device: str) -> ProposeTables:
    """Greedy; warm; warm without noise; hot with another seed."""
    tables = ProposeTables.new(4, "cpu")
    tables.floats.copy_(torch.tensor([[0.0, 0.8], [0.7, 0.8], [0.7, 0.8], [1.3, 1.0]]))
    for row, (seed, choice, flags) in enumerate(
        [(SEED, 0, RANK_BY_NOISE), (SEED, 0, RANK_BY_NOISE), (SEED, 0, 0), (7, 3, RANK_BY_NOISE)]
    ):
        words = np.array([seed & 0xFFFFFFFF, seed >> 32, choice, flags], np.uint32).view(np.int32)
        tables.ints[row] = torch.from_numpy(words)
    return ProposeTables(tables.floats.to(device), tables.ints.to(device))


def run(
    logits: Tensor,
    rows: list[int],
    branching: int,
    vocab_limit: int | None = None,
    target_ids: Tensor | None = None,
    expected: bool = False,
) -> tuple[Tensor, Tensor]:
    device = logits.device.type
    limit = logits.shape[1] if vocab_limit is None else vocab_limit
    where = torch.tensor(rows, dtype=torch.int32, device=device)
    positions = torch.arange(5, 5 + len(rows), dtype=torch.int32, device=device)
    tokens = torch.full((len(rows), branching), 77, dtype=torch.int32, device=device)
    scores = torch.full((len(rows), branching), 77.0, device=device)
    tables = make_tables(device)
    buffers = ProposeBuffers.new(len(rows) + 1, logits.shape[1], device)
    if expected:
        reference.propose(logits, where, positions, tables, buffers, tokens, scores, limit, target_ids)
    else:
        buffers.masses.fill_(torch.nan)
        buffers.tops.fill_(torch.inf)
        propose(
            logits, where, positions, tables, buffers, tokens, scores, vocab_limit=limit, target_ids=target_ids
        )  # fmt: skip
    return tokens, scores


def check(logits: Tensor, rows: list[int], branching: int, **options: object) -> tuple[Tensor, Tensor]:
    """The same tokens and scores as the reference's, but for the order of nearly equal ones, and what holds of any."""
    tokens, scores = run(logits, rows, branching, **options)  # type: ignore[arg-type]
    wanted, wanted_scores = run(logits, rows, branching + 1, expected=True, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(scores, wanted_scores[:, :-1], **NEAR)
    close = wanted_scores.diff(dim=1).abs() < 1e-4
    close[:, 1:] |= close[:, :-1].clone()
    assert bool(((tokens == wanted[:, :-1]) | close).all())
    there = tokens >= 0
    assert torch.equal(scores.isfinite(), there)
    assert bool((scores <= 0).all())
    assert bool((scores.exp().sum(1) <= 1 + 1e-4).all())
    return tokens, scores


@pytest.mark.parametrize("branching", [1, 4, 5, 16])
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(16, torch.float16), (GROUP, torch.float32), (1000, torch.float16), (3077, torch.float32)],
)
def test_equals_reference(dtype: torch.dtype, vocab_size: int, branching: int, device: str) -> None:
    logits = (torch.randn(6, vocab_size) * 3).to(dtype).to(device)
    tokens, _ = check(logits, [0, 1, 2, -1, 3, 1], branching)
    assert not (tokens[[0, 1, 2, 4, 5]] < 0).any()
    assert (tokens[3] == -1).all()


@pytest.mark.parametrize("row", [1, 3])
def test_the_best_is_what_verify_would_sample(row: int, device: str) -> None:
    """From the same logits: the argmax of logits / T and the shared noise of the position behind the node."""
    logits = torch.randn(3, 2000) * 2
    tokens, scores = run(logits.to(device), [row] * 3, 8)
    seed, choice, temperature, tau = (SEED, 0, 0.7, 0.8) if row == 1 else (7, 3, 1.3, 1.0)
    for index in range(3):
        perturbed = logits[index].numpy() / np.float32(temperature)
        perturbed = perturbed + noise.gumbel(seed, choice, 5 + index + 1, vocab_size=2000)
        best = np.argsort(-perturbed, kind="stable")[:8]
        assert tokens[index].tolist() == best.tolist()
        ranks = perturbed.astype(np.float64) / tau
        expected = (ranks - np.logaddexp.reduce(ranks))[best]
        np.testing.assert_allclose(scores[index].cpu().numpy(), expected, rtol=0, atol=4e-5)


def test_a_draft_vocabulary_takes_the_noise_of_target_ids(device: str) -> None:
    """And stands for what the same logits over the target's vocabulary would give."""
    generator = torch.Generator().manual_seed(0)
    target_ids = torch.randperm(5000, generator=generator)[:700].sort().values
    logits = torch.randn(4, 700, generator=generator)
    wide = torch.full((4, 5000), -torch.inf)
    wide[:, target_ids] = logits
    mapped = check(logits.to(device), [0, 1, 2, 3], 6, vocab_limit=5000, target_ids=target_ids.int().to(device))
    whole = check(wide.to(device), [0, 1, 2, 3], 6)
    assert torch.equal(mapped[0], whole[0])
    torch.testing.assert_close(mapped[1], whole[1], **NEAR)


def test_ids_past_the_limit_are_neither_proposed_nor_counted(device: str) -> None:
    logits = torch.randn(3, 300)
    logits[:, 290:] = 50.0
    logits[1, 295] = torch.nan
    tokens, scores = check(logits.to(device), [0, 1, 3], 4, vocab_limit=290)
    assert bool((tokens < 290).all()) and bool((tokens >= 0).all())
    short = run(logits[:, :290].contiguous().to(device), [0, 1, 3], 4)
    assert torch.equal(tokens, short[0])
    torch.testing.assert_close(scores, short[1], **NEAR)


def test_target_ids_that_are_illegal_are_left_out(device: str) -> None:
    ids = torch.arange(100, dtype=torch.int32)
    ids[3], ids[50] = -1, 500
    logits = torch.randn(2, 100)
    logits[:, [3, 50]] = 9.0
    tokens, _ = check(logits.to(device), [0, 1], 16, vocab_limit=120, target_ids=ids.to(device))
    assert not torch.isin(tokens.cpu(), torch.tensor([-1, 500])).any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_unusable_logits_propose_nothing(value: float, device: str) -> None:
    logits = torch.randn(5, 400)
    logits[1, 17] = logits[2, 399] = logits[3, 0] = value
    tokens, _ = check(logits.to(device), [0, 0, 1, 2, 3], 4)
    assert (tokens[1:4] == -1).all()
    assert (tokens[[0, 4]] >= 0).all()


def test_fewer_tokens_than_asked_for(device: str) -> None:
    logits = torch.full((4, 200), -torch.inf)
    logits[0, [5, 190]] = torch.tensor([1.0, 2.0])
    logits[1, 7] = 3.0
    logits[2, [64, 65, 1]] = -1e30
    tokens, scores = check(logits.to(device), [0, 1, 0, 1], 4)
    assert tokens.tolist()[:3] == [[190, 5, -1, -1], [7, -1, -1, -1], [1, 64, 65, -1]]
    assert float(scores[1, 0]) == 0.0
    assert (tokens[3] == -1).all(), "a row without any token"


def test_ties_go_to_the_lower_place(device: str) -> None:
    logits = torch.zeros(2, 1500)
    logits[0, ::2] = -0.0
    logits[1, [1400, 900, 901, 64, 63]] = 5.0
    tokens, _ = check(logits.to(device), [0, 2], 5)
    assert tokens.tolist() == [[0, 1, 2, 3, 4], [63, 64, 900, 901, 1400]]


def test_all_of_the_best_in_one_group(device: str) -> None:
    logits = torch.randn(2, 2048)
    logits[:, 640:704] += 30
    tokens, _ = check(logits.to(device), [0, 1], 16)
    assert bool(((tokens >= 640) & (tokens < 704)).all())


def test_tiny_temperatures_are_greedy(device: str) -> None:
    logits = torch.randn(1, 500).to(device)
    tables = make_tables(device)
    tables.floats[1, 0] = 1e-9
    tokens = torch.empty(1, 3, dtype=torch.int32, device=device)
    scores = torch.empty(1, 3, device=device)
    where = (torch.ones(1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device))
    propose(logits, *where, tables, ProposeBuffers.new(1, 500, device), tokens, scores, vocab_limit=500)
    assert tokens[0].tolist() == logits[0].topk(3).indices.tolist()
    assert bool(scores.isfinite().all()) and float(scores[0, 0]) == 0.0


def test_rows_of_a_wider_matrix(device: str) -> None:
    wide = torch.randn(3, 900).to(device)
    check(wide[:, :777], [0, 1, 2], 4)


def test_what_does_not_fit_is_refused(device: str) -> None:
    logits = torch.randn(2, 100, device=device)
    with pytest.raises(ValueError, match="17"):
        run(logits, [0, 0], 17)
    with pytest.raises(ValueError, match="3 rows"):
        run(logits, [0, 0, 0], 4)
    with pytest.raises(ValueError, match="target ids"):
        run(logits, [0, 0], 4, target_ids=torch.zeros(99, dtype=torch.int32, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("branching", [4, 8, 16])
@pytest.mark.parametrize("vocab_size", [32000, 49152, 128256])
def test_large_vocabularies(vocab_size: int, branching: int, device: str) -> None:
    logits = (torch.randn(32, vocab_size) * 3).to(device)
    rows = [index % 4 if index % 7 else -1 for index in range(32)]
    check(logits, rows, branching, vocab_limit=vocab_size - 100)
    target_ids = torch.randperm(vocab_size + 10000)[:vocab_size].sort().values.int().to(device)
    check(logits, rows, branching, vocab_limit=vocab_size, target_ids=target_ids)


@pytest.mark.gpu
def test_replays_of_a_graph_read_new_inputs(device: str) -> None:
    logits = torch.randn(8, 49152, device=device)
    rows, positions = (torch.zeros(8, dtype=torch.int32, device=device) for _ in range(2))
    tables, buffers = make_tables(device), ProposeBuffers.new(8, 49152, device)
    tokens = torch.empty(8, 4, dtype=torch.int32, device=device)
    scores = torch.empty(8, 4, device=device)
    inputs = (logits, rows, positions, tables)
    propose(*inputs, buffers, tokens, scores, vocab_limit=49152)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        propose(*inputs, buffers, tokens, scores, vocab_limit=49152)
    for turn in range(3):
        logits.normal_()
        rows.copy_(torch.arange(8) % 4 - int(turn == 2))
        positions.fill_(turn * 100)
        graph.replay()
        wanted, wanted_scores = torch.empty_like(tokens), torch.empty_like(scores)
        reference.propose(*inputs, buffers, wanted, wanted_scores, 49152, None)
        assert torch.equal(tokens, wanted)
        torch.testing.assert_close(scores, wanted_scores, **NEAR)
