"""The way of a commit to a live draft service and back: from its writing to the first `Grow` that acknowledges it.

The service is `python -m draft_service` with n-grams, on a socket of this machine; what drafting itself costs is small.
A verify service of one request commits and waits in turn: alone, and beside sessions that keep the door busy with
messages that it declines itself. Next to round trips stands what growth took in the engine for each commit, on the wall
clock, by its own metrics, and what all processes of the service took of the processor.

python benchmarks/draft_trip.py --out benchmarks/results/draft_trip.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from pages import Page, cost_of
from report import Row, cpu_name, write_report

from outrider.protocol.codec import decode_draft, encode_verify
from outrider.protocol.messages import PROTOCOL_VERSION, Commit, Grow, Hello, Open
from outrider.rpc.channel import open_channel
from outrider.sampling.noise import NOISE_VERSION
from outrider.sampling.params import SamplingParams
from outrider.v1 import draft_pb2, draft_pb2_grpc

VOCAB = 32000
HELLO = Hello(PROTOCOL_VERSION, NOISE_VERSION, model="target", vocab_size=VOCAB)
GREEDY = SamplingParams(temperature=0.0)
_WARM = 200


class Verify:
    """One session with one request, whose text repeats itself now and then."""

    def __init__(self, address: str, seed: int) -> None:
        self.seconds: list[float] = []
        self._address = address
        self._draw = np.random.default_rng(seed)
        self._text = [int(token) for token in self._draw.integers(0, 400, 300)] * 2
        self._length = 0

    async def run(self, count: int, pause: float) -> None:
        """Commit so many times, with pauses in between in which the draft gets ahead."""
        async with open_channel(self._address) as channel:
            call = draft_pb2_grpc.DraftServiceStub(channel).Speculate()
            await call.write(encode_verify([HELLO]))
            await call.read()
            tokens = np.array(self._text, np.int32)
            self._length = len(tokens)
            await call.write(encode_verify([Open(1, tokens, len(tokens), GREEDY, 64)]))
            await self._acknowledged(call)
            for turn in range(count):
                await asyncio.sleep(pause)
                fresh = np.array(self._next(turn), np.int32)
                commit = Commit(1, self._length, fresh, 0, 0, None, 64)
                self._length += len(fresh)
                began = time.perf_counter()
                await call.write(encode_verify([commit]))
                await self._acknowledged(call)
                self.seconds.append(time.perf_counter() - began)
            call.cancel()

    def _next(self, turn: int) -> list[int]:
        if turn % 3:
            return [self._text[place % len(self._text)] for place in (2 * turn, 2 * turn + 1)]
        return [int(self._draw.integers(0, VOCAB))]

    async def _acknowledged(self, call: object) -> None:
        while True:
            batch = await call.read()  # type: ignore[attr-defined]
            if any(isinstance(one, Grow) and one.acked_len >= self._length for one in decode_draft(batch)):
                return


async def keep_busy(address: str) -> None:
    """Have the door decode, decline and encode what never gets to the engine."""
    nonsense = draft_pb2.VerifyEvent(open=draft_pb2.Open(request=5, token_ids=b"abc", prompt_len=1))
    batch = draft_pb2.DraftServiceSpeculateRequest(events=[nonsense] * 64)
    async with open_channel(address) as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Speculate()
        await call.write(encode_verify([HELLO]))
        await call.read()
        while True:
            await call.write(batch)
            await call.read()
            await asyncio.sleep(0.002)


@contextmanager
def service(folder: Path) -> Iterator[tuple[str, str, int]]:
    """A draft service; its address, its metrics page and its process."""
    ready = folder / "ready.json"
    options = ["--speculative-algorithm=NGRAM", "--metrics-address=127.0.0.1:0", "--log-level=WARNING"]
    command = [sys.executable, "-m", "draft_service", f"--address=unix:{folder}/draft", f"--ready-file={ready}"]
    process = subprocess.Popen([*command, *options])
    try:
        while not ready.exists():
            if process.poll() is not None:
                raise SystemExit("the draft service did not start")
            time.sleep(0.05)
        addresses = json.loads(ready.read_text())
        yield addresses["address"], f"http://{addresses['metrics_address']}/metrics", process.pid
    finally:
        process.terminate()
        process.wait()


async def measure(folder: Path, count: int, num_busy: int) -> list[Row]:
    """A service of its own, warm, and so many commits."""
    with service(folder) as (address, url, pid):
        await Verify(address, 1).run(_WARM, 0.0)
        busy = [asyncio.create_task(keep_busy(address)) for _ in range(num_busy)]
        verify = Verify(address, 2)
        before, cost_before = await asyncio.to_thread(Page.read, url), cost_of(pid)
        await verify.run(count, 0.001)
        await asyncio.sleep(0.5)  # figures are told now and then
        page, cost = (await asyncio.to_thread(Page.read, url)).since(before), cost_of(pid)
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
    trips = np.array(verify.seconds) * 1e3
    growth = page.histogram("outrider_draft_growth_seconds").total / count
    values = {
        **{f"trip_p{share}_ms": float(np.percentile(trips, share)) for share in (10, 50, 90, 99)},
        "growth_ms": growth * 1e3,
        "processor_ms": (cost.cpu_seconds - cost_before.cpu_seconds) / count * 1e3,
    }
    case = f"ngram {num_busy} busy sessions"
    print(f"{case}: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items()), flush=True)
    return [Row(case, name, round(value, 4), "ms") for name, value in values.items()]


async def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", type=int, default=3000)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2], help="Sessions that keep the door busy.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for num_busy in options.busy:
        with tempfile.TemporaryDirectory() as folder:
            rows += await measure(Path(folder), options.commits, num_busy)
    if options.out:
        write_report(options.out, "draft_trip", cpu_name(), rows, ("grpcio", "msgspec"))


if __name__ == "__main__":
    asyncio.run(main())
