"""A rank that fails inside a forward, in whatever phase, ends the engine, and every request hears its name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from cuda_harness import RANKS_VOCAB, jobs
from harness import Answer, make_engine, make_request
from rank_threads import RankEnd, linked, ranked
from threaded_engine import ThreadedEngine
from torch import Tensor

from outrider.errors import UnavailableError
from outrider.models.decoder import CausalLM

Phase = Callable[[ThreadedEngine, list[Answer], int], bool]
PHASES: dict[str, Phase] = {
    "the first round": lambda engine, answers, num_tokens: True,
    "a later round": lambda engine, answers, num_tokens: all(len(answer.token_ids) > 2 for answer in answers),
    "a chunk of a prompt, others have begun": lambda engine, answers, num_tokens: (
        num_tokens >= 16 and any(answer.token_ids for answer in answers)
    ),
    "a round while a preempted request waits": lambda engine, answers, num_tokens: (
        engine.scheduler.num_preemptions > 0 and len(engine.scheduler.waiting) > 0
    ),
}
"""Whether it is now, by the tokens of the forward under way."""


@pytest.mark.parametrize("is_linked", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_all_requests_hear_which_rank_has_ended(
    ranks_folder: Path, engines: list[ThreadedEngine], phase: str, is_linked: bool
) -> None:
    answers = [Answer() for _ in range(4)]
    num_sums = 0

    def prepare(part: CausalLM) -> None:
        exchange = part.exchange
        assert exchange is not None
        add = exchange._add

        def add_or_end(stream: Tensor | None, part: Tensor, norm: object) -> Tensor:
            nonlocal num_sums
            num_sums += PHASES[phase](engine, answers, part.shape[0])
            if num_sums == 3:
                # Behind a layer and a half: rank 0 has this rank's parts until here, and waits for the next.
                raise RankEnd
            return add(stream, part, norm)  # type: ignore[arg-type]

        exchange._add = add_or_end  # type: ignore[method-assign,assignment]

    with ExitStack() as stack:
        if is_linked:
            engine = stack.enter_context(linked(ranks_folder, 2, prepare=prepare, num_pages=24))
        else:
            engine = make_engine(stack.enter_context(ranked(ranks_folder, 2, prepare=prepare)), 24, chunk_size=16)
        engines.append(engine)
        for answer, (prompt, params) in zip(answers, jobs(), strict=False):
            engine.submit(make_request(answer, prompt, params, RANKS_VOCAB, 24))
        engine.start()
        for answer in answers:
            assert answer.done.wait(60)
    assert num_sums == 3, "it has not come to that"
    assert engine.stopping
    for answer in answers:
        error = answer.updates[-1].error
        assert isinstance(error, UnavailableError) and "rank 1 of 2" in error.message
