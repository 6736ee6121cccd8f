"""The page at the gateway's root: its files, their headers, and POST /page/markdown.

Markdown is returned as a tree of elements, which the page builds one by one, so that no text becomes markup.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.resources import files
from typing import Annotated, Any, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core.request import StrictModel, Text
from gateway.core.service import Gateway
from gateway.core.validation import validate
from gateway.http.body import BodyReader
from gateway.http.responses import DOOR
from outrider.errors import InvalidRequestError

_MAX_CHARACTERS = 16_000
"""Most characters of one text: they take some tens of milliseconds, half a second in the worst known case."""
_MAX_CELLS = 10_000
"""Most cells of tables: a row may be one character long and still have as many cells as the first row."""
_MAX_DEPTH = 30
"""Most levels of nested elements: emphasis marks nest as often as they are written."""
_SAFE_LINK = re.compile(r"(https?://|mailto:)", re.IGNORECASE)
_LINE_END = re.compile(r"\r\n?|\n")
_FIRST_HEADING = 4
"""Level of an answer's top headings, below those of the page itself."""
# CommonMark with tables and strikethrough. HTML in it is plain text.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])

Node = str | dict[str, Any]
"""Text, or an element with `tag`, `children` and, depending on the tag, `href`, `start`, `language` or `align`."""


class MarkdownRequest(StrictModel):
    """Body of POST /page/markdown."""

    text: Annotated[Text, Field(max_length=_MAX_CHARACTERS)]


def blocks(text: str) -> list[dict[str, Any]]:
    """Return the blocks of a text: elements with the range of their lines, `begin` to `end` (exclusive), from 0.

    Raises InvalidRequestError for tables that are too large.
    """
    lines = _LINE_END.split(text)
    if max(line.count("|") for line in lines) * len(lines) > _MAX_CELLS:
        raise InvalidRequestError("text", f"tables may have more than {_MAX_CELLS} cells", "show it as it is written")
    found: list[Any] = []
    open_children: list[list[Node]] = [found]  # one list for each element that is not closed yet
    for token in _flat(_PARSER.parse(text)):
        children = open_children[-1]
        if token.nesting < 0:
            open_children.pop()
            continue
        node = _node(token) if token.nesting == 0 or len(open_children) < _MAX_DEPTH else None
        if node:
            children.append(node)
        if isinstance(node, dict) and children is found:
            node["begin"], node["end"] = token.map or (0, 0)
        if token.nesting > 0:
            # If the token has no element of its own, its content goes into the enclosing one.
            open_children.append(node["children"] if isinstance(node, dict) else children)
    return found


def _flat(tokens: Iterable[Token]) -> Iterator[Token]:
    """Yield the tokens of blocks, and of the text in them."""
    for token in tokens:
        if token.type == "inline":
            yield from token.children or ()
        else:
            yield token


def _node(token: Token) -> Node | None:
    """Return the text or element that a token opens or, if no other closes it, stands for; None if there is none."""
    kind = token.type.removesuffix("_open")
    match kind:
        case "text":
            return token.content
        case "softbreak" | "hardbreak":
            return "\n"
        case "code_inline":
            return _element("code", token.content)
        case "fence" | "code_block":
            language = token.info.split(maxsplit=1)[0] if token.info.strip() else ""
            return _element("pre", token.content.removesuffix("\n"), language=language)
        case "link":
            return _link(str(token.attrs["href"]))
        case "image":  # a link: the image itself would have to be fetched from elsewhere
            address = str(token.attrs["src"])
            return _link(address, token.content or address) or token.content
        case "heading":
            return _element(f"h{min(6, int(token.tag[1:]) + _FIRST_HEADING - 1)}")
        case "ordered_list":
            return _element("ol", start=token.attrs.get("start", 1))
        case "th" | "td":
            return _element(kind, align=str(token.attrs.get("style", "")).removeprefix("text-align:"))
    return _element(token.tag) if token.tag and not token.hidden else None


def _element(tag: str, *children: Node, **fields: Any) -> dict[str, Any]:
    return {"tag": tag, "children": list(children), **fields}


def _link(address: str, *children: Node) -> dict[str, Any] | None:
    return _element("a", *children, href=address) if _SAFE_LINK.match(address) else None


_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "json": "application/json",
}
# Only the page's own files, and no string ever becomes markup or a script: the browser enforces both.
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
    # Cached, but revalidated each time: a new release is seen at once, and an unchanged file costs only headers.
    "cache-control": "no-cache",
}


class _Asset(NamedTuple):
    """A file ready to be sent."""

    body: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, body: bytes, suffix: str) -> _Asset:
        """Make the asset of a file whose name ends in `suffix`, a key of `_TYPES`."""
        return cls(body, _TYPES[suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


class Page:
    """The page's files. They need no API key, since they reveal nothing of model or users; the API stays protected.

    `paths` holds the paths of the files.
    """

    def __init__(self, gateway: Gateway, bodies: BodyReader, *, needs_key: bool) -> None:
        """`needs_key`: whether the page asks its user for an API key."""
        self._gateway = gateway
        self._bodies = bodies
        self._one_text = asyncio.Lock()
        self._assets = {  # they are small and read once
            f"/page/{file.name}": _Asset.of(file.read_bytes(), suffix)
            for file in (files("gateway") / "page").iterdir()
            if (suffix := file.name.rpartition(".")[2]) in _TYPES
        }
        self._assets["/"] = self._assets.pop("/page/index.html")
        self._assets["/page/settings.json"] = _Asset.of(json.dumps({"needs_key": needs_key}).encode(), "json")
        self.paths = frozenset(self._assets)

    def routes(self) -> list[Route]:
        """Return the routes: GET and HEAD for the files, and POST /page/markdown, which needs a key."""
        # Each route is given its file, since its pattern also matches the path followed by a line feed.
        served = [Route(path, partial(_serve, asset), methods=["GET"]) for path, asset in sorted(self._assets.items())]
        return [*served, Route("/page/markdown", self._markdown, methods=["POST"])]

    async def _markdown(self, request: Request) -> Response:
        """Answer with the blocks of a text, made in a thread, one text at a time. Raises OutriderError."""
        with self._gateway.counted(DOOR):
            reading = self._bodies.open(request, lambda body: validate(MarkdownRequest, body).text)
            async with reading as text, self._one_text:
                body = await asyncio.to_thread(lambda: json.dumps({"blocks": blocks(text)}).encode())
        return Response(body, media_type="application/json")


async def _serve(asset: _Asset, request: Request) -> Response:
    headers = {**PAGE_HEADERS, "etag": asset.etag}
    # A compressing proxy marks the tag as weak; it still matches.
    known = request.headers.get("if-none-match", "")
    if asset.etag in known or known.strip() == "*":
        return Response(status_code=304, headers=headers)
    return Response(asset.body, headers={**headers, "content-type": asset.media_type})
