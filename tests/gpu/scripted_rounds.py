"""Requests run through an executor without an engine: the same rounds every time, whatever time they take."""

from __future__ import annotations

import random
from collections.abc import Sequence

from cuda_harness import VOCAB
from harness import Answer, make_request

from outrider.protocol.generation import TokenLogprobs
from outrider.sampling.params import SamplingParams
from verify_service.engine.memory import Memory
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Nodes
from verify_service.executors.cuda import CudaExecutor

Jobs = Sequence[tuple[Sequence[int], SamplingParams]]
Answers = list[tuple[list[int], list[TokenLogprobs]]]
"""Of every request: its answer, and the answer's logprobs."""

CHUNK = 16
ANSWER_LEN = 20


def run_rounds(
    executor: CudaExecutor, memory: Memory, jobs: Jobs, width: int, guesses: Answers | None = None
) -> Answers:
    """Run jobs, `width` at a time, with trees of right tokens, by `guesses`, and wrong ones; no trees without it."""
    answers: Answers = [([], []) for _ in jobs]
    waiting = list(enumerate(jobs))
    running: list[tuple[int, Request]] = []
    while waiting or running:
        while waiting and len(running) < width:
            number, (prompt, params) = waiting.pop(0)
            request = make_request(Answer(), prompt, params, VOCAB)
            memory.attach(request)
            running.append((number, request))
        entries = [_entry(memory, request, guesses and guesses[number][0]) for number, request in running]
        results = executor.launch(entries).wait()
        for (number, request), entry, result in zip(list(running), entries, results, strict=True):
            tokens = list(result.token_ids)
            request.cached_len += entry.num_extend + max(len(tokens) - 1, 0)
            request.tokens += tokens
            answers[number][0].extend(tokens)
            answers[number][1].extend(result.logprobs)
            if len(answers[number][0]) >= ANSWER_LEN:
                running.remove((number, request))
                memory.release(request)
                executor.forget(request)
    return answers


def _entry(memory: Memory, request: Request, text: list[int] | None) -> Entry:
    missing = request.committed_len - request.cached_len
    if missing > 1:
        entry = Entry(request, min(missing - 1, CHUNK))
    else:
        done = request.committed_len - request.prompt_len
        entry = Entry(request, 1, Nodes() if text is None else _tree(text[done : done + 3], request.committed_len))
    length = request.cached_len + entry.num_tokens
    if not memory.reserve(request, length):
        raise RuntimeError("out of pages")
    return entry


def _tree(right: list[int], seed: int) -> Nodes:
    """The right chain cut at a random length, and one wrong node beside each of its nodes."""
    source = random.Random(seed)
    right = right[: source.randint(0, 3)]
    tokens, parents, depths = [], [], []
    parent = -1
    for depth, token in enumerate(right, 1):
        wrong = (token + 1 + source.randrange(VOCAB - 1)) % VOCAB
        # In either order, so that what is accepted must be moved.
        pair = [token, wrong] if source.random() < 0.5 else [wrong, token]
        tokens += pair
        parents += [parent, parent]
        depths += [depth, depth]
        parent = len(tokens) - 2 + pair.index(token)
    return Nodes(tokens, parents, depths)
