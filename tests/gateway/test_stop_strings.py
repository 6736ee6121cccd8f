from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.detokenizer import StopMatcher

LETTERS = st.text(alphabet="abc", min_size=1, max_size=4)


def brute_force(text: str, stops: list[str]) -> tuple[str, bool]:
    """What a reader sees who takes one character at a time and looks back."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(st.text(alphabet="abc", max_size=5), max_size=12), stops=st.lists(LETTERS, max_size=4))
def test_any_cut_into_pieces_gives_what_the_whole_text_gives(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    expected, hit = brute_force("".join(pieces), stops)
    for piece in pieces:
        shown += matcher.push(piece)
        assert expected.startswith(shown)
    shown += matcher.finish()
    assert (shown, matcher.hit) == (expected, hit)


def test_text_that_cannot_begin_a_stop_string_is_not_held_back() -> None:
    matcher = StopMatcher(["STOP", "\n\n"])
    assert [matcher.push(piece) for piece in ("Hello S", "TO", "RY ST", "OPx")] == ["Hello ", "", "STORY ", ""]
    assert matcher.hit
    assert matcher.push("more") == ""
