"""Kernels are compiled by other processes, and found in Triton's cache. Needs no GPU, but Triton."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernels import compile_workers
from kernels.compile_workers import compile_aside, prepare

triton = pytest.importorskip("triton")


@pytest.fixture
def update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel as it is when it is launched first, on an H100."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime import JITFunction

    from kernels.jit import kv_cache

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_workers, "_LEAST_CORES", 1)
    monkeypatch.setattr(compile_workers, "MAX_WORKERS", 1)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    function, target = JITFunction(kv_cache._update.fn), GPUTarget("cuda", 90, 32)
    # As it may come out here, and not in a process that has compiled other kernels before.
    function.hash = "0" * 64

    def source(_: object, *variant: object) -> Any:
        return ASTSource(function, *variant)

    caches = {0: ({}, {}, target, make_backend(target), None)}
    told = {"module": function.module, "__name__": "_update", "cache_key": function.cache_key}
    return SimpleNamespace(**told, device_caches=caches, ASTSource=source)


def variant(update: Any, block: object) -> tuple[Any, ...]:
    signature = dict.fromkeys(("page_tables", "updates"), "*i32") | dict.fromkeys(("num_updates", "stride"), "i32")
    options = update.device_caches[0][3].parse_options({"num_warps": 4})
    return signature | {"BLOCK": "constexpr"}, {(4,): block}, options, {(0,): [["tt.divisibility", 16]]}, False


def test_what_another_process_compiled_is_in_the_cache(
    update: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, compile_workers.__name__)
    prepare(update, 0, *variant(update, 128))
    assert not list(tmp_path.rglob("_update.cubin")), "it was no time for that"
    with compile_aside():
        workers = compile_workers._workers
        assert workers is not None
        prepare(update, 0, *variant(update, 128))
        (process,), (beginning,) = workers._processes, workers._beginning
        beginning.join()
        prepare(update, 0, *variant(update, 128))
        assert len(list(tmp_path.rglob("_update.cubin"))) == 1
        signature, constexprs, options, attrs, _ = variant(update, 128)
        source = update.ASTSource(None, signature, constexprs, attrs)
        assert compile_workers._is_cached(source, update.device_caches[0][3], options) and not caplog.messages
        # Neither what cannot be told, nor what does not compile, ends it.
        prepare(update, 0, *variant(update, triton.language.float32))
        prepare(update, 0, *variant(update, 100))
        assert len(caplog.messages) == 2 and "power of 2" in caplog.messages[1]
        prepare(update, 0, *variant(update, 64))
        assert len(list(tmp_path.rglob("_update.cubin"))) == 2 and process.poll() is None
        # Who finds the only process at work waits for it.
        both = [threading.Thread(target=prepare, args=(update, 0, *variant(update, block))) for block in (256, 512)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert len(list(tmp_path.rglob("_update.cubin"))) == 4
        process.kill()
        prepare(update, 0, *variant(update, 32))
        assert len(caplog.messages) == 3
        prepare(update, 0, *variant(update, 64))
        assert len(caplog.messages) == 3, "it is cached, nobody need do anything"
    assert process.poll() is not None
