"""What the target is asked, to make training text: questions, a chat's form, first words, beginnings. Torch-free."""

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

# Stands for what is said while the template is rendered; no tokenizer or template has a use for it.
_PLACE = "\u241fplace of the question\u241f"
_USER = {"role": "user", "content": _PLACE}


@dataclass(frozen=True, slots=True)
class Question:
    """What a user says first, and the group that it is reported under ("" for none)."""

    text: str
    category: str = ""


class QuestionForm:
    """What stands around a user's words.

    Attributes:
        before: token ids up to the user's words.
        after: token ids from there to where the answer begins.
    """

    def __init__(self, tokenizer: Tokenizer, before: str, after: str, first: Sequence[int] = ()) -> None:
        """`first`: token ids in front of all text."""
        self.tokenizer = tokenizer
        self._first = list(first)
        self._parts = before, after
        self.before = [*first, *self.words(before)]
        self.after = self.words(after)

    def ask(self, question: str | Sequence[int]) -> list[int]:
        """Token ids of a text that ends where the answer to `question`, a text or token ids, begins."""
        if isinstance(question, str):
            return self._first + self.words(question.join(self._parts))
        return [*self.before, *question, *self.after]

    def words(self, text: str) -> list[int]:
        """Token ids of a text alone."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(token_ids))


class ChatForm(QuestionForm):
    """The chat template of a model folder, behind whatever the template itself puts first.

    Sampling after `before` lets the model invent a question.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError where the folder has no chat template, or one that cannot be cut."""
        template = ChatTemplate.load(folder)
        if template is None:
            raise ConfigError(f"{folder} has no chat template; training text is made of answers in a chat")
        self._folder, self._template = folder, template
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        super().__init__(tokenizer, *self._cut(self._render(_USER)))

    def behind(self, system: str) -> QuestionForm:
        """The same chat behind that system message; "" for none, not even one that the template has of its own.

        Raises ConfigError where the template takes no system message, or cannot do without.
        """
        text = self._render(_system(system), _USER) if system else self._without_system()
        if system.strip() not in text:
            raise ConfigError(f"the chat template leaves out the system message {system!r}")
        return QuestionForm(self.tokenizer, *self._cut(text))

    def raw(self) -> QuestionForm:
        """No chat: the user's words alone, behind the token that the tokenizer begins every text with, if any."""
        return QuestionForm(self.tokenizer, "", "", self.tokenizer.encode("", add_special_tokens=True).ids)

    def system_form(self) -> QuestionForm:
        """A chat cut where the system message stands: sampling after its `before` lets the model invent one.

        Raises ConfigError where the template takes no system message.
        """
        return QuestionForm(self.tokenizer, *self._cut(self._render(_system(_PLACE))))

    def _render(self, *messages: Mapping[str, str]) -> str:
        """The text of a conversation; where the user spoke last, up to where the answer begins."""
        try:
            return self._template.render(messages, add_generation_prompt=messages[-1]["role"] == "user")
        except ChatTemplateError as error:
            raise ConfigError(f"{self._folder}: the chat template cannot be rendered: {error}") from None

    def _without_system(self) -> str:
        """A user's turn alone. A template may put a system message where none is given, so one is given and cut off."""
        given = _system("Be brief.")
        system, whole = self._render(given), self._render(given, _USER)
        if not whole.startswith(system):
            raise ConfigError(f"{self._folder}: the chat template does not part a system message from the user's words")
        rest, bos = whole.removeprefix(system), self._template.special_tokens.get("bos_token", "")
        return bos + rest if system.startswith(bos) and not rest.startswith(bos) else rest

    def _cut(self, text: str) -> tuple[str, str]:
        """What stands before and after the place of what is said, which must be there once."""
        parts = text.split(_PLACE)
        if len(parts) != 2:
            raise ConfigError(f"{self._folder}: the chat template repeats or changes what is said")
        return parts[0], parts[1]


def read_questions(path: Path) -> list[Question]:
    """Questions of a JSONL file: each line an object with `prompt`, or with `turns` of which the first counts.

    Raises ConfigError: names the line that is at fault.
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


# How users begin: first words of some invented questions, so that those are of many kinds, a line for each.
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
    """A kind after the other in turn, so that any part of the list has all of them."""
    turns = zip_longest(*(kind.split(" | ") for kind in OPENINGS))
    return [opening for turn in turns for opening in turn if opening is not None]


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
        self._own = [_form(chat.behind, message) or chat for message in SYSTEM_MESSAGES]
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
    asked = chat.ask(question)
    # A tokenizer may have merged the question's first letters with what stands before.
    size = len(chat.before)
    return [asked[size:] if asked[:size] == chat.before else asked, _raw_prompt(chat.raw(), question)]


def _raw_prompt(form: QuestionForm, question: str | list[int]) -> list[int]:
    words = form.words(question) if isinstance(question, str) else question
    return form.ask(words[: max(RAW_TOKENS, int(RAW_SHARE * len(words)))])


def _form(make: Callable[[str], QuestionForm], message: str) -> QuestionForm | None:
    """None where the template cannot do it."""
    try:
        return make(message)
    except ConfigError:
        return None
