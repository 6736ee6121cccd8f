"""Rank 0's side: it starts the other ranks, and ends the engine when one of them does not go on."""

from __future__ import annotations

import os
import sys
import threading
import time

import msgspec

from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.host.process import spawn
from outrider.host.rank_memory import RankError, RankMemory
from outrider.logs import get_logger
from outrider.rpc.lifecycle import EXIT_CONFIG, EXIT_FAILURE, exit_text

log = get_logger(__name__)

WORKER_MODULE = "verify_service.ranks.worker"
START = 0
"""Kind of the first message: the options. Kinds of others are the executor's."""
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 2.0
"""An engine that meets the fault itself tells its clients, and has so long for it."""
_REFUSAL_SECONDS = 10.0
"""So long one at its start has to refuse its options, which it does when it has read its part of the weights."""


class Followers:
    """The processes of ranks 1 and up, tied to the thread that made them."""

    def __init__(self, options: VerifyOptions) -> None:
        """Start them; they begin to load. Call it on the main thread."""
        world = options.tensor_parallel_size
        self.memory = RankMemory.create(world, options.rank_seconds)
        self._seconds = options.rank_seconds
        self._processes = {
            rank: spawn(WORKER_MODULE, [self.memory.descriptor], arguments=[str(rank), str(world)])
            for rank in range(1, world)
        }
        self._is_started = False
        self.memory.check = self.check
        self.memory.send(START, msgspec.msgpack.encode(options))
        log.info("%d ranks; those behind this one are processes %s", world, [p.pid for p in self._processes.values()])
        # From now on: a graph's first run waits on the device, where nobody else would see that a rank has ended.
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def check(self) -> None:
        """Raise RankError, or ConfigError for one that refuses its options at the start, for a rank that has ended."""
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                said = self.memory.said(rank)
                if code == EXIT_CONFIG and not self._is_started:
                    raise ConfigError(f"rank {rank}: {said}")
                raise RankError(f"rank {rank} of {self.memory.world} has ended ({said or exit_text(code)})")

    def started(self) -> None:
        """All ranks serve: from now on one that hangs ends the engine, too, also while nothing is asked of it."""
        self.memory.started()
        self._is_started = True

    def _watch(self) -> None:
        read = {rank: (self.memory.num_read(rank), time.monotonic()) for rank in self._processes}
        while True:
            time.sleep(_LOOK_SECONDS)
            fault, grace, code = "", _GRACE_SECONDS, EXIT_FAILURE
            try:
                self.check()
            except RankError as error:
                fault = error.message
            except ConfigError as error:
                fault, grace, code = error.message, _REFUSAL_SECONDS, EXIT_CONFIG
            for rank, (count, since) in read.items():
                now, found = time.monotonic(), self.memory.num_read(rank)
                if found != count or not self.memory.is_behind(rank) or not self._is_started:
                    read[rank] = (found, now)
                elif now - since > self._seconds:
                    fault = f"rank {rank} of {self.memory.world} did not answer within {self._seconds:g} s"
            if fault:
                self.memory.fault = fault
                log.error("%s; the engine ends", fault)
                time.sleep(grace)
                sys.stderr.flush()
                os._exit(code)
