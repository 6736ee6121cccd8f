"""The service as a process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

from draft_door import HELLO, Stream
from draft_fakes import open_message

from outrider.protocol.speculation import Grow, Hello
from outrider.rpc.channel import open_channel


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_help_lists_the_options() -> None:
    found = run("-m", "draft_service", "--help")
    assert found.returncode == 0
    for flag in (
        "--speculative-num-draft-tokens",
        "--match-type",
        "--branch-length",
        "--capacity",
        "--max-bfs-breadth",
    ):
        assert flag in found.stdout


def test_options_that_do_not_fit_end_the_process_with_one_line() -> None:
    found = run("-m", "draft_service", "--branch-length", "5")
    assert found.returncode == 2
    assert "--branch-length" in found.stderr
    assert "Traceback" not in found.stderr


def test_the_service_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, draft_service.main; from outrider.drafting.registry import build_drafter;"
        "from outrider.config.draft import DraftOptions; build_drafter(DraftOptions());"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'triton')))"
    )
    assert run("-c", code).returncode == 0


async def test_a_process_serves_tells_its_metrics_and_drains_on_sigterm(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "draft_service", "--address", f"unix:{tmp_path / 'draft.sock'}"),
        *("--speculative-algorithm=NGRAM", "--draft-ahead=never"),
        *("--metrics-address", "127.0.0.1:0", "--ready-file", str(ready)),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        lines = [b""]
        while b"serving on" not in lines[-1]:
            lines.append(await process.stderr.readline())
            assert process.returncode is None
        assert any(b"--draft-ahead: without effect with drafters NGRAM" in line for line in lines)
        async with asyncio.timeout(20):
            while not ready.exists():
                await asyncio.sleep(0.01)
        addresses = json.loads(ready.read_text())
        async with open_channel(addresses["address"]) as channel:
            stream = Stream(channel)
            await stream.send(HELLO, open_message([1, 2, 3, 1, 2]))
            assert isinstance(await stream.receive(), Hello)
            token_ids: list[int] = []
            async with asyncio.timeout(20):  # the draft may acknowledge the request before anything has grown
                while not token_ids:
                    grow = await stream.receive()
                    assert isinstance(grow, Grow)
                    token_ids = list(grow.token_ids)
            assert token_ids[0] == 3
            page = ""
            async with asyncio.timeout(20):  # the engine tells its state now and then
                while "outrider_draft_open_requests 1.0" not in page:
                    page = await asyncio.to_thread(_fetch, f"http://{addresses['metrics_address']}/metrics")
            assert "outrider_draft_shared_trie_nodes" in page
            stream.call.cancel()
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert not ready.exists()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text
