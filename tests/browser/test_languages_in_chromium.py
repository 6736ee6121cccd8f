"""What the page does with scripts that are written from the right, and with sentences that end with other signs."""

from __future__ import annotations

import pytest
from browser_help import Open, alter, picture

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

ARABIC = """# قائمة

Words from the left.

كلمات من اليمين `x = 1` هنا.

- عنصر

  فقرة
- item

> قول

| اسم | name |
|-----|-----:|
| س   | 1    |

```python
x = 1
```

نهاية."""


def test_each_block_begins_at_the_side_of_its_script(visit: Open) -> None:
    here = visit()
    page = here.page
    alter(page, lambda body: True, structured_outputs={"choice": [ARABIC]})
    here.set(max_tokens=900)
    here.ask("سؤال")
    here.until_done()
    here.expect(page.locator(".tail")).to_be_empty()

    def sides(selector: str) -> list[str]:
        return list(page.locator(selector).evaluate_all("all => all.map(each => getComputedStyle(each).direction)"))

    assert sides(".blocks > :is(h4, p)") == ["rtl", "ltr", "rtl", "rtl"]
    assert sides(".blocks li") == ["rtl", "ltr"] and sides(".blocks li p") == ["rtl", "rtl", "ltr"]
    assert sides(".blocks blockquote") == ["rtl"] and sides(".blocks :is(th, td)") == ["rtl", "ltr", "rtl", "ltr"]
    assert sides(".blocks code") == ["ltr", "ltr"] and sides(".blocks pre") == ["ltr"]
    page.fill("#question", "سؤال")
    picture(page, "right_to_left")
    assert sides("#question") == ["rtl"]


def test_a_model_that_repeats_a_sign_holds_nothing_up(visit: Open) -> None:
    here = visit()
    steps = here.page.evaluate(
        """async () => {
            const { Speech } = await import("./page/speech.js");
            const speech = new Speech();
            for (let count = 0; count < 3000; count += 1) speech.write("\uff01");
            return speech.pending.length;
        }"""
    )
    assert steps == 3000


def test_a_text_that_is_too_long_is_never_cut_within_a_character(visit: Open) -> None:
    here = visit()
    pieces = here.page.evaluate(
        r"""async () => {
            const { AnswerView } = await import("./page/answer.js");
            const pieces = [];
            const format = async (text) => {
                pieces.push(text);
                const [begin, end] = [text.indexOf("\n\n") < 0 ? 0 : 2, text.split("\n").length];
                const block = (begin, end) => ({ tag: "p", begin, end, children: [] });
                return begin ? [block(0, 1), block(begin, end)] : [block(0, end)];
            };
            const view = new AnswerView("Answer", { format, follow: (work) => work() });
            view.answer.text = "a\n\n" + "b".repeat(15996) + "\u{1F600}\u{1F600} end";
            view.end("");
            await view.settle();
            return pieces;
        }"""
    )
    assert len(pieces[0]) == 15_999 and not pieces[0].endswith("\ud83d")


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("你好。「是吗？」他说！真的", ["你好。", "「是吗？」", "他说！"]),  # noqa: RUF001
        ("本当！？はい。", ["本当！？"]),  # noqa: RUF001
        ("كيف حالك؟ أنا بخير", ["كيف حالك؟"]),
        ("यह है। वह", ["यह है।"]),
        ('It is 1.5. "So." And', ["It is 1.5.", '"So."']),
    ],
)
def test_sentences_are_read_aloud_as_they_end(visit: Open, text: str, sentences: list[str]) -> None:
    here = visit()
    spoken, cleared = here.page.evaluate(
        """async text => {
            const { Speech } = await import("./page/speech.js");
            const speech = new Speech();
            for (const character of text) speech.write(character);
            const said = [...speech.region.children].map(each => each.textContent);
            speech.clear();
            speech.end("");
            return [said, speech.region.children.length];
        }""",
        text,
    )
    assert spoken == sentences and cleared == 0
