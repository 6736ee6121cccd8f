"""Memory of a process that serves on a CPU: no kernels of ever new shapes, and no compiler that nothing uses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tiny_models import save_tiny

from outrider.host.process import KEPT_KERNELS, KERNEL_CACHES

PROGRAM = """
import ctypes, sys, torch
from outrider.layers.cpu_weight import can_pack
from outrider.layers.linear import Linear
from outrider.models.loader import load_model

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
mallinfo2.restype = Heap
linear = Linear(64, 96, False, torch.float32, torch.device("cpu"))
linear.weight.fill_(1.0)
packed = can_pack(linear.weight)
linear.pack()
load_model(sys.argv[2])
kept, used = int(sys.argv[1]), []
with torch.inference_mode():
    for rows in range(5, 5 + 4 * kept):
        linear(torch.ones(rows, 64))
        used.append(mallinfo2().uordblks / 2**20)
print(packed, used[kept] - used[0], used[-1] - used[kept], 'torch._dynamo' in sys.modules)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the program prints."""
    if sys.platform != "linux":
        pytest.skip("asks glibc")
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    command = [sys.executable, "-c", PROGRAM, str(KEPT_KERNELS), str(folder)]
    environment = {**os.environ, **KERNEL_CACHES, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_kernels_of_old_shapes_are_given_up(printed: list[str]) -> None:
    packed, filled, after, _ = printed
    if packed != "True":
        pytest.skip("oneDNN does not pack this weight here")
    # As many again three times over, and no more than what differs between small and large shapes.
    assert float(after) < 0.5 * float(filled), (filled, after)


def test_a_model_is_loaded_without_torchs_compiler(printed: list[str]) -> None:
    assert printed[-1] == "False", "arithmetic on the meta device imports it, for a second and over 100 MB"
