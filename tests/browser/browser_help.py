"""What tests of the page share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Open = Callable[..., Any]
"""The fixture `visit`."""


def alter(page: Any, when: Callable[[dict[str, Any]], bool], **changes: Any) -> None:
    """Changes bodies of requests for answers on their way; the services answer what they were really asked."""

    def handle(route: Any) -> None:
        body = route.request.post_data_json
        route.continue_(post_data=json.dumps(body | changes)) if when(body) else route.continue_()

    page.route("**/v1/chat/completions", handle)


def picture(page: Any, name: str, *, full: bool = True) -> None:
    """Keeps a screenshot of the whole page, or of what is in view, where a folder for them is named."""
    folder = os.environ.get("OUTRIDER_TEST_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=full)
