"""Starts draft services for tests."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from draft_door import Door, serve_door
from draft_fakes import SignallingDrafter

from outrider.config.draft import DraftOptions
from outrider.drafting.base import AnyDrafter
from outrider.drafting.model.features import MemoryMapper

# The ends of a ring are the same on both sides.
sys.path.append(str(Path(__file__).parent.parent / "verify"))
# What may come through a door is described with the layer below.
sys.path.append(str(Path(__file__).parent.parent / "rpc"))

Serve = Callable[..., Awaitable[Door]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Start a service: `door = await serve(drafter, options)`; it ends with the test."""
    async with AsyncExitStack() as stack:

        async def start(
            drafter: AnyDrafter | None = None,
            mapper: MemoryMapper | None = None,
            **options: object,
        ) -> Door:
            made = drafter or SignallingDrafter()
            chosen = DraftOptions(**options)  # type: ignore[arg-type]
            door = serve_door(tmp_path / "draft.sock", made, chosen, mapper)
            return await stack.enter_async_context(door)

        yield start
