"""The process of a rank behind rank 0: `python -m verify_service.ranks.worker FD RANK WORLD`.

It loads its part of the model, and does what rank 0 does until the kernel ends it with rank 0. Why it cannot go on it
leaves in the memory that they share.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import msgspec
import numpy as np
import torch

from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError, InternalError
from outrider.host.rank_memory import RankMemory
from outrider.host.worker import exit_process, pin_to_cores
from outrider.logs import configure_logging, get_logger
from outrider.models.decoder import CausalLM
from outrider.rpc.lifecycle import EXIT_CONFIG, EXIT_FAILURE
from verify_service.engine.build import choose_threads, following_executor, link_ranks
from verify_service.engine.loading import load, load_draft
from verify_service.executors.cuda import CudaExecutor
from verify_service.ranks.leader import START
from verify_service.ranks.replay import follow

log = get_logger(__name__)


def main(argv: list[str]) -> int:
    """Follow rank 0; returns the exit code when that cannot go on."""
    descriptor, rank, world = map(int, argv)
    memory = RankMemory(descriptor, rank, world)
    kind, body = memory.receive()
    if kind != START:
        raise InternalError(f"the first message of rank 0 is of kind {kind}")
    # Rank 0 speaks of what all of them do.
    options = replace(msgspec.msgpack.decode(body, type=VerifyOptions), log_level="WARNING")
    configure_logging(f"verify rank {rank}", options.log_level)
    try:
        serve(options, memory)
    except ConfigError as error:
        memory.say(error.message)
        return EXIT_CONFIG
    except Exception as error:
        log.exception("rank %d failed", rank)
        words = str(error).splitlines()
        memory.say(f"{type(error).__name__}: {words[0] if words else ''}")
    return EXIT_FAILURE


def serve(options: VerifyOptions, memory: RankMemory) -> None:
    """Load, and follow rank 0 for ever. Raises ConfigError."""
    pin_to_cores(options.engine_cpus)
    torch.set_num_threads(choose_threads(options))
    path, model = load(options, memory)
    if not isinstance(model, CausalLM):
        raise InternalError("a rank's model is not the decoder")
    draft = load_draft(options, path, model)
    memory.trade(b"loaded")
    link = link_ranks(model, memory)
    if link is None:
        follow(model, memory)
    else:
        follow_rounds(following_executor(options, path, model, draft, link), memory)


def follow_rounds(executor: CudaExecutor, memory: RankMemory) -> None:
    """Replay on a GPU what rank 0 launches, for ever."""
    while True:
        kind, body = memory.receive()
        executor.replay(kind, np.frombuffer(bytearray(body), np.int32))


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
