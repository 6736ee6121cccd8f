"""A projection arrives as it was offered, or not at all, and takes no memory that was not agreed on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from outrider.errors import InvalidRequestError
from outrider.protocol.speculation import MAX_FEATURE_BYTES, ProjectionPart
from outrider.tree.handshake import (
    MAX_PROJECTION_BYTES,
    Projection,
    ProjectionReader,
    name_projection,
)

LAYERS, HIDDEN, COLUMNS = (2, 7), 512, 300


def cut_projection(projection: Projection) -> Iterator[ProjectionPart]:
    """Its parts, each small enough for a message."""
    data = memoryview(projection.data)
    for offset in range(0, len(data), MAX_FEATURE_BYTES):
        part = bytes(data[offset : offset + MAX_FEATURE_BYTES])
        yield ProjectionPart(projection.num_columns, projection.dtype, offset, part)


SIZE = 2 * HIDDEN * COLUMNS * 2


def offered() -> Projection:
    data = bytes(number % 251 for number in range(SIZE))
    return Projection(LAYERS, COLUMNS, "bfloat16", data, name_projection(LAYERS, COLUMNS, "bfloat16", data))


def reader(projection: Projection) -> ProjectionReader:
    return ProjectionReader(LAYERS, HIDDEN, COLUMNS, projection.name)


def test_a_projection_arrives_in_parts() -> None:
    projection = offered()
    parts = list(cut_projection(projection))
    assert len(parts) == 3 and max(len(part.data) for part in parts) == MAX_FEATURE_BYTES
    taking = reader(projection)
    assert [taking.take(part) for part in parts] == [False, False, True]
    assert b"".join(part.data for part in parts) == projection.data


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "int4"},
        {"num_columns": COLUMNS + 2},
        {"offset": 1},
        {"data": b""},
        {"data": bytes(MAX_FEATURE_BYTES + 1)},
    ],
)
def test_a_part_that_is_not_the_first_is_refused(changes: dict[str, object]) -> None:
    projection = offered()
    first = next(cut_projection(projection))
    with pytest.raises(InvalidRequestError, match="projection"):
        reader(projection).take(replace(first, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"dtype": "float16"}, {"offset": 0}, {"num_columns": 2}])
def test_a_part_that_does_not_follow_is_refused(changes: dict[str, object]) -> None:
    projection = offered()
    first, second, _ = cut_projection(projection)
    taking = reader(projection)
    taking.take(first)
    with pytest.raises(InvalidRequestError, match="projection"):
        taking.take(replace(second, **changes))  # type: ignore[arg-type]


def test_more_than_the_matrix_is_refused() -> None:
    projection = offered()
    taking = reader(projection)
    parts = list(cut_projection(projection))
    for part in parts[:-1]:
        taking.take(part)
    last = parts[-1]
    with pytest.raises(InvalidRequestError, match="do not follow"):
        taking.take(ProjectionPart(last.num_columns, last.dtype, last.offset, last.data + b"x"))


def test_a_matrix_that_is_larger_in_its_own_format_than_any_may_be_is_refused() -> None:
    columns = MAX_PROJECTION_BYTES // (2 * HIDDEN) // 2
    first = ProjectionPart(columns, "bfloat16", 0, bytes(8))
    assert not ProjectionReader(LAYERS, HIDDEN, columns, "ab" * 32).take(first)
    with pytest.raises(InvalidRequestError, match=f"{2 * MAX_PROJECTION_BYTES}.*{MAX_PROJECTION_BYTES}"):
        ProjectionReader(LAYERS, HIDDEN, columns, "ab" * 32).take(replace(first, dtype="float32"))


def test_another_matrix_than_the_one_offered_is_refused() -> None:
    projection = offered()
    taking = reader(projection)
    first, *rest = cut_projection(projection)
    taking.take(replace(first, data=b"\xff" + first.data[1:]))
    taking.take(rest[0])
    with pytest.raises(InvalidRequestError, match="SHA-256"):
        taking.take(rest[1])
