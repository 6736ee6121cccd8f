"""What several windows of one browser keep, and what Stop and a new chat free: the page, at once."""

from __future__ import annotations

from typing import Any

import pytest
from browser_help import Open, alter

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

KEPT = "JSON.parse(localStorage.getItem('outrider.conversation'))"


def kept(page: Any) -> list[str]:
    """Questions of the conversation that the browser keeps."""
    return list(page.evaluate(f"{KEPT}.turns.map(turn => turn.question)"))


def ask(page: Any, question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.wait_for_selector("#stop:disabled", state="attached")


def another(here: Any) -> Any:
    """A second window of the same browser."""
    page = here.context.new_page()
    page.goto(here.url)
    here.expect(page.locator("#model")).not_to_have_text("connecting")
    return page


def test_a_window_that_is_left_overwrites_nothing_of_another(visit: Open) -> None:
    here = visit()
    alter(here.page, lambda body: True, max_tokens=4)
    ask(here.page, "First.")
    second = another(here)
    alter(second, lambda body: True, max_tokens=4)
    ask(second, "Second.")
    here.page.uncheck("#marks")
    assert kept(second) == ["First.", "Second."] and second.evaluate(f"{KEPT}.marks") is False
    here.page.goto("about:blank")
    assert kept(second) == ["First.", "Second."]


def test_a_new_chat_deletes_the_conversation_in_all_windows(visit: Open) -> None:
    here = visit()
    alter(here.page, lambda body: True, max_tokens=4)
    ask(here.page, "First.")
    second = another(here)
    here.expect(second.locator("article")).to_have_count(1)
    second.click("#fresh")
    here.expect(here.page.locator("article")).to_have_count(0)
    here.expect(here.page.locator("#speech p")).to_have_count(0)
    here.page.goto("about:blank")
    assert kept(second) == []


@pytest.mark.parametrize("way", ["#stop", "#fresh"])
def test_formatting_that_never_comes_holds_nothing_up(visit: Open, way: str) -> None:
    here = visit()
    page = here.page
    page.route("**/page/markdown", lambda route: None)
    alter(page, lambda body: True, structured_outputs={"choice": ["One.\n\nTwo.\n\n" + "And so on. " * 400]})
    here.set(max_tokens=1500)
    with page.expect_request("**/page/markdown"):
        here.ask("Count.")
    page.click(way)
    here.until_done()
    here.set(max_tokens=4)
    page.unroute("**/v1/chat/completions")
    here.ask("Hello")
    here.until_done()
    assert page.locator("article").count() == (2 if way == "#stop" else 1) and here.texts()[0]


def test_escape_within_a_composition_stops_nothing(visit: Open) -> None:
    here = visit()
    page = here.page
    here.begin_long()
    press = """isComposing => document.getElementById("question").dispatchEvent(
        new KeyboardEvent("keydown", { key: "Escape", bubbles: true, isComposing }))"""
    page.evaluate(press, True)
    tokens = page.locator(".text .token").count()
    here.expect(page.locator(".text .token").nth(tokens + 5)).to_be_attached()
    page.evaluate(press, False)
    here.until_done()
    assert page.inner_text(".note").endswith("; stopped")
