"""Ranks that exchange through torch's process group: gloo in the place of NCCL, which needs GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from outrider.host.rank_memory import RankMemory

RANK = """
import os, sys
import torch
from torch import distributed
from outrider.host.rank_memory import RankMemory
from outrider.layers.exchange import NcclExchange

begin = distributed.init_process_group
distributed.init_process_group = lambda backend, *, device_id, **others: begin("gloo", **others)
memory = RankMemory(int(sys.argv[1]), int(sys.argv[2]), 2)
exchange = NcclExchange(memory, torch.device("cpu"))
part = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * memory.rank
numbers = torch.tensor([7 - memory.rank, 1 << 23], dtype=torch.int32)
exchange.share([numbers])
print(exchange.total(part).tolist(), exchange.join(part).tolist(), numbers.tolist(), flush=True)
memory.trade(b"")
os._exit(0)
"""
"""A rank that ends as engines do whose rank has failed: nothing is tidied up."""


def test_ranks_of_a_process_group_leave_no_file_behind(tmp_path: Path) -> None:
    memory = RankMemory.create(2)
    words = {**os.environ, "TMPDIR": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(memory.descriptor), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[memory.descriptor],
            env=words,
        )
        for rank in range(2)
    ]
    expected = "[[12.0, 14.0], [16.0, 18.0]] [[1.0, 2.0, 11.0, 12.0], [3.0, 4.0, 13.0, 14.0]] [7, 8388608]\n"
    try:
        assert [rank.communicate(timeout=60)[0] for rank in ranks] == [expected] * 2
    finally:
        for rank in ranks:
            rank.kill()
        os.close(memory.descriptor)
    assert not [*tmp_path.iterdir()]
