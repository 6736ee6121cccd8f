"""Starts draft services for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from draft_door import Door, serve_door
from draft_fakes import SignallingDrafter

from draft_service.drafters.base import Drafter
from outrider.config.draft import DraftOptions

Serve = Callable[..., Awaitable[Door]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Start a service: `door = await serve(drafter, options)`; it ends with the test."""
    async with AsyncExitStack() as stack:

        async def start(drafter: Drafter | None = None, **options: object) -> Door:
            made = drafter or SignallingDrafter()
            return await stack.enter_async_context(
                serve_door(tmp_path / "draft.sock", made, DraftOptions(**options))  # type: ignore[arg-type]
            )

        yield start
