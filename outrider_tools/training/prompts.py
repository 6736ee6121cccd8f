"""What the target is asked for training text: questions, the chat's form, first words, beginnings. Without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from outrider.chat_template import ChatTemplate, ChatTemplateError
from outrider.errors import ConfigError
from outrider_tools.files import json_objects
from outrider_tools.training.texts import Texts

# Stands for the user's words while the template is rendered. It occurs in no tokenizer or template.
_PLACE = "\u241fplace of the question\u241f"
_USER = {"role": "user", "content": _PLACE}


@dataclass(frozen=True, slots=True)
class Question:
    """A user's first message, and the category that it is reported under ("" for none)."""

    text: str
    category: str = ""


class QuestionForm:
    """The tokens around a user's words.

    Attributes:
        before: token ids up to the user's words.
        after: token ids from there to where the answer begins.
    """

    def __init__(self, tokenizer: Tokenizer, before: str, after: str, first: Sequence[int] = ()) -> None:
        """`first` are token ids in front of all text."""
        self.tokenizer = tokenizer
        self._first = list(first)
        self._parts = before, after
        self.before = [*first, *self.words(before)]
        self.after = self.words(after)

    def ask(self, question: str | Sequence[int]) -> list[int]:
        """Return the token ids up to where the answer to `question`, a text or token ids, begins."""
        if isinstance(question, str):
            return self._first + self.words(question.join(self._parts))
        return [*self.before, *question, *self.after]

    def words(self, text: str) -> list[int]:
        """Return the token ids of a text alone."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self.tokenizer.decode(token_ids))


class ChatForm(QuestionForm):
    """The chat template of a model folder, after any text that the template itself puts first.

    Sampling after `before` lets the model invent a question.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the folder has no chat template, or one that cannot be split."""
        template = ChatTemplate.load(folder)
        if template is None:
            raise ConfigError(f"{folder} has no chat template; training text is made of answers in a chat")
        self._folder, self._template = folder, template
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        super().__init__(tokenizer, *self._cut(self._render(_USER)))

    def with_system(self, system: str) -> QuestionForm:
        """Return the same chat after that system message; "" for none, not even the template's own.

        Raises ConfigError if the template takes no system message, or cannot do without.
        """
        text = self._render(_system(system), _USER) if system else self._without_system()
        if system.strip() not in text:
            raise ConfigError(f"the chat template leaves out the system message {system!r}")
        return QuestionForm(self.tokenizer, *self._cut(text))

    def raw(self) -> QuestionForm:
        """Return a form without a chat: the user's words alone, after the tokenizer's first token, if it has one."""
        return QuestionForm(self.tokenizer, "", "", self.tokenizer.encode("", add_special_tokens=True).ids)

    def system_form(self) -> QuestionForm:
        """Return a chat that is split at its system message: sampling after its `before` lets the model invent one.

        Raises ConfigError if the template takes no system message.
        """
        return QuestionForm(self.tokenizer, *self._cut(self._render(_system(_PLACE))))

    def _render(self, *messages: Mapping[str, str]) -> str:
        """Return the text of a conversation; if the user spoke last, up to where the answer begins."""
        try:
            return self._template.render(messages, add_generation_prompt=messages[-1]["role"] == "user")
        except ChatTemplateError as error:
            raise ConfigError(f"{self._folder}: the chat template cannot be rendered: {error}") from None

    def _without_system(self) -> str:
        """Return a user's turn alone. Templates may add a system message if none is given, so cut off a given one."""
        given = _system("Be brief.")
        system, whole = self._render(given), self._render(given, _USER)
        if not whole.startswith(system):
            raise ConfigError(f"{self._folder}: the chat template does not part a system message from the user's words")
        rest, bos = whole.removeprefix(system), self._template.special_tokens.get("bos_token", "")
        return bos + rest if system.startswith(bos) and not rest.startswith(bos) else rest

    def _cut(self, text: str) -> tuple[str, str]:
        """Return the text before and after the placeholder, which must occur once."""
        parts = text.split(_PLACE)
        if len(parts) != 2:
            raise ConfigError(f"{self._folder}: the chat template repeats or changes what is said")
        return parts[0], parts[1]


def read_questions(path: Path) -> list[Question]:
    """Read questions from a JSONL file. Each line is an object with `prompt`, or with `turns`, whose first is taken.

    Raises ConfigError, which names the faulty line.
    """
    found = []
    for where, fields in json_objects(path, str(path)):
        turns = fields.get("turns")
        text = turns[0] if isinstance(turns, list) and turns else fields.get("prompt")
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{where}: neither a prompt nor turns")
        found.append(Question(text, str(fields.get("category", ""))))
    return found


def _system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


# First words of some invented questions, so that questions are of many kinds; a string for each kind.
OPENINGS = (
    # Writing.
    "Write a short story about | Write an email to | Write a poem | Draft a speech | "
    "Rewrite this paragraph | Help me write | Edit the following text | Come up with a title for | "
    "Describe a scene where | Compose a letter",
    # Roleplay.
    "Imagine you are | You are a | Pretend that you are | Act as a | Let's play a game | Speak like a | "
    "Suppose you were a",
    # Reasoning.
    "If all | There are three | Which of these | Who is older | Is it possible that | What would happen if | "
    "A man has | Explain why | Which is better, | Do you think",
    # Math.
    "Solve | What is the value of | Calculate | Find the area | A store sells | How many | Prove that | "
    "If x | What is the probability | The sum of",
    # Coding.
    "Write a Python function | Write a program that | def  | How do I fix this code | Write an SQL query | "
    "Implement a | What does this code do | Create a JavaScript | Write HTML | Write a C++ program",
    # Extraction.
    "Extract the names | Summarize the following | Classify the following | List all the | "
    "Turn this into JSON | Read the text below | Given the following | From the table | Identify the",
    # Stem.
    "What is the difference between | How does a | Explain how | What causes | Describe the process of | "
    "What is the function of | Why do | In physics,",
    # Humanities.
    "Discuss the | Who was | How did | What are the main | Compare | Why did | What is the meaning of | "
    "What role did | Explain the history of",
    # Life.
    "I want to | I need | Can you | Please | My friend | What should I | Give me some tips | Plan a trip | "
    "Hi | How can I | Recommend",
)


def all_openings() -> list[str]:
    """Return all openings, one of each kind in turn, so that any part of the list has all kinds."""
    turns = zip_longest(*(kind.split(" | ") for kind in OPENINGS))
    return [opening for turn in turns for opening in turn if opening is not None]


# A drafter that only saw one beginning guesses nothing after any other: its attention learns to rest on those tokens.
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
# First words of system messages that the target invents.
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
# Shares among the other beginnings: system messages, and chats without one; the rest has no chat.
SYSTEM_SHARE, BARE_SHARE = 0.5, 0.25
# Share of our own among system messages, if there are invented ones, too.
OWN_SHARE = 0.5
# A text without a chat is the first half of a question: after a whole one the target often has nothing to add.
RAW_SHARE, RAW_TOKENS = 0.5, 2


class Beginnings:
    """Draws for each conversation the text around its question.

    A `share` of them do not begin as the chat template does, but with a system message, without one, or without a chat.
    If the template cannot do that, they begin as it does.
    """

    def __init__(self, chat: ChatForm, share: float, invented: Sequence[str] = (), seed: int = 0) -> None:
        """`invented` are system messages beside our own."""
        self._chat = chat
        self._share = share
        self._random = np.random.default_rng(seed)
        self._own = [_form(chat.with_system, message) or chat for message in SYSTEM_MESSAGES]
        self._invented = [_form(chat.with_system, message) or chat for message in invented]
        self._bare = _form(chat.with_system, "") or chat
        self._raw = chat.raw()

    @property
    def room(self) -> int:
        """Most tokens around a question."""
        forms = (self._chat, self._bare, self._raw, *self._own, *self._invented)
        return max(len(form.before) + len(form.after) for form in forms)

    def prompt(self, question: str | list[int]) -> list[int]:
        """Return the token ids of a beginning and `question` (text or token ids), up to where the target continues."""
        form = self._draw()
        return _raw_prompt(form, question) if form is self._raw else form.ask(question)

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
        """Return the number of texts by the way they begin."""
        header = _form(lambda _: self._chat.system_form(), "")
        forms = {"chat template": self._chat, "no system message": self._bare, "system message": header}
        known = {name: form.before for name, form in forms.items() if form is not None}

        def name_of(tokens: list[int]) -> str:
            return next((name for name, before in known.items() if tokens[: len(before)] == before), "no chat")

        longest = max(map(len, known.values()))
        return dict(Counter(name_of(texts.sequence(number)[:longest].tolist()) for number in range(len(texts))))


def endings(chat: ChatForm, question: str | list[int]) -> list[list[int]]:
    """Return the possible ends of a question's prompts; they do not depend on the beginning."""
    asked = chat.ask(question)
    # A tokenizer may have merged the question's first letters with the text before it.
    size = len(chat.before)
    return [asked[size:] if asked[:size] == chat.before else asked, _raw_prompt(chat.raw(), question)]


def _raw_prompt(form: QuestionForm, question: str | list[int]) -> list[int]:
    words = form.words(question) if isinstance(question, str) else question
    return form.ask(words[: max(RAW_TOKENS, int(RAW_SHARE * len(words)))])


def _form(make: Callable[[str], QuestionForm], message: str) -> QuestionForm | None:
    """Make a form of a message; None if the template cannot do it."""
    try:
        return make(message)
    except ConfigError:
        return None
