from __future__ import annotations

import pytest

from benchmarks.serving.load import ServiceMemory


class NoServices:
    children: dict[str, object] = {}  # noqa: RUF012


def memory(series: list[float]) -> ServiceMemory:
    made = ServiceMemory(NoServices())  # type: ignore[arg-type]
    made.samples = [(float(at), {"load": value}) for at, value in enumerate(series)]
    return made


def test_memory_that_grows_to_the_end_is_not_flat() -> None:
    leaking = memory([100.0 + at for at in range(600)])
    assert leaking.rise("load") == pytest.approx(299)
    assert leaking.judge(48) == ["load grew by 299 MiB in the second half; at most 83 may be"]


def test_memory_that_filled_early_or_swings_is_flat() -> None:
    assert memory([100.0 + min(at, 250) for at in range(600)]).judge(0) == []
    assert memory([100.0 + 40 * (at % 2) for at in range(600)]).judge(0) == []


def test_rows_tell_first_most_and_last() -> None:
    rows = {row.metric: row.value for row in memory([100.0, 300.0, 200.0]).rows("case")}
    assert [rows[f"load_resident_mib_{word}"] for word in ("first", "max", "last")] == [100.0, 300.0, 200.0]
