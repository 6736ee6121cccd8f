"""The page at the gateway's root: files of this package, and the headers that they are sent with."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core.service import Gateway
from gateway.http.body import BodyReader
from gateway.http.markdown import MarkdownRoute

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
PAGE_HEADERS = {
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


class _Asset(NamedTuple):
    """A file as it is sent."""

    body: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, body: bytes, suffix: str) -> _Asset:
        """`suffix` is one of `_TYPES`."""
        return cls(body, _TYPES[suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


class Page:
    """The page's files. They need no API key, since they tell nothing of model or users; the API stays protected.

    `paths` are those of the files.
    """

    def __init__(self, gateway: Gateway, bodies: BodyReader, *, needs_key: bool) -> None:
        """`needs_key`: whether the page asks its user for an API key."""
        self._markdown = MarkdownRoute(gateway, bodies)
        self._assets = {  # they are small and read once
            f"/page/{file.name}": _Asset.of(file.read_bytes(), suffix)
            for file in (files("gateway") / "page").iterdir()
            if (suffix := file.name.rpartition(".")[2]) in _TYPES
        }
        self._assets["/"] = self._assets.pop("/page/index.html")
        self._assets["/page/settings.json"] = _Asset.of(json.dumps({"needs_key": needs_key}).encode(), "json")
        self.paths = frozenset(self._assets)

    def routes(self) -> list[Route]:
        """Paths, and what serves them: the files to GET and HEAD, and what works for the page, which takes a key."""
        # Each route is given its file, for its pattern also matches the path with a line feed behind it.
        served = [Route(path, partial(_serve, asset), methods=["GET"]) for path, asset in sorted(self._assets.items())]
        return [*served, Route("/page/markdown", self._markdown.serve, methods=["POST"])]


async def _serve(asset: _Asset, request: Request) -> Response:
    headers = {**PAGE_HEADERS, "etag": asset.etag}
    if _matches(request.headers.get("if-none-match", ""), asset.etag):
        return Response(status_code=304, headers=headers)
    return Response(asset.body, headers={**headers, "content-type": asset.media_type})


def _matches(condition: str, etag: str) -> bool:
    """Whether an If-None-Match header names this ETag; a proxy that compresses marks it as weak."""
    return any(part.strip().removeprefix("W/") in (etag, "*") for part in condition.split(","))
