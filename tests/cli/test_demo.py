from __future__ import annotations

from outrider.cli.demo import PROMPT, remark


def test_the_demo_says_that_its_figures_are_of_one_prompt() -> None:
    own, other = remark(PROMPT), remark("Why is the sky blue?")
    assert own.startswith(other) and "one answer to one prompt, measured once on this machine" in other
    assert "This prompt suits drafts" in own and "suits" not in other
