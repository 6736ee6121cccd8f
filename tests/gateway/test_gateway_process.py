"""The gateway as its own process: without torch, from the first import to the exit."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
from gateway_world import until
from scripted_verify import ScriptedVerify, VerifyHost

PROGRAM = """
import sys
from gateway.main import main
code = main(sys.argv[1:])
heavy = sorted(name for name in ("torch", "transformers", "triton", "kernels") if name in sys.modules)
print("heavy modules:", heavy)
sys.exit(code)
"""


async def test_serving_a_request_imports_neither_torch_nor_transformers(verify: ScriptedVerify, tmp_path: Path) -> None:
    host = VerifyHost(verify, tmp_path / "verify.sock")
    await host.start()
    verify.set_answer("ok")
    ready_file = tmp_path / "ready.json"
    arguments = [
        "--address=127.0.0.1:0",
        "--rest-address=127.0.0.1:0",
        f"--verify={host.address}",
        f"--ready-file={ready_file}",
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, *arguments, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        await until(lambda: ready_file.exists() or process.returncode is not None)
        assert process.returncode is None
        bound = json.loads(ready_file.read_text())
        async with httpx.AsyncClient(base_url=f"http://{bound['rest_address']}") as http:
            response = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
            assert response.json()["choices"][0]["message"]["content"] == "ok"
            assert (await http.get("/metrics")).status_code == 200
        process.send_signal(signal.SIGTERM)
        output, _ = await process.communicate()
        assert (process.returncode, output.decode().strip()) == (0, "heavy modules: []")
        assert not ready_file.exists()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
        await host.stop()
