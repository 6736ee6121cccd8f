"""The target's answers that a drafter is measured on: greedy, or sampled with the shared noise as the service does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.models.decoder import CausalLM
from outrider_tools.training.generate import Told
from outrider_tools.training.keyed import KeyedGenerator, KeyedJob
from outrider_tools.training.prompts import ChatForm, Question
from outrider_tools.training.texts import Texts


@dataclass(frozen=True)
class Answers:
    """Answers of the target to questions.

    Attributes:
        texts: prompts and answers, as many as there were questions.
        temperature: 0 for greedy ones.
        seeds: of each answer's noise.
        categories: of each question, "" for none.
    """

    texts: Texts
    temperature: float
    seeds: list[int]
    categories: list[str]


def answer_questions(
    model: CausalLM,
    form: ChatForm,
    questions: Sequence[Question],
    *,
    temperature: float,
    max_new_tokens: int,
    num_rows: int = 256,
    seed: int = 0,
    told: Told | None = None,
) -> Answers:
    """Ask the target; the answer to question i has the seed `seed` + i and choice 0. End of sequence is obeyed.

    Each token is the argmax of logits / temperature + noise(seed, choice, position, token), as in the verify service.
    """
    prompts = [form.ask(question.text) for question in questions]
    seeds = [seed + number for number in range(len(prompts))]
    jobs = [KeyedJob(prompt, temperature, max_new_tokens, key) for prompt, key in zip(prompts, seeds, strict=True)]
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    generator = KeyedGenerator(model, min(num_rows, len(jobs)), longest, model.config.eos_token_ids)
    texts = Texts.join(prompts, generator.run(jobs, told=told))
    return Answers(texts, temperature, seeds, [question.category for question in questions])
