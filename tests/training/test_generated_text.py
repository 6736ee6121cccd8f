from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from outrider.models.loader import load_model
from outrider_tools.training.generate import GenerationJob, Generator
from outrider_tools.training.target import TargetModel


def prompts(count: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(4)
    return [torch.randint(3, 259, (1 + 3 * i,), generator=random).tolist() for i in range(count)]


def run(generator: Generator, jobs: Sequence[GenerationJob], **bounds: Any) -> list[list[int]]:
    return [answer.tolist() for answer in generator.run(jobs, **bounds)]


def test_greedy_answers_equal_transformers_and_rows_are_used_again(target: TargetModel) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()
    asked, limits = prompts(5), [9, 14, 3, 1, 12]
    # A stop token that comes up, so that both ways of ending occur.
    first = model.generate(torch.tensor([asked[1]]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 9 - 5 :]
    stop = int(first[-1])
    jobs = [GenerationJob(prompt, 0.0, limit) for prompt, limit in zip(asked, limits, strict=True)]
    answers = run(Generator(target.model, 2, 64, [stop]), jobs)
    for prompt, limit, answer in zip(asked, limits, answers, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=limit, do_sample=False, eos_token_id=stop, pad_token_id=0
        )
        assert answer == expected[0, len(prompt) :].tolist()
    assert stop in answers[1] and len(answers[1]) <= 6


def test_sampled_tokens_follow_the_targets_distribution(target: TargetModel) -> None:
    jobs = [GenerationJob([5, 9, 30], 1.3, 1, seed) for seed in range(400)]
    drawn = torch.tensor(run(Generator(target.model, 200, 8, [2]), jobs)).flatten()
    hidden = transformers.AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        chances = (hidden(torch.tensor([[5, 9, 30]])).logits[0, -1] / 1.3).softmax(0)
    shares = torch.bincount(drawn, minlength=chances.numel()) / drawn.numel()
    # Half the summed difference: about 0.5 * sum(sqrt(p / n)) by chance.
    chance = 0.5 * (chances / drawn.numel()).sqrt().sum()
    assert 0.5 * (shares - chances).abs().sum() < 1.5 * chance
    # Another temperature shows in how unlikely the tokens are.
    surprise = -chances.log()
    mean = chances @ surprise
    deviation = (chances @ (surprise - mean).square() / drawn.numel()).sqrt()
    assert (surprise[drawn].mean() - mean).abs() < 4 * deviation


def test_same_seeds_same_text_however_many_rows_and_the_budget_ends_it(target: TargetModel) -> None:
    jobs = [GenerationJob(prompt, 1.0, 10, seed) for seed, prompt in enumerate(prompts(4) * 3, 7)]
    first, second = (run(Generator(target.model, rows, 32, [2]), jobs) for rows in (4, 5))
    assert first == second
    assert first != run(Generator(target.model, 4, 32, [2]), [replace(job, seed=job.seed + 1) for job in jobs])
    cut = run(Generator(target.model, 4, 32, [2]), jobs, token_budget=1)
    assert 4 <= len(cut) < len(jobs)
    assert run(Generator(target.model, 4, 32, [2]), jobs, seconds=0.0) == []


def test_jobs_that_do_not_fit_are_refused(target: TargetModel) -> None:
    with pytest.raises(ValueError, match="do not fit 16"):
        run(Generator(target.model, 1, 16, [2]), [GenerationJob([5] * 10, 0.0, 7)])


@pytest.mark.gpu
def test_captured_steps_give_the_text_of_the_cpu(target: TargetModel) -> None:
    model = load_model(target.folder, torch.float32, "cuda")
    jobs = [GenerationJob(prompt, 0.0, 20) for prompt in prompts(9)]
    assert run(Generator(model, 4, 64, [2]), jobs) == run(Generator(target.model, 9, 64, [2]), jobs)


@pytest.mark.gpu
def test_captured_noise_is_new_at_every_step_and_the_same_for_a_seed(target: TargetModel) -> None:
    model = load_model(target.folder, torch.bfloat16, "cuda")
    jobs = [GenerationJob([5, 9, 30], 8.0, 24, seed) for seed in range(64)]
    first, second = (run(Generator(model, 32, 32, []), jobs) for _ in range(2))
    assert first == second
    assert len(set(map(tuple, first))) == 64
    assert all(len(set(answer)) > 12 for answer in first)
