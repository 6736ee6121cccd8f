"""Which cores an engine's process runs on."""

from __future__ import annotations

import asyncio
import os
import threading

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service import main as draft_main
from outrider.config.draft import DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.host.worker import format_cores, parse_cores, pin_to_cores
from verify_service.engine.build import assemble

ALLOWED = sorted(os.sched_getaffinity(0))


def after(text: str) -> set[int] | ConfigError:
    """Where a thread that asked for this may run, or what it was told."""
    found: list[set[int] | ConfigError] = []

    def ask() -> None:
        try:
            pin_to_cores(text)
            found.append(os.sched_getaffinity(0))
        except ConfigError as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_keeps_to_the_cores_that_are_named() -> None:
    assert after(str(ALLOWED[0])) == {ALLOWED[0]}
    assert after(format_cores(set(ALLOWED))) == set(ALLOWED)
    assert after(" ") == set(ALLOWED)
    assert os.sched_getaffinity(0) == set(ALLOWED), "others run where they ran"


@pytest.mark.parametrize("text", ["x", "1-", "-1", "3-1", "1,,2", "1;2", "1-2-3", "123456"])
def test_what_is_no_list_is_refused_with_an_example(text: str) -> None:
    error = after(text)
    assert isinstance(error, ConfigError)
    assert "--engine-cpus" in error.message and repr(text) in error.message and "0,8-11" in error.message


def test_cores_that_there_are_not_are_refused_with_those_that_there_are() -> None:
    error = after(f"{ALLOWED[0]},99990-99999")
    assert isinstance(error, ConfigError)
    assert "core 99990" in error.message and f"may run on {format_cores(set(ALLOWED))}," in error.message


@given(st.sets(st.integers(0, 300), min_size=1))
def test_ranges_are_the_list_that_was_written(cores: set[int]) -> None:
    assert parse_cores(format_cores(cores)) == cores


async def test_the_engine_keeps_to_its_cores_and_its_door_does_not() -> None:
    options = DraftOptions(speculative_algorithm=("NGRAM",), metrics_address="", engine_cpus=str(ALLOWED[-1]))
    process, *_ = await draft_main.start_engine(options)
    try:
        await process.ready(asyncio.Event())
        assert psutil.Process(process._process.pid).cpu_affinity() == [ALLOWED[-1]]
        assert os.sched_getaffinity(0) == set(ALLOWED)
        await process.stop()
    finally:
        await process.close()


async def test_an_engine_on_cores_that_there_are_not_ends_with_the_words() -> None:
    words = "--engine-cpus: '99999' names core 99999"
    options = DraftOptions(speculative_algorithm=("NGRAM",), metrics_address="", engine_cpus="99999")
    process, *_ = await draft_main.start_engine(options)
    try:
        with pytest.raises(ConfigError, match=words):
            await process.ready(asyncio.Event())
    finally:
        await process.close()
    # Verify's is asked in this process, which has torch: how a refusal travels is the same code.
    with pytest.raises(ConfigError, match=words):
        assemble(VerifyOptions(engine_cpus="99999"), None, None)  # type: ignore[arg-type]
