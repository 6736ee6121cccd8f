"""Reasoning is told apart from the answer, however the text is cut into pieces."""

from __future__ import annotations

import pytest

from gateway.core.reasoning import ReasoningSplitter, ReasoningStart, find_markers

CASES = [
    ("<think>\nfirst, then\n\nthat </ is </think>\n\nThe answer.", False, "first, then\n\nthat </ is", "The answer."),
    ("\n<think>a</think>b <think>c</think>", False, "a", "b <think>c</think>"),
    ("a < b\n</think>\n\nc\n", True, "a < b", "c\n"),
    ("No <think>thought</think>", False, "", "No <think>thought</think>"),
    ("  <thin ice", False, "", "  <thin ice"),
    ("<think>cut off </thi", False, "cut off </thi", ""),
    ("<think>\n\n</think>\n\nHello", False, "", "Hello"),
    ("<think></think>", False, "", ""),
    ("", True, "", ""),
]


def split(pieces: list[str], begun: bool) -> tuple[str, str]:
    markers = find_markers("think", None)
    assert markers is not None
    splitter = ReasoningSplitter(ReasoningStart(markers, begun))
    reasoning = text = ""
    for piece in pieces:
        splitter.push(piece)
        more = splitter.take(final=False)
        reasoning, text = reasoning + more[0], text + more[1]
    more = splitter.take(final=True)
    return reasoning + more[0], text + more[1]


@pytest.mark.parametrize(("answer", "begun", "reasoning", "text"), CASES)
def test_the_parts_are_the_same_for_all_cuts(answer: str, begun: bool, reasoning: str, text: str) -> None:
    for size in range(1, len(answer) + 2):
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        assert split(pieces, begun) == (reasoning, text), size


def test_tokens_of_the_reasoning_are_counted_with_its_markers() -> None:
    markers = find_markers("think", None)
    assert markers is not None
    splitter = ReasoningSplitter(ReasoningStart(markers, False))
    for piece in ("<think>", "a", " b", "</think>", "\n", "c"):
        splitter.push(piece)
    assert splitter.num_tokens == 4


def test_without_markers_all_is_text() -> None:
    splitter = ReasoningSplitter(None)
    splitter.push("<think>x</think>")
    assert splitter.take(final=True) == ("", "<think>x</think>") and splitter.num_tokens == 0


def test_the_template_names_the_markers_and_the_prompt_where_the_answer_begins() -> None:
    template = "{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}"
    markers = find_markers("auto", template)
    assert markers == find_markers("think", None) is not None
    assert find_markers("auto", "{{ messages }}") is None and find_markers("auto", None) is None
    assert find_markers("none", template) is None
    assert ReasoningStart.of(markers, "user: </think> <think>\nassistant:") == ReasoningStart(markers, False)
    assert ReasoningStart.of(markers, "assistant:<think>\n") == ReasoningStart(markers, True)
    assert ReasoningStart.of(markers, "assistant:<think>\n\n</think>\n\n") is None
    assert ReasoningStart.of(None, "<think>") is None


def test_of_gemma_4_the_channel_s_name_is_no_part_of_the_reasoning() -> None:
    markers = find_markers("auto", "{%- set parts = text.split('<channel|>') -%}")
    assert markers == find_markers("gemma4", None) is not None
    assert ReasoningStart.of(markers, "<|turn>model\n<|channel>thought\n<channel|>") is None
    assert ReasoningStart.of(markers, "<|turn>model\n<|channel>thought\n") == ReasoningStart(markers, True)
    splitter = ReasoningSplitter(ReasoningStart.of(markers, "<|turn>model\n"))
    for piece in ("<|channel>", "thou", "ght", "\n", "Why", " not?", "<channel|>", "Yes."):
        splitter.push(piece)
    assert splitter.take(final=True) == ("Why not?", "Yes.")


def test_white_space_without_an_end_is_read_on() -> None:
    pieces = ["a", *[" " * 64] * 30_000, "b"]
    assert split(pieces, begun=True) == ("".join(pieces), "")
    assert split([*pieces[:-1], "</think>c"], begun=True) == ("a", "c")
    assert split([*pieces[1:], "</think>"], begun=False) == ("", "".join([*pieces[1:], "</think>"]))
    assert split(pieces[1:-1], begun=False) == ("", "".join(pieces[1:-1]))
    assert split([*pieces[1:-1], "<think>a</think>b"], begun=False) == ("a", "b")
