"""Starts the small service for a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from small_service import Running, run_server


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Running]]]:
    """A function that starts a server on a unix socket (or `address`); it is stopped when the test ends."""
    async with AsyncExitStack() as stack:

        async def begin(address: str | None = None, **options: Any) -> Running:
            return await stack.enter_async_context(run_server(address or f"unix:{tmp_path}/s", **options))

        yield begin
