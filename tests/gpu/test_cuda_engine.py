"""The engine on the GPU: determinism, faults, and memory that comes back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cuda_harness import VOCAB, jobs, make_paged_engine, small_model, texts
from harness import Answer, make_request, run_all
from local_draft import Guess, LocalDraft, noise, oracle
from page_integrity import check_memory
from threaded_engine import ThreadedEngine
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError, InternalError
from outrider.models.decoder import CausalLM
from outrider.protocol.generation import GenerationUpdate
from outrider.sampling.params import SamplingParams
from outrider.tree.author import TreeAuthor
from verify_service.engine.build import build
from verify_service.engine.loading import load
from verify_service.engine.request import Request
from verify_service.executors.cuda import CudaExecutor

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0)
SIZES = {"max_running": 8, "max_round_tokens": 32, "max_nodes": 24}


class Running(NamedTuple):
    engine: ThreadedEngine
    executor: CudaExecutor


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines; in the end nothing may be left in them."""
    made: list[Running] = []

    def begin(model: CausalLM, guess: Guess | None = None, **options: object) -> Running:
        engine, executor = make_paged_engine(model, **SIZES | options)  # type: ignore[arg-type]
        made.append(Running(engine, executor))
        if guess is not None:
            engine.draft_connected(LocalDraft(engine, VOCAB, guess))
        engine.start()
        return made[-1]

    yield begin
    for engine, executor in made:
        engine.stop()
        check_memory(engine.memory)
        assert engine.memory.num_used == engine.memory.radix.num_pages, "a page leaked"
        assert len(executor.rows) == 0, "a row leaked"


def content_of(answers: list[Answer]) -> list[tuple[list[int], list[object]]]:
    """Tokens, and logprobs with all their bits."""
    return [(answer.token_ids, [entry for update in answer.updates for entry in update.logprobs]) for answer in answers]


@pytest.mark.parametrize(
    ("dtype", "names"), [(torch.bfloat16, ["none", "right", "random", "both"]), (torch.float16, ["both"])]
)
def test_deterministic_answers_are_the_same_bit_by_bit(
    small_models: Callable[..., CausalLM], start: Start, dtype: torch.dtype, names: list[str]
) -> None:
    """With any draft, in any batch, after preemptions and with prefixes from the cache."""
    model = small_models(dtype=dtype)
    truth = run_all(start(model, deterministic=True).engine, jobs(), 1, speculate=False)
    right, random_nodes = oracle(texts(truth), VOCAB), noise(9, VOCAB)

    def both(author: TreeAuthor) -> None:
        right(author)
        random_nodes(author)

    guesses = {"none": None, "right": right, "random": random_nodes, "both": both}
    num_preemptions = 0
    for name in names:
        for width, num_pages in ((1, 256), (4, 256), (8, 20)):
            engine, _ = start(model, guesses[name], deterministic=True, num_pages=num_pages)
            answers = run_all(engine, jobs(), width)
            assert content_of(answers) == content_of(truth), (name, width, num_pages)
            accepted = sum(answer.num_accepted for answer in answers)
            assert accepted > 0 or name in ("none", "random")
            if num_pages == 20:
                num_preemptions += engine.scheduler.num_preemptions
            else:
                assert any(update.cached_prompt_tokens for answer in answers for update in answer.updates)
    # Not with each draft: answers that are guessed right end before memory is short.
    assert num_preemptions > 0


def test_unusable_logits_fail_one_request_alone_and_leave_no_trace(tmp_path: Path, start: Start) -> None:
    model = small_model(tmp_path, "Llama", 64, torch.bfloat16, "cuda")
    poison = VOCAB - 1
    with torch.inference_mode():
        model.embedding[poison] = torch.nan  # type: ignore[attr-defined]
    plain = [(prompt, params) for prompt, params in jobs() if poison not in prompt]
    # Deterministic, so that what others answer shows the least trace. Their pages were those that failed before.
    engine, _ = start(model, deterministic=True, num_pages=48)
    expected = run_all(engine, plain, 4)
    for bad in ([poison], [1, 2, 3, poison, 4, 5, 6, 7, 8, 9, 10]):
        failed, *others = run_all(engine, [(bad, GREEDY), *plain], 4)
        assert isinstance(failed.updates[-1].error, InternalError) and not failed.token_ids
        assert content_of(others) == content_of(expected)


def cancel_after(engine: ThreadedEngine, request: Request, num_updates: int) -> None:
    """Have a request cancelled at its first update, its second, ...; it may have ended by then."""
    left = num_updates

    def sink(update: GenerationUpdate) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            engine.cancel(request)

    request.sink = sink
    if not num_updates:
        engine.ask(lambda: engine.cancel(request))


def test_memory_is_back_after_a_thousand_requests_of_which_many_are_cancelled(
    small_models: Callable[..., CausalLM], start: Start
) -> None:
    source = random.Random(1)
    engine, executor = start(small_models(), noise(3, VOCAB), num_pages=128)
    params = [params for _, params in jobs()]

    def batch(count: int) -> None:
        waiting: list[Answer] = []
        for _ in range(count):
            answer = Answer()
            prompt = [source.randrange(VOCAB) for _ in range(source.randint(1, 40))]
            request = make_request(answer, prompt, source.choice(params), VOCAB, max_tokens=source.randint(1, 8))
            if source.random() < 0.4:
                cancel_after(engine, request, source.randint(0, 3))
            else:
                waiting.append(answer)
            engine.submit(request)
        for answer in waiting:
            assert answer.done.wait(60) and answer.updates[-1].finish_reason is not None

    batch(50)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        batch(50)
    engine.stop()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    assert len(executor.rows) == 0
    assert engine.memory.num_used == engine.memory.radix.num_pages


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint as the service wants it."""
    small_model(tmp_path, "Llama", 64)
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def options(folder: Path, **changes: object) -> VerifyOptions:
    values: dict[str, object] = {"model": str(folder), "device": "cuda", "max_total_tokens": 4096, "draft": ()}
    return VerifyOptions(**values | {"max_running_requests": 4, "max_draft_tokens": 8} | changes)  # type: ignore[arg-type]


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Leaves this process so many bytes of device memory: other tests may run on the same device meanwhile."""

    def leave(left: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + left) / total)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_service_is_built_from_options(folder: Path) -> None:
    path, model = load(options(folder))
    parts = build(options(folder), path, model)
    assert model.device.type == "cuda" and parts.limits.root_apart
    assert len(parts.executor.graphs) > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "left", "pattern"),
    [
        ({"max_total_tokens": 0, "mem_fraction_static": 0.001}, None, r"--mem-fraction-static: 0\.001 .*; raise it"),
        # A quarter of a TiB.
        (
            {"max_total_tokens": 1 << 28, "page_size": 1024},
            None,
            r"the GPU has no memory for KV cache.*lower --max-total-tokens",
        ),
        ({"max_total_tokens": 1 << 18}, 8 << 20, r"the GPU has no memory for KV cache"),
    ],
)
def test_a_start_without_memory_says_what_to_change(
    folder: Path, limit: Callable[[int], None], changes: dict[str, object], left: int | None, pattern: str
) -> None:
    path, model = load(options(folder))
    if left is not None:
        limit(left)
    with pytest.raises(ConfigError, match=pattern):
        build(options(folder, **changes), path, model)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 16, 1 << 30))
    monkeypatch.setattr("verify_service.engine.loading.load_model", None)
    with pytest.raises(ConfigError, match=r"the weights take .* in bfloat16.* choose a smaller model"):
        load(options(folder, dtype="bfloat16"))
