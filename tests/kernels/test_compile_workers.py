"""Kernels are compiled by other processes, and found in Triton's cache. Needs no GPU, but Triton."""

from __future__ import annotations

import logging
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import compile_workers
from kernels.compile_workers import CompileJob, compile_aside, prepare
from kernels.compiling import allow_threads, compile_ahead

triton = pytest.importorskip("triton")
# Before a test sets TRITON_INTERPRET aside: other tests interpret kernels, and a launch imports what asserts that it is
# what it was when Triton was imported.
pytest.importorskip("triton.experimental.gluon")
kv_cache = pytest.importorskip("kernels.jit.kv_cache")
ring_gemm = pytest.importorskip("kernels.jit.ring_gemm")


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process compiles, into an empty cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_workers, "_LEAST_CORES", 1)
    monkeypatch.setattr(compile_workers, "MAX_WORKERS", 1)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def update() -> Any:
    """A kernel as it is when it is launched first, on an H100."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime import JITFunction

    function, target = JITFunction(kv_cache._update.fn), GPUTarget("cuda", 90, 32)
    # As it may come out here, and not in a process that has compiled other kernels before.
    function.hash = "0" * 64

    def source(_: object, *variant: object) -> Any:
        return ASTSource(function, *variant)

    caches = {0: ({}, {}, target, make_backend(target), None)}
    fields = {"module": function.module, "__name__": "_update", "cache_key": function.cache_key}
    return SimpleNamespace(**fields, device_caches=caches, ASTSource=source)


def variant(update: Any, block: object) -> tuple[Any, ...]:
    signature = dict.fromkeys(("page_tables", "updates", "shifts"), "*i32")
    signature |= dict.fromkeys(("num_updates", "stride", "num_sinks"), "i32")
    signature |= dict.fromkeys(("SHIFTED", "BLOCK"), "constexpr")
    options = update.device_caches[0][3].parse_options({"num_warps": 4})
    return signature, {(6,): True, (7,): block}, options, {(0,): [["tt.divisibility", 16]]}, False


def test_what_another_process_compiled_is_in_the_cache_and_what_is_told_ahead_is_waited_for(
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
        for block in (16, 1024, 1024):
            prepare(update, 0, *variant(update, block), ahead=True)
        assert len(workers._started) == 2
        for block in (16, 1024):
            # The process may still import the compiler: who needs what was ordered waits for that, too.
            prepare(update, 0, *variant(update, block))
        assert len(list(tmp_path.rglob("_update.cubin"))) == 2
        beginning.join()
        prepare(update, 0, *variant(update, 128))
        assert len(list(tmp_path.rglob("_update.cubin"))) == 3
        signature, constexprs, options, attrs, _ = variant(update, 128)
        source = update.ASTSource(None, signature, constexprs, attrs)
        assert compile_workers._is_cached(source, update.device_caches[0][3], options) and not caplog.messages
        # Neither what cannot be sent, nor what does not compile, ends it.
        prepare(update, 0, *variant(update, triton.language.float32))
        prepare(update, 0, *variant(update, 100))
        assert len(caplog.messages) == 2 and "power of 2" in caplog.messages[1]
        prepare(update, 0, *variant(update, triton.language.float32), ahead=True)
        assert len(caplog.messages) == 3 and len(workers._started) == 2
        prepare(update, 0, *variant(update, 64))
        assert len(list(tmp_path.rglob("_update.cubin"))) == 4 and process.poll() is None
        # Who finds the only process at work waits for it.
        both = [threading.Thread(target=prepare, args=(update, 0, *variant(update, block))) for block in (256, 512)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert len(list(tmp_path.rglob("_update.cubin"))) == 6
        process.kill()
        prepare(update, 0, *variant(update, 32))
        assert len(caplog.messages) == 4
        prepare(update, 0, *variant(update, 64))
        assert len(caplog.messages) == 4, "it is cached, nobody need do anything"
    assert process.poll() is not None


def test_nobody_waits_for_processes_that_are_gone(update: Any, tmp_path: Path) -> None:
    with compile_aside():
        prepare(update, 0, *variant(update, 64), ahead=True)
        workers = compile_workers._workers
        assert workers is not None
        workers._processes[0].kill()
        prepare(update, 0, *variant(update, 64))
        prepare(update, 0, *variant(update, 128))
    assert not list(tmp_path.rglob("_update.cubin"))


def test_what_was_told_and_never_needed_ends_with_the_processes(update: Any) -> None:
    with compile_aside():
        for block in (16, 32, 64, 128):
            prepare(update, 0, *variant(update, block), ahead=True)
        workers = compile_workers._workers
        assert workers is not None
    workers._threads.shutdown()
    assert all(future.done() for future in workers._started.values())


@pytest.mark.parametrize("most", [0, 2])
def test_processes_that_cannot_start_are_tried_once_and_missed_by_nobody(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tried = 0

    def start() -> subprocess.Popen[bytes]:
        nonlocal num_tried
        num_tried += 1
        if num_tried > most:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        answers = ["sh", "-c", "echo; while read -r job; do echo; done"]
        return subprocess.Popen(answers, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(compile_workers, "_start_process", start)
    workers = compile_workers._Workers(4)
    jobs = [compile_workers.CompileJob("", "", str(number), {}, {}, {}, {}, ()) for number in range(8)]
    for job in jobs:
        workers.start(job)
    for job in jobs:
        with nullcontext() if most else pytest.raises(OSError, match="are gone"):
            workers.run(job)
    assert num_tried == most + 1
    workers.end()


def test_launches_are_told_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction
    from triton.runtime.driver import driver as active

    target = GPUTarget("cuda", 90, 32)
    device = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda _: 0, get_current_target=lambda: target
    )
    monkeypatch.setattr(active, "_active", device)
    assert allow_threads()
    function, run = JITFunction(kv_cache._update.fn), JITFunction.run
    monkeypatch.setattr(kv_cache, "_update", function)
    tables = torch.ones(4, 4, dtype=torch.int32)
    with compile_ahead() as num_jobs:
        assert num_jobs is None, "no process compiles"
    with compile_aside():
        with compile_ahead() as num_jobs:
            assert num_jobs is not None and num_jobs() == 0
            for _ in range(2):
                function[(1,)](tables, tables, tables, 1, 4, 2, SHIFTED=True, BLOCK=128)
                assert num_jobs() == 1
            assert not torch.empty(1000).count_nonzero() and not torch.empty_like(tables).count_nonzero()
        assert JITFunction.run is run
        workers = compile_workers._workers
        assert workers is not None
        (job,) = workers._started.values()
        job.result()
        with compile_ahead() as num_jobs:
            function[(1,)](tables, tables, tables, 1, 4, 2, SHIFTED=True, BLOCK=128)
            assert num_jobs is not None and num_jobs() == 0, "Triton's cache has it"
    assert len(list(tmp_path.rglob("_update.cubin"))) == 1 and tables.all()


def test_a_kernel_in_gluon_is_compiled_aside_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.experimental.gluon._runtime import GluonASTSource

    sources: list[object] = []
    monkeypatch.setattr(triton, "compile", lambda source, target, options: sources.append(source))
    monkeypatch.setattr(compile_workers, "_make_launcher", lambda source: None)
    monkeypatch.setattr(ring_gemm._ring_gemm, "hash", ring_gemm._ring_gemm.hash)
    CompileJob(ring_gemm.__name__, "_ring_gemm", "0" * 64, {}, {}, {}, {}, ("cuda", 90, 32)).compile()
    assert [type(source) for source in sources] == [GluonASTSource]
