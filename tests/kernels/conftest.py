"""Kernels run on the GPU where there is one, and under Triton's interpreter where not."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from kernels.launch import triton_on_cpu

if find_spec("triton") is None:  # it is made for Linux alone
    collect_ignore_glob = ["*"]
elif not torch.cuda.is_available():
    import interpreter  # noqa: F401


@pytest.fixture
def device() -> Iterator[str]:
    """Where tensors of a kernel's test go; the Triton kernels run there."""
    if torch.cuda.is_available():
        yield "cuda"
        return
    with triton_on_cpu():
        yield "cpu"
