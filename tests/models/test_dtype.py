from __future__ import annotations

import logging

import pytest
import torch

from kernels.cpu import isa
from outrider import device
from outrider.attention import torch_backend
from outrider.device import choose_dtype
from outrider.layers import cpu_weight

CPU = torch.device("cpu")


def flags(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(device, "cpu_flags", lambda: set(names))


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


ALL = {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
ALL |= {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}
HIDDEN = {
    "": "AMX",
    "amx_tile": "VNNI",
    "avx512_bf16": "VNNI",
    "avx512_vnni": "AVX512",
    "avx512vl": "AVX2",
    "fma": None,
    "f16c": None,
}


@pytest.mark.skipif(not isa.supported(), reason="none runs here")
@pytest.mark.parametrize(("hidden", "best"), HIDDEN.items())
def test_a_set_of_instructions_is_there_if_all_of_them_are(
    hidden: str, best: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isa, "cpu_flags", lambda: ALL - {hidden})
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True)
    found = isa.supported.__wrapped__()
    assert [one.name for one in found[:1]] == ([] if best is None else [best])


@pytest.mark.parametrize("shape", [(1001, 96), (64, 40)])
def test_without_instructions_for_it_matrices_and_attention_in_bfloat16_are_multiplied_in_float32(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cpu_weight, torch_backend):
        monkeypatch.setattr(module, "bf16_flag", str)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False, raising=False)
    generator = torch.Generator().manual_seed(2)
    weight, rows = (torch.randn(size, shape[1], generator=generator).bfloat16() for size in (shape[0], 7))
    packed = cpu_weight.CpuWeight.of(weight)
    assert packed is not None and packed.of_few is None
    bias, residual = (torch.randn(*size, generator=generator).bfloat16() for size in (shape[:1], (7, shape[0])))
    exact = rows.double() @ weight.double().T
    assert torch.allclose(
        packed.product(rows, bias, residual).double(), exact + bias + residual, rtol=2**-7, atol=2**-6
    )
    q, k, v = (
        torch.randn(*size, generator=generator).bfloat16() for size in ((3, 4, 32), (1, 2, 9, 32), (1, 2, 9, 32))
    )
    rules = torch_backend.LayerRules(scores=torch_backend.ScoreRules(softcap=5.0))
    found = torch_backend.folded_attention(q, k, v, None, rules)
    wide = torch_backend.folded_attention(q.float(), k.float(), v.float(), None, rules)
    assert found.dtype == torch.bfloat16 and torch.equal(found, wide.bfloat16())
