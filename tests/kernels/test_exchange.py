"""Sums and joins over ranks against plain torch, the ranks one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch import Tensor

from kernels.exchange import join_columns, sum_rows, sum_rows_normed, two_shot_pays
from kernels.exchange_state import NUM_TURNS, Mailboxes, empty, mailbox_bytes
from kernels.reference import elementwise as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


class Ranks:
    """Mailboxes of ranks of one process. Nobody waits: what a rank has not sent yet is put where it would come."""

    def __init__(self, world: int, max_rows: int, width: int, dtype: torch.dtype, device: str) -> None:
        size = mailbox_bytes(world, max_rows, width, dtype)
        memory = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(world)]
        for one in memory:
            empty(one, dtype)
        table = torch.tensor([one.data_ptr() for one in memory], dtype=torch.int64, device=device)
        ints = [[torch.zeros(count, dtype=torch.int32, device=device) for count in (max_rows, 1)] for _ in memory]
        self.boxes = [
            Mailboxes(rank, world, max_rows, width, dtype, table, *ints[rank], torch.zeros(1, dtype=torch.int32), 0.0)
            for rank in range(world)
        ]
        if device == "cuda":
            self.boxes = [replace(boxes, report=boxes.report.pin_memory()) for boxes in self.boxes]
        self.memory = [one.view(dtype).view(NUM_TURNS, world, max_rows, width) for one in memory]
        """By rank, what it reads: by turn, sender and row."""
        self.rounds = 0

    def sum(
        self, parts: Sequence[Tensor], residual: Tensor | None, weight: Tensor | None, order: Sequence[int], two: bool
    ) -> list[tuple[Tensor, Tensor | None]]:
        """What each rank finds; they run in that order."""
        expected = reference.sum_rows(parts, residual)
        found: dict[int, tuple[Tensor, Tensor | None]] = {}
        for rank in order:
            for later in (other for other in order if other not in found and other != rank):
                for row in range(len(expected)):
                    box = self.memory[rank][int(self.boxes[rank].turns[row]) % NUM_TURNS, later, row]
                    owner = row % len(parts)
                    if not two or owner == rank:
                        box.copy_(parts[later][row] + 0.0)
                    elif owner == later:
                        box.copy_(expected[row])
            if weight is None or residual is None:
                found[rank] = sum_rows(self.boxes[rank], parts[rank], residual, two), None
            else:
                found[rank] = sum_rows_normed(self.boxes[rank], parts[rank], residual, weight, EPS, two)
            assert self.boxes[rank].silent_rank() is None
        return [found[rank] for rank in range(len(parts))]


def random(seed: int, *size: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bfloat16 and device == "cpu":
        # Sums that need no rounding, which the interpreter gets wrong.
        rows = (torch.randint(-32, 33, size, generator=generator) / 8).to(dtype)
    else:
        rows = torch.randn(*size, generator=generator).to(dtype)
    rows.view(-1)[:3] = torch.tensor([0.0, -0.0, -0.0])
    return rows.to(device)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    word = torch.int32 if found.dtype == torch.float32 else torch.int16
    return torch.equal(found.view(word), expected.view(word))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("world", "width"), [(2, 40), (3, 64)])
def test_sums_are_those_in_the_order_of_ranks_on_every_rank_whoever_comes_first(
    device: str, dtype: torch.dtype, world: int, width: int
) -> None:
    two_shot = (world == 2) == (dtype is torch.float32)
    ranks = Ranks(world, 4, width, dtype, device)
    weight = 1 + random(99, width, dtype=dtype, device=device)
    orders = list(permutations(range(world)))
    # Rounds of different numbers of rows follow each other, and each turn comes again.
    for number, num_rows in enumerate((2, 4, 1, 4, 3, 4, 4)):
        parts = [random(10 * number + rank, num_rows, width, dtype=dtype, device=device) for rank in range(world)]
        residual = random(500 + number, num_rows, width, dtype=dtype, device=device) if number % 3 else None
        found = ranks.sum(parts, residual, weight, orders[number % len(orders)], two_shot)
        expected = reference.sum_rows(parts, residual)
        for stream, normed in found:
            assert same_bits(stream, expected)
            if residual is not None:
                _, wanted = reference.sum_rows_normed(parts, residual, weight, EPS)
                assert normed is not None
                assert found[0][1] is not None and same_bits(normed, found[0][1])
                torch.testing.assert_close(normed, wanted)


def test_one_shot_and_two_may_take_turns(device: str) -> None:
    ranks = Ranks(3, 4, 16, torch.float32, device)
    for number, two_shot in enumerate((False, True, True, False, False, True, False, True, True, True, False)):
        parts = [random(10 * number + rank, 4, 16, dtype=torch.float32, device=device) for rank in range(3)]
        order = list(permutations(range(3)))[number % 6]
        for stream, _ in ranks.sum(parts, None, None, order, two_shot):
            assert same_bits(stream, reference.sum_rows(parts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_joined_in_the_order_of_ranks(device: str, dtype: torch.dtype) -> None:
    ranks = Ranks(2, 4, 24, dtype, device)
    for number, num_rows in enumerate((1, 3, 2, 3, 3)):
        parts = [random(10 * number + rank, num_rows, 48, dtype=dtype, device=device) for rank in range(2)]
        order = (0, 1) if number % 2 else (1, 0)
        # Two pieces a row, and mailboxes for two rows: a third row comes in a launch of its own.
        found = {}
        for rank in order:
            other = 1 - rank
            if not found:
                turn = ranks.boxes[rank].turns.tolist()
                for row in range(min(num_rows, 2)):
                    for piece in range(2):
                        at = 2 * row + piece
                        given = parts[other][row, 24 * piece : 24 * (piece + 1)] + 0.0
                        ranks.memory[rank][turn[at] % NUM_TURNS, other, at].copy_(given)
                for piece in range(2 if num_rows > 2 else 0):
                    given = parts[other][2, 24 * piece : 24 * (piece + 1)] + 0.0
                    ranks.memory[rank][(turn[piece] + 1) % NUM_TURNS, other, piece].copy_(given)
            found[rank] = join_columns(ranks.boxes[rank], parts[rank])
            assert ranks.boxes[rank].silent_rank() is None
        for rank in range(2):
            assert same_bits(found[rank], reference.join_columns(parts))


def test_more_rows_than_mailboxes_take_several_launches(device: str) -> None:
    ranks = Ranks(1, 2, 16, torch.float32, device)
    rows = random(1, 5, 16, dtype=torch.float32, device=device)
    assert same_bits(sum_rows(ranks.boxes[0], rows), rows + 0.0)


def test_a_rank_that_does_not_send_is_named_and_nothing_is_waited_for_from_then_on(device: str) -> None:
    ranks = Ranks(3, 2, 16, torch.float32, device)
    parts = [random(rank, 2, 16, dtype=torch.float32, device=device) for rank in range(3)]
    ranks.memory[0][0, 1, :2].copy_(parts[1])
    late = replace(ranks.boxes[0], timeout_seconds=2.0)
    sum_rows(late, parts[0])
    if device == "cuda":
        torch.cuda.synchronize()
    assert ranks.boxes[0].silent_rank() == 2
    # It would wait for good.
    sum_rows(replace(late, timeout_seconds=1e9), parts[0])


def test_what_does_not_fit_is_refused(device: str) -> None:
    boxes = Ranks(2, 2, 16, torch.float32, device).boxes[0]
    rows = torch.zeros(2, 16, device=device)
    with pytest.raises(ValueError, match="16 columns"):
        sum_rows(boxes, rows.bfloat16())
    with pytest.raises(ValueError, match="16 columns"):
        sum_rows(boxes, torch.zeros(2, 8, device=device))
    with pytest.raises(ValueError, match="residual"):
        sum_rows(boxes, rows, rows[:1])
    with pytest.raises(ValueError, match="norm's weight"):
        sum_rows_normed(boxes, rows, rows, torch.zeros(8, device=device), EPS)
    with pytest.raises(ValueError, match="fewer rows"):
        mailbox_bytes(8, 1 << 16, 8192, torch.bfloat16)
    with pytest.raises(ValueError, match="float64"):
        mailbox_bytes(2, 1, 16, torch.float64)
    with pytest.raises(ValueError, match="multiple of 16"):
        join_columns(boxes, torch.zeros(16, device=device))
    with pytest.raises(ValueError, match="multiple of 16"):
        join_columns(boxes, torch.zeros(2, 24, device=device))


def test_large_messages_go_by_two_shots_unless_told() -> None:
    assert [two_shot_pays(size << 10, 2) for size in (8, 1024, 2048)] == [False, False, True]
    assert [two_shot_pays(size << 10, 8) for size in (8, 64, 128)] == [False, False, True]
