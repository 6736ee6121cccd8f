from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

from gateway.core.tokenizer import StopMatcher, Tokenizer, WindowDetokenizer

KINDS = {"byte level": byte_level_tokenizer, "byte fallback": byte_fallback_tokenizer}


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())


def pieces(subject: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = subject.detokenizer()
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(100))
@given(data=st.data())
def test_pieces_of_random_tokens_add_up_to_the_whole(kind: str, data: st.DataObject) -> None:
    subject = tokenizer(kind)
    # Ids past the end have no token: a padded vocabulary has such.
    odd = st.sampled_from(subject.encode("\ufffd", add_special_tokens=False))
    token_ids = data.draw(st.lists(st.integers(0, subject.size + 3) | odd, max_size=60))
    assert "".join(pieces(subject, token_ids)) == subject.decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(70))
@given(text=st.text(max_size=60))
def test_no_piece_of_a_text_holds_half_a_character(kind: str, text: str) -> None:
    subject = tokenizer(kind)
    token_ids = subject.encode(text.replace("\ufffd", ""), add_special_tokens=False)
    found = pieces(subject, token_ids)
    assert "".join(found) == subject.decode(token_ids)
    assert not any("\ufffd" in piece for piece in found)


@settings(max_examples=examples(70))
@given(data=st.binary(max_size=30))
def test_any_bytes_decode_as_the_library_decodes_them(data: bytes) -> None:
    subject = tokenizer("byte level")
    by_bytes = {subject.token_bytes(token_id): token_id for token_id in range(subject.size)}
    token_ids = [by_bytes[bytes([byte])] for byte in data]
    assert "".join(pieces(subject, token_ids)) == subject.decode(token_ids) == data.decode("utf-8", "replace")


def test_a_character_comes_whole_with_its_last_byte() -> None:
    subject = tokenizer("byte level")
    by_bytes = {subject.token_bytes(token_id): token_id for token_id in range(subject.size)}
    assert pieces(subject, [by_bytes[bytes([byte])] for byte in "🦜".encode()]) == ["", "", "", "🦜", ""]


def test_half_a_character_at_the_end_becomes_a_replacement() -> None:
    subject = tokenizer("byte level")
    by_bytes = {subject.token_bytes(token_id): token_id for token_id in range(subject.size)}
    assert pieces(subject, [by_bytes[b"\xf0"], by_bytes[b"\x9f"]]) == ["", "", "\ufffd"]


def test_special_tokens_are_not_text_and_added_ones_are() -> None:
    subject = tokenizer("byte level")
    token_ids = subject.encode("a<|im_end|><tool é>b", add_special_tokens=False)
    assert "".join(pieces(subject, token_ids)) == "a<tool é>b"


@pytest.mark.parametrize("with_bytes", [False, True])
def test_replacement_characters_without_end_cost_no_more_than_other_text(with_bytes: bool) -> None:
    subject = tokenizer("byte fallback")
    vocabulary = byte_fallback_tokenizer().get_vocab()
    num_decoded = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return subject.decode(token_ids)

    bytes_ids = set(range(3, 259))
    detokenizer = WindowDetokenizer(decode, is_hidden=lambda _: False, is_byte=bytes_ids.__contains__)
    token_ids = [vocabulary["<0xF0>"], vocabulary["\ufffd"]] * 1000 if with_bytes else [vocabulary["\ufffd"]] * 2000
    text = "".join([*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()])
    assert text == subject.decode(token_ids)
    assert num_decoded < 100 * len(token_ids)


LETTERS = st.text(alphabet="abc", min_size=1, max_size=4)


def brute_force(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What a reader sees who takes one character at a time and looks back."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=examples(170))
@given(pieces=st.lists(st.text(alphabet="abc", max_size=5), max_size=12), stops=st.lists(LETTERS, max_size=4))
def test_any_cut_into_pieces_gives_what_the_whole_text_gives(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    expected, matched = brute_force("".join(pieces), stops)
    for piece in pieces:
        shown += matcher.push(piece)
        assert expected.startswith(shown)
    shown += matcher.finish()
    assert (shown, matcher.matched) == (expected, matched)


def test_many_long_stop_strings_are_not_all_compared_with_all_of_the_held_text() -> None:
    num_compared = 0

    class Counted(str):
        def startswith(self, *about: Any) -> bool:
            nonlocal num_compared
            num_compared += 1
            return super().startswith(*about)

    stops = [Counted("a" * 255 + "b"), *(Counted(f"{number:02}" + "a" * 250) for number in range(63))]
    matcher = StopMatcher(stops)
    pieces = ["a" * 200, *["a"] * 100, "b", "c"]
    assert "".join(matcher.push(piece) for piece in pieces) + matcher.finish() == "a" * 45
    # Each character begins a stop string or does not, and each piece is looked at once.
    assert num_compared <= len(stops) * (300 + len(pieces))


def test_text_that_cannot_begin_a_stop_string_is_not_held_back() -> None:
    matcher = StopMatcher(["STOP", "\n\n"])
    assert [matcher.push(piece) for piece in ("Hello S", "TO", "RY ST", "OPx")] == ["Hello ", "", "STORY ", ""]
    assert matcher.matched == "STOP"
    assert matcher.push("more") == ""
