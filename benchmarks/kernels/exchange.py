"""The exchange between ranks of a tensor-parallel round: check it over many repetitions first, then time it.

Each rank is a process; `--devices 0 1` gives two GPUs, `--devices 0 0` two processes on one (they get its time slices
in turn, so times mean nothing there). With `--streams 2`, ranks are streams of one process on one GPU, which run at the
same time; for example `--streams 2 --repetitions 100000 --kinds one-shot two-shot join --widths 8192 --kib 16 72 2048`.

Wrong numbers are counted on the device; any of them makes the exit code 1. Times are those of a launch within a CUDA
graph on rank 0, next to the norm alone and to NCCL.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.elementwise import rms_norm
from kernels.exchange import join_columns, sum_rows, sum_rows_normed
from kernels.exchange_state import Mailboxes, empty, mailbox_bytes
from kernels.reference import elementwise as reference
from outrider.layers.exchange import PeerMailboxes, Trade
from outrider_tools.bench.report import Row, write_report

EPS = 1e-5
NUM_INPUTS = 7
"""Number of input sets, used in turn: a prime that differs from the number of turns, so that stale data is noticed."""
CALLS = 70
"""Repetitions in a graph."""
MAX_DELAY_NS = 20_000
MAX_BYTES = 2 << 20
MAX_STREAM_PROGRAMS = 128
"""Most programs of an exchange if ranks share a device: each one holds a processor of the device's 132 while it waits,
and the other rank needs some, too. Several smaller launches do not help: each lets the next begin, which takes more."""
Call = Callable[[int], object]


@triton.jit
def _wait(times, number):
    """Wait for times[number] ns."""
    begin = tl.extra.cuda.globaltimer()
    wanted = tl.load(times + number).to(tl.int64)
    while tl.extra.cuda.globaltimer().to(tl.int64) - begin.to(tl.int64) < wanted:
        pass


@dataclass(frozen=True)
class ExchangeCase:
    """What to exchange, and how."""

    kind: str
    num_rows: int
    width: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Name for a report's row."""
        return f"{self.kind} m{self.num_rows} w{self.width} {str(self.dtype).removeprefix('torch.')}"

    @property
    def num_programs(self) -> int:
        """Number of programs of a launch."""
        return self.num_rows * (self.width // join_width(self.width) if self.kind == "join" else 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of a rank's message."""
        return self.num_rows * self.width * self.dtype.itemsize


class RankInputs:
    """NUM_INPUTS sets of all ranks' inputs, which every rank can make, and the expected result of each set."""

    def __init__(self, case: ExchangeCase, rank: int, world: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(case.num_bytes)

        def made(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device).to(case.dtype)

        self.case, self.rank = case, rank
        self.weight = made(case.width)
        self.residuals = [made(case.num_rows, case.width) for _ in range(NUM_INPUTS)]
        parts = [[made(case.num_rows, case.width) for _ in range(world)] for _ in range(NUM_INPUTS)]
        self.own = [part[rank] for part in parts]
        if case.kind == "join":
            self.expected = [reference.join_columns(part) for part in parts]
        else:
            self.expected = [
                reference.sum_rows(part, residual) for part, residual in zip(parts, self.residuals, strict=True)
            ]

    def exchanged(self, boxes: Mailboxes, number: int) -> tuple[Tensor, Tensor | None]:
        """Return the sum or the join for a set of inputs, and the sum's norm."""
        at = number % NUM_INPUTS
        if self.case.kind == "join":
            return join_columns(boxes, self.own[at]), None
        two_shot = self.case.kind == "two-shot"
        return sum_rows_normed(boxes, self.own[at], self.residuals[at], self.weight, EPS, two_shot)


@dataclass(frozen=True)
class ExchangeVerdict:
    """Result after `repetitions`: how many numbers had wrong bits, and a hash of the norms."""

    repetitions: int
    num_wrong: int
    norms: int


class RankCheck:
    """Repeats exchanges with random delays in a graph, and counts wrong numbers.

    Norms must have the same bits as in the first exchange, and be close to the norm kernel's.
    """

    def __init__(self, inputs: RankInputs, boxes: Mailboxes, device: torch.device) -> None:
        self.inputs, self.boxes = inputs, boxes
        self.stream = torch.cuda.Stream(device)
        self.wrong = torch.zeros(1, dtype=torch.int64, device=device)
        shape = (case.num_rows, case.width) if (case := inputs.case).kind != "join" else (0, 0)
        self._norms = [torch.empty(shape, dtype=case.dtype, device=device) for _ in range(NUM_INPUTS)]
        self._times = torch.zeros(CALLS, dtype=torch.int32, device=device)
        self._graph = torch.cuda.CUDAGraph()

    def warm(self) -> None:
        """Run the first exchanges. Their sums or joins are compared, and their norms kept."""
        with torch.cuda.stream(self.stream):
            self.wrong.zero_()
            for number, kept in enumerate(self._norms):
                normed = self._exchange(number)
                if normed is not None:
                    kept.copy_(normed)

    def capture(self) -> None:
        """Capture the graph, after `warm`."""
        with torch.cuda.graph(self._graph, stream=self.stream):
            self._times.random_(0, MAX_DELAY_NS)
            for number in range(CALLS):
                normed = self._exchange(number)
                if normed is not None:
                    self._compare(normed, self._norms[number % NUM_INPUTS])

    def replay(self) -> None:
        """Run CALLS more repetitions."""
        with torch.cuda.stream(self.stream):
            self._graph.replay()

    def verdict(self, repetitions: int) -> ExchangeVerdict:
        """Wait for the end and return the verdict. Raises RuntimeError if a rank did not answer."""
        self.stream.synchronize()
        raise_silent(self.boxes)
        digest = 0
        for normed, expected in zip(self._norms, self.inputs.expected, strict=True):
            if self.inputs.case.kind == "join":
                break
            torch.testing.assert_close(normed, rms_norm(expected, self.inputs.weight, EPS))
            digest = (31 * digest + int(words_of(normed).long().sum())) % (1 << 61)
        return ExchangeVerdict(repetitions, int(self.wrong), digest)

    def _exchange(self, number: int) -> Tensor | None:
        _wait[(1,)](self._times, number)
        found, normed = self.inputs.exchanged(self.boxes, number)
        self._compare(found, self.inputs.expected[number % NUM_INPUTS])
        return normed

    def _compare(self, found: Tensor, expected: Tensor) -> None:
        self.wrong.add_((words_of(found) != words_of(expected)).sum())


def words_of(numbers: Tensor) -> Tensor:
    """Return the bits of `numbers` as integers."""
    return numbers.view(torch.int32 if numbers.dtype == torch.float32 else torch.int16)


def raise_silent(boxes: Mailboxes) -> None:
    """Raise RuntimeError if this rank waited in vain for another one."""
    if (silent := boxes.silent_rank()) is not None:
        raise RuntimeError(f"rank {silent} did not send to rank {boxes.rank} within {boxes.timeout_seconds} s")


def graph_us(call: Call, replays: int = 10) -> float:
    """Return the microseconds of a call in a graph of CALLS, the median of three. All ranks do the same."""
    for number in range(3):
        call(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number)
    times = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / CALLS / replays)
    # The first measurement includes the ranks' meeting.
    return sorted(times[1:])[1]


class RankWorker:
    """A rank's side of the benchmark. Its process calls the methods by name."""

    def __init__(self, rank: int, world: int, device: torch.device, trade: Trade, timeout: float) -> None:
        self.rank, self.world, self.device, self.trade, self.timeout = rank, world, device, trade, timeout
        self._boxes: dict[tuple[int, torch.dtype], PeerMailboxes] = {}
        torch.cuda.set_device(device)

    def boxes(self, case: ExchangeCase) -> Mailboxes:
        """Return mailboxes for messages of at most MAX_BYTES, or for the pieces of a joined row."""
        width = join_width(case.width) if case.kind == "join" else case.width
        key = width, case.dtype
        if key not in self._boxes:
            max_rows = MAX_BYTES // (width * case.dtype.itemsize)
            self._boxes[key] = PeerMailboxes(
                self.rank, self.world, max_rows, width, case.dtype, self.device, self.trade, self.timeout
            )
        return self._boxes[key].boxes

    def check(self, case: ExchangeCase, repetitions: int) -> ExchangeVerdict:
        """Check at least `repetitions` repetitions."""
        check = RankCheck(RankInputs(case, self.rank, self.world, self.device), self.boxes(case), self.device)
        torch.cuda.synchronize()
        self.trade(b"")
        check.warm()
        check.verdict(0)
        check.capture()
        replays = -(-repetitions // CALLS)
        for _ in range(replays):
            check.replay()
        return check.verdict(replays * CALLS)

    def silent(self, case: ExchangeCase, sender: int) -> int | None:
        """Return the rank that this one waits for in vain if only `sender` sends."""
        boxes = self.boxes(case)
        if self.rank == sender:
            RankInputs(case, self.rank, self.world, self.device).exchanged(boxes, 0)
            torch.cuda.synchronize()
        return boxes.silent_rank()

    def times(self, case: ExchangeCase) -> dict[str, float]:
        """Return microseconds by kind of work."""
        boxes = self.boxes(case)
        inputs = RankInputs(case, self.rank, self.world, self.device)
        found = {}
        with torch.inference_mode():
            self.trade(b"")
            found["exchange"] = graph_us(lambda number: inputs.exchanged(boxes, number))
            if case.kind == "one-shot":
                found["norm"] = graph_us(lambda number: rms_norm(inputs.own[0], inputs.weight, EPS))
                self.trade(b"")
                found["sum"] = graph_us(lambda number: sum_rows(boxes, inputs.own[0]))
        raise_silent(boxes)
        return found

    def nccl(self, case: ExchangeCase) -> dict[str, float]:
        """Return microseconds of the same work with NCCL."""
        inputs = RankInputs(case, self.rank, self.world, self.device)
        rows = inputs.own[0].clone()
        joined = rows.new_empty(self.world * case.num_rows, case.width)

        def normed(_: int) -> object:
            torch.distributed.all_reduce(rows)
            return rms_norm(inputs.residuals[0] + rows, inputs.weight, EPS)

        def gathered(_: int) -> object:
            torch.distributed.all_gather_into_tensor(joined, rows)
            return joined

        with torch.inference_mode():
            if case.kind == "join":
                return {"NCCL": graph_us(gathered)}
            return {"NCCL and norm": graph_us(normed)}

    def start_nccl(self, path: str) -> bool:
        """Meet the other ranks through a file."""
        torch.distributed.init_process_group(
            "nccl", init_method=f"file://{path}", rank=self.rank, world_size=self.world, device_id=self.device
        )
        return True


def join_width(width: int) -> int:
    """Return the columns of a piece: the largest divisor up to 4096 that is a multiple of 8."""
    return next(size for size in range(min(width, 4096), 0, -1) if width % size == 0 and size % 8 == 0)


def serve(pipe: Connection, rank: int, world: int, device: int, timeout: float) -> None:
    """Run a rank's process: call the methods that are asked for by name, until the pipe ends."""

    def trade(own: bytes) -> Sequence[bytes]:
        pipe.send(("trade", own))
        received: Sequence[bytes] = pipe.recv()
        return received

    mine = RankWorker(rank, world, torch.device("cuda", device), trade, timeout)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("done", getattr(mine, name)(*arguments)))
        except Exception:
            pipe.send(("failed", traceback.format_exc()))


class RankProcesses:
    """Rank processes that get the same questions at the same time."""

    def __init__(self, devices: Sequence[int], timeout: float) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes, self.processes = [], []
        for rank, device in enumerate(devices):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(theirs, rank, len(devices), device, timeout), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def ask(self, name: str, *arguments: object) -> list[Any]:
        """Return all answers, in the order of ranks. Raises RuntimeError with the errors of the ranks that failed."""
        for pipe in self._pipes:
            pipe.send((name, arguments))
        while True:
            answers = [pipe.recv() for pipe in self._pipes]
            failed = [words for kind, words in answers if kind == "failed"]
            if failed:
                # A rank that is still trading gets an empty answer, which ends its wait.
                for pipe, (kind, _) in zip(self._pipes, answers, strict=True):
                    if kind == "trade":
                        pipe.send([])
                        pipe.recv()
                raise RuntimeError("\n".join(failed))
            if all(kind == "done" for kind, _ in answers):
                return [found for _, found in answers]
            for pipe in self._pipes:
                pipe.send([own for _, own in answers])

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


class LocalMailboxes:
    """Mailboxes of ranks that are all in this process."""

    def __init__(self, world: int, max_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        size = mailbox_bytes(world, max_rows, width, dtype)
        self._memory = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(world)]
        table = torch.tensor([one.data_ptr() for one in self._memory], dtype=torch.int64, device=device)
        self.boxes = []
        for rank in range(world):
            turns, failed = (torch.zeros(count, dtype=torch.int32, device=device) for count in (max_rows, 1))
            report = torch.zeros(1, dtype=torch.int32).pin_memory()
            self.boxes.append(Mailboxes(rank, world, max_rows, width, dtype, table, turns, failed, report))

    def reset(self, wait: bool) -> None:
        """Reset all mailboxes. With `wait` False, no rank waits for another."""
        torch.cuda.synchronize()
        for memory, boxes in zip(self._memory, self.boxes, strict=True):
            empty(memory, boxes.dtype)
            boxes.turns.zero_()
            boxes.failed.fill_(0 if wait else 1)
            boxes.report.zero_()
        torch.cuda.synchronize()


def check_streams(case: ExchangeCase, world: int, repetitions: int) -> list[ExchangeVerdict]:
    """Do the same as RankWorker.check on all ranks, with ranks as streams of this process."""
    device = torch.device("cuda", 0)
    width = join_width(case.width) if case.kind == "join" else case.width
    local = LocalMailboxes(world, MAX_BYTES // (width * case.dtype.itemsize), width, case.dtype, device)
    checks = [RankCheck(RankInputs(case, boxes.rank, world, device), boxes, device) for boxes in local.boxes]
    # A first launch may wait for the device, while another rank would wait for this one: so do not wait yet.
    local.reset(wait=False)
    for check in checks:
        check.warm()
        check.stream.synchronize()
        check.capture()
        check.replay()
    # A capture frees cached memory, and allocating it again waits for the device, too.
    local.reset(wait=False)
    for check in checks:
        check.warm()
    local.reset(wait=True)
    for check in checks:
        check.warm()
    torch.cuda.synchronize()
    replays = -(-repetitions // CALLS)
    for _ in range(replays):
        for check in checks:
            check.replay()
    return [check.verdict(replays * CALLS) for check in checks]


def cases(
    kinds: Sequence[str], dtypes: Sequence[str], widths: Sequence[int], sizes: Sequence[int]
) -> list[ExchangeCase]:
    """Return cases for messages of these sizes in KiB. Joins are float32, as wide as half a vocabulary of 128,256."""
    found = []
    for kind in kinds:
        if kind == "join":
            found += [ExchangeCase(kind, count, 64128, torch.float32) for count in (1, 8, 32)]
            continue
        for name in dtypes:
            dtype = getattr(torch, name)
            for width in widths:
                counts = sorted({max(1, (size << 10) // (width * dtype.itemsize)) for size in sizes})
                found += [ExchangeCase(kind, count, width, dtype) for count in counts]
    return found


def main() -> None:
    """Parse options, check, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--streams", type=int, default=0, help="ranks in this process, on one GPU; only for checks")
    parser.add_argument("--kinds", nargs="+", default=["one-shot"], choices=["one-shot", "two-shot", "join"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--widths", nargs="+", type=int, default=[4096])
    parser.add_argument("--kib", nargs="+", type=int, default=[8, 16, 32, 72, 128, 256, 512, 1024, 2048])
    parser.add_argument("--repetitions", type=int, default=0, help="of each case, checked; 0 leaves it out")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--nccl", action="store_true", help="its times, too")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds to wait for a rank")
    parser.add_argument("--out", type=Path, help="JSON file for the rows; without it they are printed")
    options = parser.parse_args()
    rows = list(measure(options))
    number = 1 if options.streams else len(set(options.devices))
    device = f"{number} x {torch.cuda.get_device_name()}" if number > 1 else torch.cuda.get_device_name()
    write_report(options.out, "exchange", device, rows, ("torch", "triton"))
    if any(row.value for row in rows if row.metric == "wrong_numbers"):
        raise SystemExit(1)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yield all figures that were asked for, and print them as they come."""
    with ExitStack() as stack:
        ranks = None
        if not options.streams:
            ranks = stack.enter_context(closing(RankProcesses(options.devices, options.timeout)))
        if ranks and options.nccl:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            ranks.ask("start_nccl", str(Path(folder) / "meet"))
        for case in cases(options.kinds, options.dtypes, options.widths, options.kib):
            if options.streams and case.num_programs > MAX_STREAM_PROGRAMS:
                print(f"{case.name}: left out, {case.num_programs} programs of each rank", file=sys.stderr, flush=True)
                continue
            found: dict[str, tuple[float, str]] = {}
            begin = time.monotonic()
            if options.repetitions:
                if ranks:
                    verdicts = ranks.ask("check", case, options.repetitions)
                else:
                    verdicts = check_streams(case, options.streams, options.repetitions)
                if len({verdict.norms for verdict in verdicts}) > 1:
                    raise SystemExit(f"{case.name}: ranks have norms of different bits")
                found["repetitions"] = verdicts[0].repetitions, ""
                found["wrong_numbers"] = sum(verdict.num_wrong for verdict in verdicts), ""
                found["check_seconds"] = (round(time.monotonic() - begin, 2), "s")
            if ranks and options.times:
                times = ranks.ask("times", case)[0] | (ranks.ask("nccl", case)[0] if options.nccl else {})
                found |= {f"{name}_us".replace(" ", "_"): (us, "us") for name, us in times.items()}
            words = "  ".join(f"{name} {value:.4g}" for name, (value, _) in found.items())
            print(f"{case.num_bytes / 1024:7.0f} KiB  {case.name:28s}{words}", file=sys.stderr, flush=True)
            for metric, (value, unit) in found.items():
                yield Row(case.name, metric, value, unit)


if __name__ == "__main__":
    main()
