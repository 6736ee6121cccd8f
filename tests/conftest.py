"""What all tests share."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvloop
from hypothesis import settings

if TYPE_CHECKING:
    from kernels.cpu.isa import Isa

# What a property's example takes hangs on what else the machine does.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")
# Before anything loads torch: tests run in several processes, whose threads would slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Before anything imports triton: without a GPU its kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


LONGEST = (
    *("cluster", "test_ranks", "test_round_growth", "test_compile_for_a_gpu", "test_engine_process", "test_chaos"),
    *("test_up", "test_many_to_many", "live", "test_ranked_drafts", "test_cpu_stack", "test_few_rows", "test_runner"),
    *("test_training_run", "test_transformers_target", "test_chat", "test_colocated", "test_grammar_exactness"),
    *("test_draft_is_target", "test_cluster", "test_attention", "test_drafter_kinds", "test_evaluate_draft"),
    *("test_transformers_models", "test_large_texts", "test_device_fault", "test_branches", "test_collection"),
    *("test_trainer", "test_cpu_objects", "test_sampling", "test_parallel", "test_exactness_experts"),
)
"""Groups that take long, the longest first: one that began late would be waited for by processes that have no more."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collection makes objects that stay: walking them again and again took the collector half of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes, tests of one file run in one of them, and so do those that share started services."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.get_closest_marker("xdist_group").args[0], len(places)))


class GroupedIds:
    """Tells pytest 9.2 the names of groups that xdist 3.8 leaves where pytest does not look any more.

    Without them every test would go to any process, and fixtures of a file would be made in all of them.
    """

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """After xdist's."""
        for item in items:
            grouped: str | None = getattr(item, "_nodeid", None)
            if grouped is not None and item.nodeid != grouped:
                item._id = type(item._id).parse(grouped)


def pytest_configure(config: pytest.Config) -> None:
    # By default every 700 new objects are looked through, for up to a tenth of a test's time.
    gc.set_threshold(10_000)
    # A shell that runs this in the background has it ignore SIGINT, and services that tests start would, too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if getattr(config.option, "loadgroup", False):  # a process that tests run in
        config.pluginmanager.register(GroupedIds())


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the loop that services run on."""
    return {"service": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def model_path() -> Path:
    """Folder of the default model, fetched and converted at its first use."""
    from outrider.models.store import resolve_model

    return resolve_model("SmolLM2-135M-Instruct")


@pytest.fixture
def other_user() -> Callable[[], AbstractContextManager[None]]:
    """A function that makes the test another user for a while where it is root, who may read everything."""

    @contextmanager
    def become() -> Iterator[None]:
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(user)

    return become


def _is_late(record: logging.LogRecord) -> bool:
    """Whether gRPC had something for the event loop of an earlier test; a service has one loop for all its life."""
    error = record.exc_info[1] if record.exc_info else None
    is_closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return record.name == "asyncio" and "PollerCompletionQueue" in record.getMessage() and is_closed


@pytest.fixture
def nothing_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test in which a service has logged a failure of its own: bad input is none."""
    yield
    # A service silences what gRPC itself logs of bytes that are no message (outrider.logs).
    ours = (record for record in caplog.get_records("call") if not record.name.startswith("grpc"))
    failed = [record for record in ours if record.levelno >= logging.ERROR and not _is_late(record)]
    assert not failed, [(record.getMessage(), record.exc_info) for record in failed]


@pytest.fixture(scope="module", params=["AMX", "VNNI", "AVX512", "AVX2"])
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    """Functions of kernels.cpu are compiled for each instruction set that this processor has."""
    from kernels.cpu import isa

    wanted = isa.Isa[request.param]
    if wanted not in isa.supported():
        pytest.skip(f"no {request.param} here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isa, "supported", lambda: (wanted,))
        yield wanted
