"""Several threads may launch kernels for the first time at once. Needs no GPU, but Triton, and a C compiler."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kernels import compiling
from kernels.compiling import allow_threads

pytest.importorskip("triton")

NAME = "launcher_of_a_test"
SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher_of_a_test", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher_of_a_test(void) { return PyModule_Create(&module); }
"""
"""Built and loaded by Triton as its launchers are: a file for each signature, one name for all."""


def test_the_installed_triton_is_one_that_threads_may_use() -> None:
    assert allow_threads()


@pytest.fixture
def triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not (shutil.which("gcc") or shutil.which("clang")) or not header.exists():
        pytest.skip("there is no C compiler, or Python's headers are not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield
    sys.modules.pop(NAME, None)


@pytest.mark.usefixtures("triton_cache")
def test_a_launcher_stays_what_it_is_when_others_are_loaded() -> None:
    from triton.runtime.build import compile_module_from_src

    def load(number: int) -> Any:
        return compile_module_from_src(src=SOURCE % number, name=NAME)

    assert allow_threads()
    first, second = load(1), load(2)
    # A thread that has loaded the second and not yet looked for `launch` in it, while another loads the first again.
    again = load(1)
    assert [module.launch() for module in (first, second, again)] == [1, 2, 1]


class Turnstile:
    """A lock that says when somebody has to wait for it."""

    def __init__(self, waiting: threading.Event) -> None:
        self._lock = threading.RLock()
        self._waiting = waiting

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waiting.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Driver:
    """Stands for a GPU: a kernel gets its function while another thread launches it."""

    warp_size = 32

    def __init__(self, during: threading.Event) -> None:
        self.loading = threading.Event()
        self.num_loaded = 0
        self._during = during
        self.utils = self

    def launcher_cls(self, src: object, metadata: object) -> Any:
        return lambda function: function

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Driver:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1}

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        self.num_loaded += 1
        self.loading.set()
        if self.num_loaded > 1:
            self._during.set()
        self._during.wait()
        return 1, 77, 0, 0, 1024


def test_a_kernel_is_launched_when_its_function_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.compiler import CompiledKernel
    from triton.runtime.driver import driver as active

    assert allow_threads()
    goes_on = threading.Event()
    monkeypatch.setattr(compiling, "_init_locks", (Turnstile(goes_on),))
    device = Driver(goes_on)
    monkeypatch.setattr(active, "_active", device)
    kernel = object.__new__(CompiledKernel)
    kernel.src = kernel.name = kernel.kernel = kernel.hash = kernel.metadata_group = None
    kernel.metadata = SimpleNamespace(shared=0, num_warps=4, tmem_size=None)
    kernel.module = kernel.function = kernel._run = None
    launched = []

    def launch() -> None:
        launched.append(kernel.run(kernel.function))

    def launch_meanwhile() -> None:
        device.loading.wait()
        launch()
        goes_on.set()

    threads = [threading.Thread(target=target) for target in (launch, launch_meanwhile)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert launched == [77, 77]
    assert device.num_loaded == 1


def test_threads_that_need_the_same_variant_of_a_kernel_compile_it_once() -> None:
    compiled: list[str] = []
    waiting = threading.Barrier(2)

    class Function:
        device_caches: ClassVar[dict[int, tuple[dict[str, str], ...]]] = {0: ({},)}

        def _do_compile(self, key: str, signature: object, device: int, *rest: object) -> str:
            compiled.append(key)
            # The other thread has not got to where it would wait, or be let in, before this one goes on.
            waiting.wait()
            self.device_caches[device][0][key] = f"{key} of {rest}"
            return self.device_caches[device][0][key]

    compiling._compile_once(Function)
    function, found = Function(), []

    def launch() -> None:
        found.append(function._do_compile("a", None, 0, 1))

    def launch_others() -> None:
        waiting.wait()
        launch()
        found.append(function._do_compile("b", None, 0, 1))

    threads = [threading.Thread(target=target) for target in (launch, launch_others)]
    threads[0].start()
    threads[1].start()
    threads[0].join()
    waiting.wait()
    threads[1].join()
    assert compiled == ["a", "b"] and found == ["a of (1,)", "a of (1,)", "b of (1,)"]
