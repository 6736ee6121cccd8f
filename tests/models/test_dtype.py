from __future__ import annotations

import logging

import pytest
import torch

from kernels.cpu import isa
from outrider import device
from outrider.device import choose_dtype

CPU = torch.device("cpu")


def flags(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(device, "_cpu_flags", lambda: set(names))


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16", "bf16"])
def test_a_cpu_with_bfloat16_instructions_takes_it_and_says_so(
    flag: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isa, "supported", tuple)
    flags(monkeypatch, "sse2", flag)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    with caplog.at_level(logging.INFO):
        assert choose_dtype("auto", CPU) == torch.bfloat16
    assert f"dtype auto: bfloat16 (this CPU has {flag})" in caplog.text


def test_a_cpu_without_them_or_a_torch_that_ignores_them_takes_float32(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isa, "supported", tuple)
    with caplog.at_level(logging.INFO):
        flags(monkeypatch, "avx2", "avx512f")
        assert choose_dtype("auto", CPU, "bfloat16") == torch.float32
        flags(monkeypatch, "avx512_bf16")
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False, raising=False)
        assert choose_dtype("auto", CPU) == torch.float32
    assert "has no bfloat16 instructions" in caplog.text and "this build of torch does not use it" in caplog.text


@pytest.mark.parametrize("found", isa.Isa)
def test_a_cpu_that_our_products_run_on_takes_bfloat16(
    found: isa.Isa, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isa, "supported", lambda: (found,))
    flags(monkeypatch)
    with caplog.at_level(logging.INFO):
        assert choose_dtype("auto", CPU, "float32") == torch.bfloat16
    assert f"dtype auto: bfloat16 (this CPU has {found.name})" in caplog.text


@pytest.mark.parametrize(("checkpoint", "chosen"), [("float16", torch.float16), ("float32", torch.bfloat16)])
def test_a_gpu_takes_the_checkpoint_s_half_format(checkpoint: str, chosen: torch.dtype) -> None:
    assert choose_dtype("auto", torch.device("cuda", 0), checkpoint) == chosen


def test_what_is_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    flags(monkeypatch, "avx512_bf16")
    assert choose_dtype("float32", CPU) == torch.float32
