"""The page at the gateway's root: files of this package, and what browsers are told about them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "json": "application/json",
}
# Own files only, and no string ever becomes markup or a script: the browser refuses what the code must not do.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # Kept, and asked about each time: a new release is seen at once, and an old one costs a header.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _Asset:
    """A file as it is sent."""

    body: bytes
    media_type: str
    tag: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tag", f'"{hashlib.sha256(self.body).hexdigest()[:32]}"')


class Page:
    """The page's files. They need no API key, since they tell nothing of model or users; the API stays protected."""

    def __init__(self, *, needs_key: bool) -> None:
        """`needs_key`: whether the page asks its user for an API key."""
        assets = _load()
        settings = json.dumps({"needs_key": needs_key}).encode()
        self._assets = {f"/page/{name}": asset for name, asset in assets.items()}
        self._assets["/"] = self._assets.pop("/page/index.html")
        self._assets["/page/settings.json"] = _Asset(settings, _TYPES["json"])
        self.paths = frozenset(self._assets)

    def routes(self) -> list[Route]:
        """Paths, and what serves them; to GET and HEAD."""
        return [Route(path, self._serve, methods=["GET"]) for path in sorted(self.paths)]

    async def _serve(self, request: Request) -> Response:
        asset = self._assets[request.scope["path"]]
        headers = {**_HEADERS, "etag": asset.tag}
        if _names(request.headers.get("if-none-match", ""), asset.tag):
            return Response(status_code=304, headers=headers)
        return Response(asset.body, headers={**headers, "content-type": asset.media_type})


def _names(condition: str, tag: str) -> bool:
    """Whether an If-None-Match header names this tag; a proxy that compresses marks it as weak."""
    return any(part.strip().removeprefix("W/") in (tag, "*") for part in condition.split(","))


def _load() -> Mapping[str, _Asset]:
    """The files by name. They are small and read once."""
    found = {}
    for entry in (files("gateway") / "page").iterdir():
        media_type = _TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None:
            found[entry.name] = _Asset(entry.read_bytes(), media_type)
    return found
