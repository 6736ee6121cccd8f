"""Markdown of the page: a tree of elements in which text is text, whatever a model writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gateway_world import World
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.page import blocks
from outrider.errors import InvalidRequestError

TAGS = {"p", "ul", "ol", "li", "blockquote", "hr", "table", "thead", "tbody", "tr", "th", "td", "em", "strong", "s"}
TAGS |= {"h4", "h5", "h6", "pre", "code", "a"}
FIELDS = {"tag", "children", "href", "start", "language", "align", "begin", "end"}


def shape(node: Any) -> Any:
    """A node without its lines: text, or its tag with what is in it."""
    return node if isinstance(node, str) else (node["tag"], *map(shape, node["children"]))


def elements(nodes: list[Any]) -> Iterator[dict[str, Any]]:
    for node in nodes:
        if isinstance(node, dict):
            yield node
            yield from elements(node["children"])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("# Title\n## Less", [("h4", "Title"), ("h5", "Less")]),
        ("###### Least", [("h6", "Least")]),
        ("one\ntwo", [("p", "one", "\n", "two")]),
        ("*a* **b** ~~c~~ `d`", [("p", ("em", "a"), " ", ("strong", "b"), " ", ("s", "c"), " ", ("code", "d"))]),
        ("- a\n- b\n  1. c", [("ul", ("li", "a"), ("li", "b", ("ol", ("li", "c"))))]),
        ("- a\n\n- b", [("ul", ("li", ("p", "a")), ("li", ("p", "b")))]),
        ("> a", [("blockquote", ("p", "a"))]),
        ("a\n\n---", [("p", "a"), ("hr",)]),
        ("```py\nx = 1\n\ny\n```", [("pre", "x = 1\n\ny")]),
        ("```py\nunfinished", [("pre", "unfinished")]),
        ("|a|\n|-|\n|b|", [("table", ("thead", ("tr", ("th", "a"))), ("tbody", ("tr", ("td", "b"))))]),
        ("<b>x</b> &lt; \\*", [("p", "<b>x</b> < *")]),
        ("<script>x</script>", [("p", "<script>x</script>")]),
        ("[a](https://b.c)", [("p", ("a", "a"))]),
        ("![a](https://b.c/d.png)", [("p", ("a", "a"))]),
        ("[a](/docs) [b](ftp://c)", [("p", "a", " ", "b")]),
        ("", []),
    ],
)
def test_markdown_becomes_elements(text: str, wanted: list[Any]) -> None:
    assert [shape(block) for block in blocks(text)] == wanted


def test_elements_have_what_their_kind_needs() -> None:
    (listed,) = blocks("7. a\n8. b")
    assert listed["start"] == 7
    (code,) = blocks("```python title=x\na\n```")
    assert code["language"] == "python"
    (table,) = blocks("|a|b|\n|-|-:|\n|1|2|")
    assert [cell["align"] for cell in elements([table]) if cell["tag"] == "td"] == ["", "right"]
    (paragraph,) = blocks("<mailto:a@b.c>")
    assert paragraph["children"][0]["href"] == "mailto:a@b.c"


def test_blocks_tell_their_lines() -> None:
    found = blocks("\na\nb\n\n```\nc\n\nd\n```\n- e\n")
    assert [(block["tag"], block["begin"], block["end"]) for block in found] == [
        ("p", 1, 3),
        ("pre", 4, 9),
        ("ul", 9, 10),
    ]


@pytest.mark.parametrize(
    "scheme", ["javascript:x", "JaVaScRiPt:x", "data:text/html,x", "vbscript:x", "file:///x", "//x.y", "blob:x"]
)
@pytest.mark.parametrize("form", ["[a]({})", "![a]({})", "<{}>", "[a]\n\n[a]: {}"])
def test_links_lead_to_web_pages_and_mail_alone(scheme: str, form: str) -> None:
    assert [node for node in elements(blocks(form.format(scheme))) if node["tag"] == "a"] == []


@given(st.text(alphabet="ab \n*_`~[]()<>!#-+>|:\\&;1.\r\t\x00\N{LATIN SMALL LETTER E WITH ACUTE}", max_size=200))
def test_whatever_is_written_only_known_elements_come_of_it(text: str) -> None:
    found = blocks(text)
    for node in elements(found):
        assert node["tag"] in TAGS and set(node) <= FIELDS
        assert node.get("href", "mailto:").startswith(("http://", "https://", "mailto:"))
    ends = [0, *(place for block in found for place in (block["begin"], block["end"]))]
    assert ends == sorted(ends), "blocks follow each other, so that the page can go on behind any of them"


def test_nesting_is_bounded() -> None:
    def depth(nodes: list[Any]) -> int:
        return 1 + max((depth(node["children"]) for node in nodes if isinstance(node, dict)), default=0)

    for text in (">" * 10_000, "- " * 5_000, "*" * 5_000 + "a" + "*" * 5_000, "[" * 5_000 + "a" + "](b)" * 2_000):
        assert depth(list(blocks(text))) < 50


def test_a_table_that_a_few_signs_blow_up_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="10000 cells"):
        blocks("|a" * 900 + "|\n" + "|-" * 900 + "|\n" + "|b\n" * 900)


async def test_the_door_answers_with_blocks(world: World) -> None:
    response = await world.http.post("/page/markdown", json={"text": "Hi **you**"})
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    bold = {"tag": "strong", "children": ["you"]}
    assert response.json() == {"blocks": [{"tag": "p", "begin": 0, "end": 1, "children": ["Hi ", bold]}]}


@pytest.mark.parametrize("body", [{}, {"text": None}, {"text": 7}, {"text": "a" * 16_001}, {"text": "a", "html": True}])
async def test_wrong_bodies_are_refused(world: World, body: dict[str, Any]) -> None:
    response = await world.http.post("/page/markdown", json=body)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


async def test_pages_of_other_sites_cannot_post(world: World) -> None:
    response = await world.http.post("/page/markdown", content=b'{"text": "a"}', headers={"content-type": "text/plain"})
    assert response.status_code == 415
    assert (await world.http.get("/page/markdown")).status_code == 405
