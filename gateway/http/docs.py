"""/docs: what /openapi.json says, as one page for people, without a script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any


def docs_page(document: Mapping[str, Any]) -> bytes:
    """The page, UTF-8."""
    return "\n".join(_lines(document)).encode()


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    title = f"{document['info']['title']} {document['info']['version']}"
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title></head><body>'
    yield f'<h1>{escape(title)}</h1><p>The same for programs: <a href="/openapi.json">/openapi.json</a></p>'
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}.</p>"
            body = operation.get("requestBody", {}).get("content", {})
            answer = operation["responses"]["200"].get("content", {})
            yield f"<p>Body: {_kinds(body) or 'none'}. Answer: {_kinds(answer)}</p>"
    for name, schema in document["components"]["schemas"].items():
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(schema.get("description", ""))}</p><dl>'
        for field, value in schema.get("properties", {}).items():
            yield f"<dt><code>{escape(field)}</code> {_kind(value)}</dt><dd>{escape(value.get('description', ''))}</dd>"
        yield "</dl>"
    yield "</body></html>"


def _kinds(content: Mapping[str, Any]) -> str:
    return ", ".join(f"{escape(media)} {_kind(value['schema'])}" for media, value in content.items())


def _kind(schema: Mapping[str, Any]) -> str:
    """A schema in a few words, with links to those it names."""
    if "$ref" in schema:
        name = escape(str(schema["$ref"]).rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for joined in ("anyOf", "oneOf", "allOf"):
        if joined in schema:
            return " or ".join(kind for one in schema[joined] if (kind := _kind(one)))
    if "items" in schema:
        return f"list of {_kind(schema['items'])}"
    return escape(str(schema.get("type", "")))
