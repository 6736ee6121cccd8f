"""A device that fails in a round, through the whole system: what clients are told, and that the service comes back."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import grpc
import httpx
from tiny_service import Reply, generate_all

from outrider.cli.cluster import Cluster
from outrider.config.verify import VerifyOptions

FAULTY = Path(__file__).parent / "faulty"
START_SECONDS = 240.0
"""Longest that a start of verify may take, where kernels have to be compiled for a GPU."""
TEST_SECONDS = 2 * START_SECONDS + 120
"""The limit of a test that waits for two starts, and asks before and after the second one."""


class Events:
    """What befalls the services of a cluster."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._back = threading.Semaphore(0)

    def note(self, text: str) -> None:
        self.texts.append(text)
        if text == "verify serves again":
            self._back.release()

    def wait_until_back(self) -> None:
        assert self._back.acquire(timeout=START_SECONDS), self.texts


def both(cluster: Cluster) -> list[Reply]:
    return asyncio.run(generate_all(cluster, [[1, 2], [1, 3]], 60))


def ask(cluster: Cluster, body: dict[str, object]) -> httpx.Response:
    """The answer to a completion, once the gateway has found the service again."""
    for _ in range(600):
        answer = httpx.post(f"{cluster.rest_url}/v1/completions", json=body, timeout=60)
        if answer.status_code != 503:
            break
        assert "retry-after" in answer.headers
        threading.Event().wait(0.05)
    return answer


def check_device_fault(folder: Path, tmp_path: Path, device: str) -> None:
    """The model in `folder` is served on `device`, which fails once."""
    faults, events = tmp_path / "faults", Events()
    faults.write_text("1")
    path = os.pathsep.join(filter(None, [str(FAULTY), os.environ.get("PYTHONPATH")]))
    cluster = Cluster(
        verify=VerifyOptions(
            model=str(folder),
            device=device,
            dtype="float32" if device == "cpu" else "bfloat16",
            max_total_tokens=2048,
            max_running_requests=4,
            max_draft_tokens=4,
            served_model_name="tiny",
        ),
        services=("verify", "gateway"),
        supervise=True,
        modules={"verify": "faulty_verify"},
        env={**os.environ, "PYTHONPATH": path, "FAULTS_FILE": str(faults)},
        on_event=events.note,
        start_seconds=START_SECONDS,
    )
    with cluster:
        replies = both(cluster)
        # On a fast device the second request may come when the first one has had all rounds but the last, or is over.
        assert any(reply.token_ids for reply in replies)
        for reply in replies:
            assert reply.code is grpc.StatusCode.UNAVAILABLE, reply
            assert len(reply.token_ids) < 60
            assert "device" not in reply.details, "what failed is for the log alone"
        events.wait_until_back()
        body = {"model": "tiny", "prompt": "word5", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        assert ask(cluster, body).status_code == 200
        assert [len(reply.token_ids) for reply in both(cluster)] == [60, 60]
    ended = [text for text in events.texts if text.startswith("verify ended")]
    assert len(ended) == 1 and "exit code 1" in ended[0], events.texts
