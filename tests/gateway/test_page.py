"""The page at the gateway's root, as files: what a browser gets, and with which headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gateway_world import World, open_world
from scripted_verify import ScriptedVerify

FOLDER = Path(__file__).parents[2] / "gateway" / "page"
FILES = sorted(entry.name for entry in FOLDER.iterdir() if entry.name != "index.html")
PATHS = ["/", "/page/settings.json", *(f"/page/{name}" for name in FILES)]
TYPES = {
    "": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "json": "application/json",
}
KEY = "k3y-of-the-page"


async def test_every_file_comes_with_its_type_and_strict_headers(world: World) -> None:
    for path in PATHS:
        response = await world.http.get(path)
        assert response.status_code == 200, path
        assert response.headers["content-type"] == TYPES[path.rpartition(".")[2] if "." in path else ""]
        assert response.headers["x-content-type-options"] == "nosniff"
        policy = dict(
            part.strip().partition(" ")[::2] for part in response.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'" and policy["require-trusted-types-for"] == "'script'"
        sources = {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")}
        assert sources == {"'self'"}, "nothing inline, nothing from elsewhere"
        assert "access-control-allow-origin" not in response.headers


async def test_a_path_with_a_line_feed_behind_it_is_no_fault_of_the_server(world: World) -> None:
    for path in ("/", "/page/main.js", "/page/settings.json"):
        assert (await world.http.get(f"{path}%0A")).status_code < 500, path


async def test_head_has_the_headers_of_get_and_no_body(world: World) -> None:
    for path in ("/", "/page/main.js"):
        head, get = await world.http.head(path), await world.http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        for name in ("content-type", "content-length", "etag", "cache-control"):
            assert head.headers[name] == get.headers[name]


async def test_what_a_browser_has_already_is_not_sent_again(world: World) -> None:
    first = await world.http.get("/page/page.css")
    assert first.headers["cache-control"] == "no-cache"
    for condition in (first.headers["etag"], f'"other", W/{first.headers["etag"]}', "*"):
        again = await world.http.get("/page/page.css", headers={"if-none-match": condition})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    changed = await world.http.get("/page/page.css", headers={"if-none-match": '"other"'})
    assert changed.status_code == 200 and changed.content


async def test_other_methods_and_names_are_refused(world: World) -> None:
    assert (await world.http.post("/", json={})).status_code == 405
    for path in ("/page", "/page/", "/page/index.html", "/page/none.js", "/page/../main.py", "/page/%2e%2e/main.py"):
        assert (await world.http.get(path)).status_code == 404, path


async def test_the_page_is_open_and_the_api_stays_closed(verify: ScriptedVerify, tmp_path: Path) -> None:
    async with open_world(verify, tmp_path, api_key=KEY) as world:
        for path in PATHS:
            response = await world.http.get(path)
            assert response.status_code == 200 and KEY not in response.text
        assert (await world.http.get("/page/settings.json")).json() == {"needs_key": True}
        for path in ("/page/none.js", "/get_model_info", "/v1/models", "/openapi.json"):
            assert (await world.http.get(path)).status_code == 401
        assert (await world.http.post("/v1/chat/completions", json={})).status_code == 401
        assert (await world.http.post("/page/markdown", json={"text": "a"})).status_code == 401


async def test_the_page_asks_for_no_key_where_none_is_needed(world: World) -> None:
    assert (await world.http.get("/page/settings.json")).json() == {"needs_key": False}


@pytest.mark.parametrize("api_key", ["", KEY])
async def test_the_page_can_be_left_out(verify: ScriptedVerify, tmp_path: Path, api_key: str) -> None:
    async with open_world(verify, tmp_path, no_page=True, api_key=api_key) as world:
        for path in PATHS:
            assert (await world.http.get(path)).status_code == (401 if api_key else 404)
        assert (await world.http.post("/page/markdown", json={"text": "a"})).status_code == (401 if api_key else 404)
        assert (await world.http.get("/health")).status_code == 200


async def test_the_page_learns_what_the_model_computes_in(world: World) -> None:
    assert (await world.http.get("/get_model_info")).json()["dtype"] == "float32"


def test_the_files_name_no_other_place_and_make_no_markup_of_text() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        addresses = set(re.findall(r"https?://[^\s\"'<>]+|(?<=[\"'(])//\w[^\s\"']*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name
        found = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", text)
        assert not found, path.name
        kept = re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", text)
        assert not kept or path.name == "store.js", "one file keeps things, and it is told no key"


def test_the_index_names_files_that_are_there_and_nothing_inline() -> None:
    text = (FOLDER / "index.html").read_text(encoding="utf-8")
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', text))
    assert named and named <= set(FILES)
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)
    for name in (name for name in FILES if name.endswith(".js")):
        imported = re.findall(r'from "\./([^"]+)"', (FOLDER / name).read_text(encoding="utf-8"))
        assert set(imported) <= set(FILES), name
