"""On a CPU, in bfloat16, the answer to a request has the same bits whatever runs beside it.

Log-probabilities are compared, which tell of every bit where tokens tell of near ties alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from cpu_rows import round_to_four_bits
from cuda_harness import small_model
from harness import PAGE_SIZE, Answer, make_engine, make_request, run_all
from local_draft import LocalDraft, oracle
from threaded_engine import ThreadedEngine

from kernels.cpu.isa import Isa
from kernels.cpu.products import MAX_ROWS
from outrider.models.decoder import CausalLM
from outrider.models.loader import load_model
from outrider.protocol.generation import TokenLogprobs
from outrider.sampling.params import SamplingParams
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Nodes
from verify_service.executors.torch_executor import TorchExecutor

pytestmark = pytest.mark.usefixtures("isa")
VOCAB = 64
PARAMS = SamplingParams(temperature=0.7, seed=3, num_logprobs=2)
PAGES = 64
"""Of each request."""
NUM_TOKENS = 24
Output = tuple[list[int], list[TokenLogprobs]]


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = tmp_path_factory.mktemp("steady")
    return small_model(folder, head_dim=32, dtype=torch.bfloat16, vocab_size=VOCAB)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed + length)
    return torch.randint(0, VOCAB - 4, (length,), generator=generator).tolist()


def asked(length: int, place: int = 0) -> Request:
    """A request with pages of its own."""
    request = make_request(Answer(), prompt_of(length), PARAMS, VOCAB, max_tokens=100)
    request.pages = list(range(place * PAGES, (place + 1) * PAGES))
    return request


def run(executor: TorchExecutor, *entries: Entry) -> list[Output]:
    """A round, and its commits."""
    results = executor.launch(entries).wait()
    for entry, result in zip(entries, results, strict=True):
        entry.request.cached_len += entry.num_extend + result.num_accepted
        entry.request.tokens += result.token_ids
    return [(list(result.token_ids), list(result.logprobs)) for result in results]


def alone(model: CausalLM, length: int) -> Output:
    """The answer to a prompt by rounds of one root."""
    executor, request = TorchExecutor(model, PAGES, PAGE_SIZE), asked(length)
    tokens, logprobs = run(executor, Entry(request, length))[0]
    while len(tokens) < NUM_TOKENS:
        more = run(executor, Entry(request, 1))[0]
        tokens, logprobs = tokens + more[0], logprobs + more[1]
    return tokens, logprobs


def tree(right: Sequence[int], num_nodes: int) -> Nodes:
    """The right nodes one below the other, behind wrong ones at the root."""
    others = [token for token in range(VOCAB) if token != right[0]][: num_nodes - len(right)]
    parents = [-1] * (len(others) + 1) + list(range(len(others), num_nodes - 1))
    depths = [1] * len(others) + list(range(1, len(right) + 1))
    return Nodes([*others, *right], parents, depths, range(num_nodes))


@pytest.mark.parametrize(
    ("length", "extend", "num_nodes"),
    [(60, 60, 20), (MAX_ROWS, MAX_ROWS, 1), (100, 100, 20), (10, 1, MAX_ROWS), (10, 1, 70)],
)
def test_nodes_change_no_bit_of_a_prompt_or_a_root_nor_have_others_than_roots(
    steady: CausalLM, length: int, extend: int, num_nodes: int
) -> None:
    tokens, logprobs = alone(steady, length)
    executor, request = TorchExecutor(steady, PAGES, PAGE_SIZE), asked(length)
    known = 0
    if extend < length:
        run(executor, Entry(request, length))
        known = 1
    right = tokens[known : known + min(num_nodes, 12)]
    found = run(executor, Entry(request, extend, tree(right, num_nodes)))[0]
    end = known + len(right) + 1
    assert found == (tokens[known:end], logprobs[known:end]), "all right nodes are accepted"
    # The KV that accepted nodes leave behind is that of roots.
    assert run(executor, Entry(request, 1))[0] == (tokens[end : end + 1], logprobs[end : end + 1])


def test_prompts_of_others_change_no_bit_of_a_root_or_a_prompt(steady: CausalLM) -> None:
    lengths = (10, 80, 100, 30, 50)
    expected = [alone(steady, length) for length in lengths]
    requests = [asked(length, place) for place, length in enumerate(lengths)]
    executor = TorchExecutor(steady, PAGES * len(lengths), PAGE_SIZE)
    first = run(executor, Entry(requests[0], lengths[0]))[0]
    entries = [Entry(requests[0], 1), *(Entry(one, one.prompt_len) for one in requests[1:])]
    results = run(executor, *entries)
    results[0] = first[0] + results[0][0], first[1] + results[0][1]
    for (tokens, logprobs), (wanted, of_wanted) in zip(results, expected, strict=True):
        assert (tokens, logprobs) == (wanted[: len(tokens)], of_wanted[: len(tokens)])


def outputs_of(answers: Sequence[Answer]) -> list[Output]:
    return [(answer.token_ids, [entry for update in answer.updates for entry in update.logprobs]) for answer in answers]


@pytest.mark.parametrize(("num_pages", "keep_prefixes"), [(512, False), (90, False), (100, True)])
def test_answers_have_the_same_bits_with_drafts_beside_others_and_after_preemption(
    steady: CausalLM, engines: list[ThreadedEngine], num_pages: int, keep_prefixes: bool
) -> None:
    jobs = [(prompt_of(length), PARAMS) for length in (5, 150, 60, 81, 40, 110, 63, 70)]

    def engine(num_pages: int) -> ThreadedEngine:
        # 80: the prompt of 81 ends in a chunk of one row, those of 110 and 150 in more.
        found = make_engine(
            steady, num_pages, keep_prefixes=keep_prefixes, chunk_size=80, steady_rows=steady.steady_rows
        )
        engines.append(found)
        return found

    plain = engine(512)
    plain.start()
    truth = run_all(plain, jobs, width=1, speculate=False, max_tokens=40)
    plain.stop()
    drafted = engine(num_pages)
    texts = {tuple(prompt): prompt + answer.token_ids for (prompt, _), answer in zip(jobs, truth, strict=True)}
    drafted.draft_connected(LocalDraft(drafted, VOCAB, oracle(texts, VOCAB)))
    drafted.start()
    # Of a prefix cache, a preempted answer would find a part of its own prompt, and cut the rest elsewhere.
    answers = run_all(drafted, jobs, max_tokens=40, skip_prefix_cache=True)
    assert outputs_of(answers) == outputs_of(truth)
    assert sum(answer.num_accepted for answer in answers) > 0
    assert (drafted.scheduler.num_preemptions > 0) is (num_pages < 512)


def test_neither_cached_prefixes_nor_drafts_change_a_bit_if_codes_are_multiplied_as_they_are(
    tmp_path: Path, isa: Isa, engines: list[ThreadedEngine]
) -> None:
    if not isa.has_dots("four"):
        pytest.skip("prompts of more than 64 tokens have other bits than shorter chunks of them")
    small_model(tmp_path, head_dim=32, dtype=torch.bfloat16, vocab_size=VOCAB)
    round_to_four_bits(tmp_path)
    model = load_model(tmp_path, torch.bfloat16)
    jobs = [(prompt_of(150)[:length] + prompt_of(40), PARAMS) for length in (150, 110, 150, 70)]
    results, texts = [], {}
    for keep_prefixes, chunk_size, drafted in ((False, 512, False), (True, 80, False), (True, 80, True)):
        engine = make_engine(
            model, 512, keep_prefixes=keep_prefixes, chunk_size=chunk_size, steady_rows=model.steady_rows
        )
        engines.append(engine)
        if drafted:
            engine.draft_connected(LocalDraft(engine, VOCAB, oracle(texts, VOCAB)))
        engine.start()
        answers = run_all(engine, jobs, width=len(jobs) if drafted else 1, speculate=drafted, max_tokens=10)
        assert any(update.cached_prompt_tokens for one in answers for update in one.updates) is keep_prefixes
        assert any(answer.num_accepted for answer in answers) is drafted
        results.append(outputs_of(answers))
        texts = {tuple(prompt): prompt + one.token_ids for (prompt, _), one in zip(jobs, answers, strict=True)}
    assert results[0] == results[1] == results[2]
