"""REST clients that misbehave: one vanishes in mid-stream, one does not read."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from benchmarks.chaos.proxy import vanish

PROMPT = [5, 6, 7, 8]
"""Token ids that exist in every model."""
MAX_TOKENS = 200
SMALL_BUFFER = 2048
PAUSE_SECONDS = 0.05


async def vanishing(rest_url: str, seed: int) -> None:
    """Ask again and again, and reset the connection after a part of each answer, until cancelled."""
    draw = random.Random(seed)
    while True:
        with suppress(OSError):
            await _vanish_once(rest_url, draw.randrange(200, 4000))
        await asyncio.sleep(PAUSE_SECONDS)


async def unread(rest_url: str) -> None:
    """Ask for a long answer with as many logprobs as possible, and leave it unread until cancelled."""
    connection = await _ask(rest_url, logprobs=5)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        vanish(connection)


async def _vanish_once(rest_url: str, num_bytes: int) -> None:
    connection = await _ask(rest_url)
    try:
        loop = asyncio.get_running_loop()
        while num_bytes > 0 and (data := await loop.sock_recv(connection, num_bytes)):
            num_bytes -= len(data)
    finally:
        vanish(connection)


async def _ask(rest_url: str, **fields: object) -> socket.socket:
    """Send a request for a stream. Return its connection, unread."""
    url = urlsplit(rest_url)
    asked = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "stream": True, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**asked, **fields})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(connection, (url.hostname, url.port))
        await loop.sock_sendall(connection, f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    except BaseException:
        connection.close()
        raise
    return connection
