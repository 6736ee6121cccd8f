"""How the conversations of a training text begin: as the chat template lets them, or otherwise. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from outrider.errors import ConfigError
from outrider_tools.training.prompts import ChatForm, QuestionForm
from outrider_tools.training.texts import Texts

# A drafter that saw one beginning alone guesses nothing behind any other: its attention learns to rest on those tokens.
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful, honest and concise assistant.",
    "You are an AI assistant that follows instructions carefully.",
    "Answer in one or two sentences.",
    "Answer step by step, and explain your reasoning.",
    "You are an expert programmer. Answer with code and short comments.",
    "You are a patient teacher who explains things to children.",
    "You are a customer support agent of an online shop. Be polite and brief.",
    "You write in plain language, without jargon.",
    "You are a careful editor. Improve what the user writes and keep its meaning.",
    "If you do not know the answer, say so.",
    "You are a friendly guide to a large museum. Stay in character.",
)
# First words of messages that the target invents.
SYSTEM_OPENINGS = (
    "You are a",
    "You are an expert",
    "You are the",
    "Act as a",
    "Your task is",
    "Answer",
    "Always",
    "You help",
    "Respond",
    "The user",
)
# Of the other beginnings: system messages, and chats without one; the rest is no chat.
SYSTEM_SHARE, BARE_SHARE = 0.5, 0.25
# Of system messages, those of our own while there are invented ones, too.
OWN_SHARE = 0.5
# A text without a chat is the first half of a question, since to a whole one the target often has nothing to add.
RAW_SHARE, RAW_TOKENS = 0.5, 2


class Beginnings:
    """Draws for each conversation what stands around its question.

    A `share` of them begin otherwise than the chat template lets them: behind a system message, without one, or without
    a chat. What a template cannot do is left to its own beginning.
    """

    def __init__(self, chat: ChatForm, share: float, invented: Sequence[str] = (), seed: int = 0) -> None:
        """`invented`: system messages beside our own."""
        self._chat = chat
        self._share = share
        self._random = np.random.default_rng(seed)
        own = [_form(chat.behind, message) for message in SYSTEM_MESSAGES]
        self._own = [form or chat for form in own]
        self._invented = [_form(chat.behind, message) or chat for message in invented]
        self._bare = _form(chat.behind, "") or chat
        self._raw = chat.raw()

    @property
    def room(self) -> int:
        """The most tokens that may stand around a question."""
        forms = (self._chat, self._bare, self._raw, *self._own, *self._invented)
        return max(len(form.before) + len(form.after) for form in forms)

    def prompt(self, question: str | list[int]) -> list[int]:
        """A question, as text or token ids, behind a beginning: token ids up to where the target goes on."""
        form = self._draw()
        if form is self._raw:
            return _raw_prompt(form, question)
        return form.ask(question) if isinstance(question, str) else form.around(question)

    def _draw(self) -> QuestionForm:
        if self._random.random() >= self._share:
            return self._chat
        kind = self._random.random()
        if kind < SYSTEM_SHARE:
            own = not self._invented or self._random.random() < OWN_SHARE
            messages = self._own if own else self._invented
            return messages[self._random.integers(len(messages))]
        return self._bare if kind < SYSTEM_SHARE + BARE_SHARE else self._raw

    def counts(self, texts: Texts) -> dict[str, int]:
        """How many texts begin in which way."""
        header = _form(lambda _: self._chat.system_form(), "")
        forms = {"chat template": self._chat, "no system message": self._bare, "system message": header}
        known = {name: form.before for name, form in forms.items() if form is not None}

        def name_of(tokens: list[int]) -> str:
            return next((name for name, before in known.items() if tokens[: len(before)] == before), "no chat")

        longest = max(map(len, known.values()))
        return dict(Counter(name_of(texts.sequence(number)[:longest].tolist()) for number in range(len(texts))))


def endings(chat: ChatForm, question: str | list[int]) -> list[list[int]]:
    """What the prompts of a question end with, whatever they begin with."""
    asked = chat.ask(question) if isinstance(question, str) else chat.around(question)
    # A tokenizer may have merged the question's first letters with what stands before.
    size = len(chat.before)
    return [asked[size:] if asked[:size] == chat.before else asked, _raw_prompt(chat.raw(), question)]


def _raw_prompt(form: QuestionForm, question: str | list[int]) -> list[int]:
    words = form.words(question) if isinstance(question, str) else question
    return form.around(words[: max(RAW_TOKENS, int(RAW_SHARE * len(words)))])


def _form(make: Callable[[str], QuestionForm], message: str) -> QuestionForm | None:
    """None where the template cannot do it."""
    try:
        return make(message)
    except ConfigError:
        return None
