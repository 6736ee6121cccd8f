"""Offline measure of a draft model's guesses: on the target's own answers, with the model loaded as services do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.config.draft import DraftOptions
from outrider.errors import ConfigError, count_of
from outrider.models.decoder import CausalLM
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.heads import StandaloneDraft
from outrider.models.drafters.kinds import check_tokenizer
from outrider.models.drafters.loader import load_draft_model
from outrider_tools.training.attention import Spans
from outrider_tools.training.figures import AnswerCounts, Evaluation, Flags, Report, figures_of, loops
from outrider_tools.training.generate import Answers, answer_questions
from outrider_tools.training.options import TreeShape
from outrider_tools.training.prompts import Question, QuestionForm
from outrider_tools.training.rollout import CHUNK_ROOTS, CandidateRanker, NodeRollout, TextRollout, tree_accepts
from outrider_tools.training.target import target_states

DEPTH = 10


@torch.inference_mode()
def evaluate(
    target: CausalLM,
    model: DraftModel,
    answers: Answers,
    *,
    depth: int = DEPTH,
    tree: TreeShape | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Measure `model` on the target's answers. `depth` limits the rates, `tree.depth` chains and trees.

    At a temperature, the drafter ranks candidates with the noise that the answers were drawn with. `on_progress` gets
    the number of finished answers, and of all.

    Raises ConfigError if the draft model has another vocabulary or hidden size, or a model's attention is not supported
    here.
    """
    _check(target, model)
    largest = int(answers.texts.tokens.max(initial=0))
    if largest >= model.target_vocab_size:
        raise ConfigError(
            f"an answer or its question holds token {largest}, and the draft knows those below "
            f"{model.target_vocab_size}; use a draft of the target's vocabulary"
        )
    tree = tree or TreeShape()
    counted: list[tuple[str, bool, AnswerCounts]] = []
    for number, category in enumerate(answers.categories):
        found = _count(target, model, answers, number, depth, tree)
        counted.append((category, loops(answers.texts.answer(number).tolist()), found))
        if on_progress is not None:
            on_progress(number + 1, len(answers.categories))
    if not counted:
        raise ConfigError("there are no answers to evaluate with")
    parts = [[one for _, looped, one in counted if looped is wanted] for wanted in (False, True)]
    without_loops, in_loops = (figures_of(part, tree.depth) if part else None for part in parts)
    names = dict.fromkeys(category for category, _, _ in counted if category)
    return Evaluation(
        temperature=answers.temperature,
        all=figures_of([one for _, _, one in counted], tree.depth),
        without_loops=without_loops,
        loops=in_loops,
        categories={
            name: figures_of([one for category, _, one in counted if category == name], tree.depth) for name in names
        },
    )


def _count(
    target: CausalLM, model: DraftModel, answers: Answers, number: int, depth: int, tree: TreeShape
) -> AnswerCounts:
    """Return the counts of answer `number`."""
    token_ids = torch.from_numpy(answers.texts.sequence(number).astype(np.int64)).to(target.device)
    first = int(answers.texts.prompt_lens[number])
    draft = read_text(target, model, token_ids)
    # Chains may be deeper than the rates.
    most = max(depth, tree.depth)
    ranking = CandidateRanker(model, answers.temperature, answers.seeds[number], token_ids.shape[0] + most + 1)
    agree = teacher_forced(draft, ranking, most)
    # On a GPU, running many roots at once gains more than the roots that no round visits cost.
    accepts = tree_accepts(draft, ranking, tree, first - 1, all_roots=target.device.type == "cuda")
    return AnswerCounts.of(agree, accepts.cpu().numpy(), first, depth, tree.depth)


@torch.inference_mode()
def read_text(target: CausalLM, model: DraftModel, token_ids: Tensor) -> TextRollout:
    """Run `model` over a text, int64 [T], with the target's features if it takes any."""
    features = None
    if model.feature_layers:
        spans = Spans.whole(token_ids.shape[0], token_ids.device)
        features = target_states(target, token_ids, spans, model.feature_layers)[0].to(model.dtype)
    return TextRollout(model, token_ids, features)


@torch.inference_mode()
def teacher_forced(draft: TextRollout, ranking: CandidateRanker, depth: int) -> Flags:
    """Return whether the drafter's best token is the text's: bool [depth, T].

    Entry [d, t] is about the guess d + 1 tokens past root t, with features of positions before t and the text's own
    tokens up to t + d. Entries beyond the text's end are False.
    """
    length = draft.token_ids.shape[0]
    found = torch.zeros(depth, length, dtype=torch.bool, device=draft.token_ids.device)
    if draft.features is None:
        # The model only reads tokens, and these are the text's: a guess does not depend on the root.
        hits = _hits(draft, ranking, draft.rows, torch.arange(length, device=found.device))
        for step in range(min(depth, length)):
            found[step, : length - step] = hits[step:]
    else:
        for start in range(1, length - 1, CHUNK_ROOTS):
            roots = torch.arange(start, min(start + CHUNK_ROOTS, length - 1), device=found.device)
            _force(draft, ranking, roots, found)
    flags: Flags = found.cpu().numpy()
    return flags


def _force(draft: TextRollout, ranking: CandidateRanker, roots: Tensor, found: Tensor) -> None:
    branches = NodeRollout(draft, roots)
    features, owners = branches.root_features, torch.arange(roots.shape[0], device=roots.device)
    for step in range(found.shape[0]):
        places = roots + step
        # Beyond the text any token will do: entries there are False.
        tokens = draft.following(places).clamp(min=0)
        rows, features = branches.run(tokens, owners, features, owners)
        found[step, roots] = _hits(draft, ranking, rows, places)


def _hits(draft: TextRollout, ranking: CandidateRanker, rows: Tensor, places: Tensor) -> Tensor:
    """Return whether the best token after each place [N] is the text's."""
    guesses = [ranking.best(logits, places[part] + 1) for part, logits in draft.logits(rows)]
    return (torch.cat(guesses) == draft.following(places + 1)) & ~draft.is_over(rows)


def _check(target: CausalLM, model: DraftModel) -> None:
    config = target.config
    read = [target] if model.feature_layers else []
    for one in (*read, *([model.model] if isinstance(model, StandaloneDraft) else [])):
        if not one.config.has_plain_attention:
            raise ConfigError(
                f"{one.config.architecture} attends with windows, sinks or scores of its own, which is not measured "
                "offline; serve it, and read accept lengths with outrider top or outrider bench"
            )
    if model.hidden_size and model.hidden_size != config.hidden_size:
        raise ConfigError(f"the draft takes features of size {model.hidden_size}, the target's is {config.hidden_size}")


def load_drafter(algorithm: str, folder: Path, target_folder: Path, target: CausalLM) -> DraftModel:
    """Load the draft model as the draft service does, on the target's device and in its dtype.

    Raises ConfigError if it cannot be loaded, or has another tokenizer.
    """
    options = DraftOptions(
        speculative_algorithm=(algorithm,),
        speculative_draft_model_path=str(folder),
        target_model_path=str(target_folder),
    )
    check_tokenizer(folder, target_folder)
    return load_draft_model(options, target.device, target.dtype)


def measure(
    target: CausalLM,
    form: QuestionForm,
    drafter: DraftModel,
    questions: Sequence[Question],
    report: Report,
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    tree: TreeShape,
    num_rows: int = 256,
    seed: int = 0,
    beginning: str = "",
) -> list[Evaluation]:
    """Let the target answer at each temperature, and evaluate the drafter on the answers.

    `beginning` names a `form` in the figures that is not the target's usual chat. Answers end at the position limit of
    target or drafter; questions that leave no room for an answer are left out.

    Raises ConfigError as `evaluate` does, or if no question leaves room for an answer.
    """
    _check(target, drafter)
    longest = min(target.config.max_positions, drafter.max_positions) - max_new_tokens
    kept = [question for question in questions if len(form.ask(question.text)) <= longest]
    if len(kept) < len(questions):
        left_out = count_of(len(questions) - len(kept), "question")
        report.line(f"left out: {left_out} too long for models of {longest + max_new_tokens}")
    if not kept:
        raise ConfigError("no question leaves room for an answer; lower the number of new tokens")
    found = []
    suffix = f", {beginning}" if beginning else ""
    for temperature in temperatures:
        name = f"answers{suffix}, temperature {temperature:g}"
        answers = answer_questions(
            target,
            form,
            kept,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            num_rows=num_rows,
            seed=seed,
            on_progress=partial(report.generated, name, total=0),
        )
        name = f"evaluation{suffix}, temperature {temperature:g}"
        figures = evaluate(target, drafter, answers, tree=tree, on_progress=partial(report.counted, name))
        found.append(replace(figures, beginning=beginning))
    return found
