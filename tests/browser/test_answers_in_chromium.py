"""What becomes of answers on the page: Markdown, marks, notes, copies, retries, and what a reload leaves of them."""

from __future__ import annotations

from typing import Any

import pytest
from browser_help import Open, alter, picture

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

MARKDOWN = """# Points

A **point** has `x` and *y*; see [the docs](https://example.org/points) or [this](javascript:alert(1)).

1. Make one:

   ```python
   class Point:
       def __init__(self, x, y):
           self.x, self.y = x, y
   ```

2. Use it.

| name | value |
|------|------:|
| x    | 1     |

<img src=x onerror="document.title='owned'">

That is all."""


# The answer may be whole before another process could look.
WATCH_FIRST_BLOCK = """() => new MutationObserver((changes, observer) => {
  if (!document.querySelector(".blocks h4")) return;
  window.grew = !document.querySelector("#stop").disabled;
  observer.disconnect();
}).observe(document.body, {childList: true, subtree: true})"""


def write(page: Any, text: str) -> None:
    """The model has to write this, token by token."""
    alter(page, lambda body: True, structured_outputs={"choice": [text]})


def test_markdown_is_formatted_block_by_block_and_marked(visit: Open) -> None:
    here = visit()
    page = here.page
    write(page, MARKDOWN)
    here.set(max_tokens=400)
    page.evaluate(WATCH_FIRST_BLOCK)
    here.ask("What is a point?")
    here.until_done()
    assert page.evaluate("window.grew") is True, "complete blocks are formatted while the answer grows"
    here.expect(page.locator(".tail")).to_be_empty()
    blocks = page.locator(".blocks")
    assert [blocks.locator(name).count() for name in ("h4", "strong", "em", "ol > li", "pre code", "tbody td")] == [
        1,
        1,
        1,
        2,
        1,
        2,
    ]
    assert (
        blocks.locator("pre code").text_content()
        == "class Point:\n    def __init__(self, x, y):\n        self.x, self.y = x, y"
    )
    link = blocks.locator("a")
    assert link.count() == 1 and link.get_attribute("href") == "https://example.org/points"
    assert link.get_attribute("rel") == "noopener noreferrer"
    assert page.locator("#chat img, article script").count() == 0 and page.title() == "Outrider"
    assert "<img src=x" in blocks.inner_text()
    marked = "".join(page.locator(".blocks .token").all_text_contents())
    for words in ("Points", "point", "the docs", "def __init__(self, x, y):", "Use it.", "value", "That is all."):
        assert words in marked, "formatted text is still made of tokens"
    rounds = page.locator(".blocks .token").evaluate_all("all => all.map(each => Number(each.dataset.round))")
    assert rounds == sorted(rounds), "each stands where its token was written"
    page.get_by_role("button", name="Copy this python").click()
    assert page.evaluate("navigator.clipboard.readText()").startswith("class Point:\n")
    assert here.written() == MARKDOWN
    picture(page, "markdown")


@pytest.mark.parametrize(("size", "scheme"), [("desktop", "light"), ("phone", "dark")])
def test_formatted_answers_are_accessible_and_fit_their_window(visit: Open, size: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    here = visit(size, scheme, bypass_csp=True)
    page = here.page
    wide = MARKDOWN.replace("Use it.", "`" + "long" * 60 + "`").replace(
        "class Point:", "class Point:  # " + "wide " * 60
    )
    write(page, wide + "\n\n|" + "column |" * 20 + "\n|" + "-|" * 20 + "\n\n> quoted")
    here.set(max_tokens=900)
    here.ask("What is a point? " * 60)
    here.until_done()
    page.wait_for_selector(".blocks blockquote")
    picture(page, f"formatted_{size}_{scheme}")
    violations = axe.Axe().run(page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in violations] == []
    assert page.evaluate("document.scrollingElement.scrollWidth - window.innerWidth") <= 0


def test_what_cannot_be_formatted_stays_as_it_was_written(visit: Open) -> None:
    here = visit(quiet=False)
    page = here.page
    page.route("**/page/markdown", lambda route: route.fulfill(status=503, json={"error": {"message": "busy"}}))
    write(page, "One **bold** word.\n\nAnd another.")
    here.ask("Say it.")
    here.until_done()
    assert here.texts() == ["One **bold** word.\n\nAnd another."]
    assert page.locator("article .complaint").count() == 0


def test_marks_are_switched_off_and_stay_so(visit: Open) -> None:
    here = visit()
    page = here.page
    here.set(max_tokens=24)
    here.ask("List the days of the week, and then list them again.")
    here.until_done()
    lines = "all => [...new Set(all.map(each => getComputedStyle(each).textDecorationLine))].sort()"
    tokens = page.locator(".text .token")
    assert "underline" in tokens.evaluate_all(lines)
    page.uncheck("#marks")
    assert tokens.evaluate_all(lines) == ["none"]
    page.reload()
    here.expect(page.locator("article")).to_have_count(1)
    assert not page.is_checked("#marks") and tokens.evaluate_all(lines) == ["none"]


def test_a_retry_takes_the_place_of_the_last_answer(visit: Open) -> None:
    here = visit()
    page = here.page
    here.set(max_tokens=8)
    for question in ("Say hello.", "Say goodbye."):
        here.ask(question)
        here.until_done()
    retry = page.get_by_role("button", name="Retry this question")
    assert retry.count() == 1, "the last question alone can be asked again"
    retry.click()
    here.until_done()
    here.expect(page.locator("article")).to_have_count(2)
    assert page.locator(".question").all_inner_texts() == ["Say hello.", "Say goodbye."]
    second, third = here.asked()[1:]
    assert third["messages"] == second["messages"], "it goes on from what was said before"


def test_example_questions_are_asked_by_a_click(visit: Open) -> None:
    here = visit()
    here.set(max_tokens=8)
    example = here.page.locator("#examples button").first
    question = example.inner_text()
    here.page.fill("#question", "half a thought")
    example.click()
    here.until_done()
    assert [body["messages"][0]["content"] for body in here.asked()] == [question]
    assert here.page.input_value("#question") == "half a thought"
    assert here.page.locator("#examples").count() == 0


def test_long_questions_are_folded(visit: Open) -> None:
    here = visit()
    page = here.page
    here.set(max_tokens=4)
    here.ask("Short.")
    here.until_done()
    assert page.locator(".unfold").count() == 0
    question = "\n".join(f"This is line {index}." for index in range(40))
    here.ask(question)
    here.until_done()
    text, button = page.locator(".question").last, page.locator(".unfold")
    folded = text.bounding_box()["height"]
    assert button.get_attribute("aria-expanded") == "false" and text.text_content() == question
    button.click()
    assert button.get_attribute("aria-expanded") == "true" and text.bounding_box()["height"] > 4 * folded
    button.click()
    assert text.bounding_box()["height"] == folded


def test_repeated_answers_are_noted_and_drafters_have_names(visit: Open) -> None:
    here = visit()
    page = here.page
    here.set(max_tokens=60)
    for question in ("Write a sentence about the river Rhine.", "Write a sentence about the river Rhine."):
        here.ask(question)
        here.until_done()
        page.wait_for_selector("#trees .node")
    write(
        page,
        "The river Rhine flows from the Alps to the North Sea, past Basel, Strasbourg, Mainz, Cologne and Rotterdam.",
    )
    for repeated in (False, True):
        page.click("#fresh")
        here.ask("Where does it flow?")
        here.until_done()
        note = page.locator(".repeated")
        if repeated:
            here.expect(note).to_contain_text("tokens stood in earlier answers")
        else:
            here.expect(note).to_be_empty()
    text = page.inner_text("#drafters")
    assert "n-grams of" in text and "ngram" not in text.replace("n-gram", "")
    assert "ngram" not in page.locator("#trees title").all_text_contents()


def test_spikes_are_cut_in_the_chart(visit: Open) -> None:
    here = visit()
    draw = """async rates => {
        const { line } = await import("./page/watch.js");
        const svg = document.getElementById("rate-chart");
        line(svg, rates);
        const points = svg.querySelector("polyline").getAttribute("points").split(" ");
        const heights = points.map(at => Number(at.split(",")[1]));
        return [heights, svg.querySelectorAll("circle").length, svg.parentNode.querySelector(".most").textContent];
    }"""
    heights, spikes, caption = here.page.evaluate(draw, [20, 22, 20, 900, 21, 20])
    assert spikes == 1 and caption == "up to 900, cut at 53"
    assert max(heights) - min(heights[:3]) < 48 * 0.75 and heights[3] == min(heights) >= 0
    heights, spikes, caption = here.page.evaluate(draw, [20, 22, 30, 40, 21, 20])
    assert spikes == 0 and caption == "up to 40"


def test_a_conversation_survives_a_reload(visit: Open) -> None:
    here = visit()
    page = here.page
    here.set(max_tokens=24)
    write(page, MARKDOWN[:190])
    here.ask("What is a point?")
    here.until_done()
    page.unroute("**/v1/chat/completions")
    page.check("#compare")
    here.ask("Say hello.")
    here.until_done()
    shown = "all => all.map(each => each.outerHTML)"
    here.expect(page.locator("article:first-of-type .tail")).to_be_empty()
    before = page.locator("article").evaluate_all(shown)
    page.reload()
    here.expect(page.locator("article")).to_have_count(2)
    here.expect(page.locator("article:first-of-type .tail")).to_be_empty()
    after = page.locator("article").evaluate_all(shown)
    assert after == before, "questions, formatted answers, marks, notes and the verdict"
    assert page.locator("#trees figure").count() > 0
    page.uncheck("#compare")
    here.set(max_tokens=4)
    here.ask("And now?")
    here.until_done()
    roles = [message["role"] for message in here.asked()[-1]["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"], "what was said so far goes along"
    page.click("#fresh")
    page.reload()
    here.expect(page.locator("#welcome")).to_be_visible()
    assert page.locator("article").count() == 0


def test_an_answer_that_a_reload_cut_off_is_kept_as_far_as_it_came(visit: Open) -> None:
    here = visit()
    page = here.page
    here.begin_long()
    page.reload()
    here.expect(page.locator(".note")).to_contain_text("the page was left")
    assert here.texts()[0]


def test_what_is_kept_is_bounded_and_what_is_broken_is_left(visit: Open) -> None:
    here = visit()
    sizes = here.page.evaluate(
        """async () => {
            const { load, save } = await import("./page/store.js");
            const tokens = ["t".repeat(300000)];
            const turn = (name, shown) => ({ question: name, answers: [{ tokens, rounds: ["r"], shown }] });
            const kept = (turns) => {
                save(turns, true);
                const back = load().turns;
                return [JSON.stringify(back).length, back.map(each => each.question + each.answers[0].tokens.length)];
            };
            const traces = kept(["a", "b", "c", "d", "e"].map(name => turn(name, "text")));
            const texts = kept(["a", "b", "c"].map(name => turn(name, "x".repeat(400000))));
            const large = kept([turn("a", "text"), turn("large", "x".repeat(1000000)), turn("b", "text")]);
            const traced = { tokens: ["t".repeat(1000000)], rounds: [], shown: "text" };
            const own = kept([turn("a", "text"), { question: "traced", answers: [traced] }]);
            localStorage.setItem("outrider.conversation", "{broken");
            return [traces, texts, large, own, load()];
        }"""
    )
    traces, texts, large, own, broken = sizes
    assert traces[0] < 1_000_000 and traces[1] == ["a0", "b0", "c1", "d1", "e1"], "the oldest lose tokens and trees"
    assert texts[0] < 1_000_000 and texts[1] == ["b0", "c0"], "then they go"
    assert large[1] == ["a1", "b1"], "what never fits drives out nothing else"
    assert own[1] == ["a1", "traced0"]
    assert broken == {"turns": [], "marks": True}
    page = here.page
    wrong = '{"version": 1, "marks": true, "turns": [{"question": "q", "answers": [{}]}, 7]}'
    page.evaluate("wrong => localStorage.setItem('outrider.conversation', wrong)", wrong)
    page.goto("about:blank")
    here.open()
    assert page.locator("article").count() == 0 and page.is_visible("#welcome")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_the_figures_are_in_view_all_the_time(visit: Open, scheme: str) -> None:
    here = visit("phone", scheme)
    page = here.page
    page.click("#examples button >> nth=2")
    for when in ("while it grows", "at the end"):
        page.wait_for_selector(".text .token") if when == "while it grows" else here.until_done()
        place, composer = (page.locator(name).bounding_box() for name in ("#figures", "#composer"))
        assert place["y"] >= 0 and place["y"] + place["height"] < composer["y"], when
    picture(page, f"phone_{scheme}_answer", full=False)


FED = """
const real = window.fetch;
window.fetch = (path, options) => {
    if (!String(path).includes("chat/completions")) return real(path, options);
    return Promise.resolve(new Response(new ReadableStream({ start: (feed) => { window.feed = feed; } })));
};
const events = new TextEncoder();
window.say = (text) => {
    const round = { num_tokens: 1, accepted: [], parents: [], drafters: [], tokens: [] };
    const trace = { tokens: [{ id: 1, text, origin: "plain", depth: 0, drafter: "" }], rounds: [round] };
    const event = { choices: [{ delta: { content: text }, finish_reason: null, trace }] };
    window.feed.enqueue(events.encode(`data: ${JSON.stringify(event)}\\n\\n`));
};
window.frames = async (count) => {
    for (; count; count -= 1) await new Promise(requestAnimationFrame);
};
"""


def test_who_scrolls_up_within_a_frame_is_not_brought_back(visit: Open) -> None:
    here = visit()
    page = here.page
    page.evaluate(FED)
    page.fill("#question", "Long?")
    page.press("#question", "Enter")
    page.wait_for_function("window.feed !== undefined")
    left, followed = page.evaluate(
        """async () => {
            const box = document.getElementById("turns");
            const turns = getComputedStyle(box).overflowY === "auto" ? box : document.scrollingElement;
            window.say("A line.\\n".repeat(200));
            await window.frames(3);
            const end = turns.scrollTop;
            for (let frame = 0; frame < 5; frame += 1) {
                window.say("More.\\n");
                for (let task = 0; task < 20; task += 1) await null;
                turns.scrollTop -= 60;
                await window.frames(1);
            }
            const left = end - turns.scrollTop;
            turns.scrollTop = turns.scrollHeight;
            window.say("Last.\\n");
            await window.frames(3);
            return [left, turns.scrollHeight - turns.scrollTop - turns.clientHeight];
        }"""
    )
    page.click("#stop")
    assert left > 200 and followed < 80
