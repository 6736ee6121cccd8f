"""What a user of the page sees and does, in a real browser before the real services."""

from __future__ import annotations

import httpx
import pytest
from browser_help import Open, alter, picture

from outrider.cli.cluster import Cluster

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

QUESTION = "List the days of the week, and then list them again."
MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script><b>bold</b>"


def test_tokens_are_marked_as_they_arrive_and_trees_are_drawn(visit: Open, cluster: Cluster) -> None:
    here = visit()
    here.set(max_tokens=60)
    here.ask(QUESTION)
    here.page.wait_for_selector(".text .token")
    assert here.page.is_enabled("#stop"), "tokens are shown while the answer grows"
    here.until_done()
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 60, "trace": True}
    answer = httpx.post(f"{cluster.rest_url}/v1/chat/completions", json=body, timeout=60).json()
    choice = answer["choices"][0]
    assert here.written() == choice["message"]["content"]
    tokens = here.page.locator(".text .token")
    shown = tokens.evaluate_all("all => all.map(each => each.className.split(' ')[1])")
    assert "accepted" in shown and set(shown) <= {"accepted", "bonus", "plain"}
    decorations = here.page.evaluate(
        """() => ['accepted', 'bonus', 'plain'].map(name => {
            const token = document.querySelector(`.text .token.${name}`);
            const style = token && getComputedStyle(token);
            return style && [name, style.textDecorationLine, style.textDecorationStyle];
        })"""
    )
    wanted = {"accepted": ("underline", "solid"), "bonus": ("underline", "dotted"), "plain": ("none", "solid")}
    for name, line, style in filter(None, decorations):
        assert (line, style) == wanted[name], "colour is not the only sign"


def test_figures_and_trees_agree_with_each_other(visit: Open) -> None:
    here = visit()
    here.set(max_tokens=60)
    here.ask("Write a Python class for a point in the plane.")
    here.until_done()
    page = here.page
    here.expect(page.locator("#trees figure")).to_have_count(3)
    rounds, length = int(page.inner_text("#rounds")), float(page.inner_text("#accept-length"))
    accepted, _, drafts = page.inner_text("#accepted").split()
    tokens = int(page.inner_text(".note").split()[0])
    assert length == pytest.approx(tokens / rounds, abs=0.006) and float(page.inner_text("#rate")) > 0
    assert 0 < int(accepted) < int(drafts), "some guesses were right, and some were wrong"
    # Every round commits its accepted tokens and one of its own; limits cut the last one short.
    assert abs(length * rounds - (int(accepted) + rounds)) <= 0.01 * rounds + 1
    assert rounds == int(page.locator("#trees figure").first.get_attribute("data-round")) + 1
    while page.is_enabled("#older") and page.locator("#trees .node.accepted").count() == 0:
        page.click("#older")
    assert page.locator("#trees .node.accepted").count() > 0
    figure = page.locator("#trees figure").first
    nodes = figure.locator(".node")
    assert figure.locator("path.edge").count() == nodes.count() - 1, "every node but the root hangs on another"
    page.click("#as-text summary")
    page.wait_for_selector("#tree-text li")
    assert page.locator("#tree-text li").count() == nodes.count()
    titles = figure.locator(".node title").all_text_contents()
    items = page.locator("#tree-text li").evaluate_all("all => all.map(each => each.firstChild.textContent)")
    assert sorted(titles) == sorted(items), "the text describes what is drawn"
    crossed = nodes.evaluate_all(
        """all => all.filter(node => {
            const [text, by] = [...node.querySelectorAll('text')].map(each => each.getBBox());
            return text.x + text.width > (by ? by.x : node.querySelector('rect').getBBox().width);
        }).length"""
    )
    assert crossed == 0, "every token has room in its box"
    first = page.locator(".text .token").first
    first.click()
    here.expect(figure).to_have_attribute("data-round", first.get_attribute("data-round"))
    page.click("#live")
    here.expect(figure).to_have_attribute("data-round", str(rounds - 1))


@pytest.mark.parametrize(("order", "temperature"), [("after", 0), ("beside", 0.8)])
def test_both_texts_are_equal_in_float32(visit: Open, order: str, temperature: float) -> None:
    here = visit()
    here.set(max_tokens=48, temperature=temperature)
    here.page.select_option("#order", order)
    here.page.check("#compare")
    here.ask(QUESTION)
    here.until_done()
    drafted, plain = here.asked()
    assert "speculation" not in drafted and plain == drafted | {"speculation": "off"}
    one, other = here.texts()
    assert one == other and len(one) > 20
    assert here.page.get_attribute(".verdict", "class") == "verdict equal"
    assert "Equal: both texts are the same" in here.page.inner_text(".verdict")
    assert here.page.locator(".answer:nth-child(2) .token:not(.plain)").count() == 0
    places = [here.page.locator(selector).bounding_box() for selector in (".verdict", "#composer")]
    assert places[0]["y"] + places[0]["height"] <= places[1]["y"], "the verdict is in view"
    picture(here.page, f"equal_{order}")


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("float32", "In float32 on a CPU it may at a near tie"),
        ("bfloat16", "In bfloat16 rounding may make them differ"),
    ],
)
def test_where_texts_part_the_first_differing_token_is_named(visit: Open, dtype: str, words: str) -> None:
    here = visit()
    # The second run gets another seed, so that the texts really part.
    alter(here.page, lambda body: body.get("speculation") == "off", seed=12)
    info = httpx.get(f"{here.url}get_model_info").json() | {"dtype": dtype}
    here.page.route("**/get_model_info", lambda route: route.fulfill(json=info))
    here.page.reload()
    here.expect(here.page.locator("#model")).to_contain_text(dtype)
    here.set(max_tokens=32, temperature=1, seed=11)
    here.page.check("#compare")
    here.ask("Write a story.")
    here.until_done()
    one, other = here.texts()
    assert one != other
    verdict = here.page.inner_text(".verdict")
    assert words in verdict and "The texts first differ at token" in verdict
    at = int(verdict.split("at token ")[1].split(":")[0]) - 1
    marked = here.page.locator(".token.parting")
    assert marked.count() == 2
    before = [here.page.locator(f".answer:nth-child({side}) .token").all_text_contents()[:at] for side in (1, 2)]
    assert before[0] == before[1], "nothing before it differs"
    assert marked.nth(0).text_content() != marked.nth(1).text_content()


def test_an_answer_can_be_stopped_and_the_next_one_asked(visit: Open, cluster: Cluster) -> None:
    here = visit()
    for way in ("Escape", "click"):
        here.begin_long()
        here.page.keyboard.press("Escape") if way == "Escape" else here.page.click("#stop")
        here.until_done()
        assert here.page.inner_text("article:last-of-type .note").endswith("; stopped")
    here.expect(here.page.locator("#question")).to_be_focused()
    here.set(max_tokens=8)
    here.ask("Hello")
    here.until_done()
    assert here.texts()[0]
    roles = [message["role"] for message in here.asked()[-1]["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"], "what was said so far goes along"


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_the_newest_token_stays_in_view_and_a_new_chat_begins_empty(visit: Open, size: str) -> None:
    here = visit(size)
    page = here.page
    here.set(max_tokens=60)
    for _ in range(2):
        here.ask(QUESTION)
        here.until_done()
    bottom, top, above = page.evaluate(
        """() => {
            const tokens = [...document.querySelectorAll('.text .token')];
            const places = [tokens.at(-1), document.getElementById('composer'), tokens[0]];
            const [last, composer, first] = places.map(each => each.getBoundingClientRect());
            return [last.bottom, composer.top, first.top];
        }"""
    )
    assert above < 0 < bottom <= top, "what came last is above the composer, what came first has left the window"
    page.click("#fresh")
    here.expect(page.locator("#rounds")).to_have_text("\N{EN DASH}")
    assert page.locator("#trees figure, article").count() == 0 and page.is_visible("#welcome")
    here.ask("Hello")
    here.until_done()
    assert [message["role"] for message in here.asked()[-1]["messages"]] == ["user"]


def test_what_the_model_writes_never_becomes_markup(visit: Open) -> None:
    here = visit()
    # A choice of one: the model has to write this, token by token.
    alter(here.page, lambda body: True, structured_outputs={"choice": [MARKUP]})
    here.page.check("#compare")
    here.ask(MARKUP)
    here.until_done()
    assert here.texts() == [MARKUP, MARKUP]
    here.page.click("#as-text summary")
    assert here.page.inner_text(".question") == MARKUP
    assert here.page.locator("#chat img, #watch img, article script, article b, #watch b").count() == 0
    assert here.page.title() == "Outrider"
    refused = here.page.evaluate("() => { try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return e.name; } }")
    assert refused == "TypeError", "the browser itself refuses markup made of text"
    here.complaints = [text for text in here.complaints if "TrustedHTML" not in text]


def test_everything_can_be_done_by_keyboard(visit: Open) -> None:
    here = visit()
    page = here.page
    focused = "document.activeElement.id || document.activeElement.tagName.toLowerCase()"
    assert page.evaluate(focused) == "question", "typing may begin at once"
    order = []
    page.evaluate("document.activeElement.blur(); document.body.focus()")
    page.evaluate("document.querySelector('.skip').focus()")
    for _ in range(24):
        order.append(page.evaluate(focused))
        page.keyboard.press("Tab")
        if page.evaluate(focused) == "body":
            break
    wanted = [
        "a",
        "fresh",
        "turns",
        *["button"] * 4,
        "question",
        "send",
        "compare",
        "marks",
        "summary",
        "trees",
        "summary",
    ]
    assert order[: len(wanted)] == wanted
    page.evaluate("document.querySelector('.skip').focus()")
    page.keyboard.press("Enter")
    assert page.evaluate(focused) == "question"
    for _ in range(4):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    for _ in range(3):
        page.keyboard.press("Tab")
    assert page.evaluate(focused) == "max-tokens"
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type("16")
    page.focus("#question")
    page.keyboard.type("Say hello.")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Twice.")
    page.keyboard.press("Enter")
    here.until_done()
    assert here.asked()[0]["max_tokens"] == 16
    assert here.asked()[0]["messages"][0]["content"] == "Say hello.\nTwice."
    # Whole sentences are read aloud, and how the answer ended.
    spoken = page.locator("#speech p").all_text_contents()
    assert spoken and "The answer is complete" in spoken[-1]


def test_wrong_fields_and_errors_are_told(visit: Open) -> None:
    here = visit(quiet=False)
    page = here.page
    page.press("#question", "Enter")
    assert page.inner_text("#complaint") == "Write a question first."
    here.set(temperature=7)
    page.evaluate("document.getElementById('settings').open = false")
    here.ask("Hello")
    assert page.evaluate("document.activeElement.id") == "temperature", "the wrong field is shown"
    assert here.asked() == []
    here.set(temperature=0)
    alter(page, lambda body: True, top_p=9)
    here.ask("Hello")
    here.until_done()
    assert "top_p" in page.inner_text(".answer .complaint[role=alert]")


def test_a_key_is_asked_for_used_and_never_stored(visit: Open, locked: Cluster) -> None:
    here = visit(url=locked.rest_url, quiet=False)
    page = here.page
    page.wait_for_selector("#key")
    here.set(max_tokens=8)
    here.ask("Hello")
    here.until_done()
    assert "API key" in page.inner_text("article .complaint")
    here.expect(page.locator("#key")).to_be_focused()
    connects = [request for request in here.requests if request.url.endswith("/get_model_info")]
    page.keyboard.type("ключ")
    page.keyboard.press("Tab")
    here.expect(page.locator("#model")).to_contain_text("letters, digits and signs of ASCII")
    assert connects == [request for request in here.requests if request.url.endswith("/get_model_info")]
    page.fill("#key", "k3y-for-pages")
    page.focus("#key")
    page.keyboard.press("Tab")
    here.expect(page.locator("#model")).to_contain_text("float32")
    here.ask("Hello again")
    here.until_done()
    assert here.texts()[0]
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
    assert "k3y" not in kept
    page.reload()
    page.wait_for_selector("#key")
    assert page.input_value("#key") == ""


@pytest.mark.parametrize("size", ["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible_and_fits_its_window(visit: Open, size: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    # axe adds itself as a script, which the page's policy refuses to everybody.
    here = visit(size, scheme, bypass_csp=True)
    picture(here.page, f"{size}_{scheme}_empty")
    assert axe.Axe().run(here.page).response["violations"] == []
    here.set(max_tokens=60)
    here.page.click("#settings summary")
    here.page.check("#compare")
    here.ask(QUESTION)
    here.page.wait_for_selector(".text .token")
    here.until_done()
    here.page.wait_for_selector("#trees .node")
    picture(here.page, f"{size}_{scheme}")
    here.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    violations = axe.Axe().run(here.page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in violations] == []
    wide = here.page.evaluate("document.scrollingElement.scrollWidth - window.innerWidth")
    assert wide <= 0, "nothing has to be scrolled sideways but trees"
