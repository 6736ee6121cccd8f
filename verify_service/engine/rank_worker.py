"""The process of a rank above 0: `outrider.host.launch` calls `main` with FD, RANK and WORLD.

It loads its part of the model, and repeats what rank 0 does until the kernel ends it along with rank 0. If it cannot go
on, it leaves the reason in the memory that the ranks share.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from outrider.attention.paged import PromptShape
from outrider.config.verify import VerifyOptions
from outrider.errors import EXIT_CONFIG, EXIT_FAILURE, ConfigError, InternalError
from outrider.graphs import compile_aside
from outrider.host.rank_memory import RankMemory
from outrider.host.worker import pin_to_cores
from outrider.logs import configure_logging, get_logger
from outrider.models.decoder import CausalLM
from verify_service.engine.build import choose_threads, following_executor, link_ranks
from verify_service.engine.loading import load, load_draft
from verify_service.executors.cuda import CudaExecutor
from verify_service.executors.ranks import (
    CAPTURE,
    CAPTURE_SMALL,
    LOGITS,
    PAGES,
    PROMPTS,
    ROUND,
    START,
    RankedDrafter,
    follow,
)
from verify_service.executors.round_buffers import Bucket

log = get_logger(__name__)


def main(argv: list[str]) -> int:
    """Follow rank 0; returns the exit code when this rank cannot go on."""
    descriptor, rank, world = map(int, argv)
    memory = RankMemory(descriptor, rank, world)
    kind, body = memory.receive()
    if kind != START:
        raise InternalError(f"the first message of rank 0 is of kind {kind}")
    # Rank 0 logs for all ranks.
    options = replace(msgspec.msgpack.decode(body, type=VerifyOptions), log_level="WARNING")
    configure_logging(f"verify rank {rank}", options.log_level)
    try:
        serve(options, memory)
    except ConfigError as error:
        memory.record_failure(error.message)
        return EXIT_CONFIG
    except Exception as error:
        log.exception("rank %d failed", rank)
        words = str(error).splitlines()
        memory.record_failure(f"{type(error).__name__}: {words[0] if words else ''}")
    return EXIT_FAILURE


def serve(options: VerifyOptions, memory: RankMemory) -> None:
    """Load this rank's models, and follow rank 0 forever. Raises ConfigError."""
    pin_to_cores(options.engine_cpus)
    torch.set_num_threads(choose_threads(options))
    path, model = load(options, memory)
    if not isinstance(model, CausalLM):
        raise InternalError("a rank's model is not the decoder")
    draft = load_draft(options, path, model)
    memory.trade(b"loaded")
    link = link_ranks(model, memory)
    executor = None if link is None else following_executor(options, path, model, draft, link)
    # A garbage collection that looked through all of it would hold up every other rank.
    gc.collect()
    gc.freeze()
    if executor is None:
        follow(model, memory)
    else:
        follow_rounds(executor, memory)


@torch.inference_mode()
def follow_rounds(executor: CudaExecutor, memory: RankMemory) -> None:
    """Launch on this rank's GPU what rank 0 launches, forever."""
    while True:
        kind, body = memory.receive()
        numbers = np.frombuffer(bytearray(body), np.int32)
        if kind == ROUND:
            executor.graphs.run(bucket_of(numbers))
        elif kind == PROMPTS:
            executor.prefill.forward(PromptShape(*numbers[:2].tolist()), numbers[2:])
        elif kind == PAGES:
            executor.rows.enter(int(numbers[0]), int(numbers[1]), numbers[2:].tolist())
        elif kind == LOGITS:
            executor.prefill.logits(*numbers.tolist())
        elif kind == CAPTURE:
            with compile_aside():
                executor.graphs.capture([bucket_of(bucket) for bucket in numbers.reshape(-1, 4)], together=True)
        elif kind == CAPTURE_SMALL:
            with compile_aside():
                executor.prefill.capture_small(bool(numbers[0]))
        elif executor.drafts is not None and isinstance(drafter := executor.drafts.drafter, RankedDrafter):
            drafter.replay(kind, numbers)
        else:
            raise InternalError(f"rank 0 sent a message of kind {kind}")


def bucket_of(numbers: NDArray[np.int32]) -> Bucket:
    """Decode a bucket from its four numbers."""
    tokens, rows, only, is_bare = numbers.tolist()
    return Bucket(tokens, rows, bool(only), bool(is_bare))
