"""docs/api.md and /openapi.json hold every route and field."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from gateway.http.app import RestApp
from gateway.http.openapi import openapi
from gateway.main import build_gateway
from outrider.config.gateway import GatewayOptions

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_page_has_every_route_and_field() -> None:
    script = runpy.run_path(str(PAGE.parents[1] / "scripts" / "api_docs"))
    text = PAGE.read_text(encoding="utf-8")
    assert script["updated"](text) == text, "run scripts/api_docs"


async def test_openapi_has_every_route() -> None:
    options = GatewayOptions()
    gateway = build_gateway(options)
    try:
        routes = RestApp(gateway, options).routes
    finally:
        await gateway.router.close()
    served = {
        (route.path.replace("{model:path}", "{model}"), *((route.methods or set()) - {"HEAD"})) for route in routes
    }
    paths = openapi(authenticated=False)["paths"]
    assert served == {(path, method.upper()) for path, methods in paths.items() for method in methods}


def test_limits_of_length_stand_beside_the_type_that_they_are_of() -> None:
    kinds = {"Length": "string", "Items": "array", "Properties": "object"}
    num_limits = 0
    waiting: list[Any] = [openapi(authenticated=False)["components"]["schemas"]]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and isinstance(part.get("type"), str):
            limits = [key for key in part if key.startswith(("min", "max")) and key[3:] in kinds]
            assert all(kinds[key[3:]] == part["type"] for key in limits), part
            num_limits += len(limits)
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
    assert num_limits > 20


def test_every_test_that_the_page_names_is_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    words = {word.strip("`(),;") for word in text.split()}
    names = {word for word in words if word.startswith(("tests/", "benchmarks/"))}
    assert len(names) > 5
    assert all((PAGE.parents[1] / name).exists() for name in names)
