"""How far a draft model's logits are to be taken at temperature 0: the log-loss of its edge scores by their factor.

    python benchmarks/edge_scale.py --draft /models/noisy-0.10 --prompts questions.jsonl --out result.json

The target answers the prompts greedily; the draft model then reads prompts and answers, and the mean of -log
softmax(factor * logit)[next token of the answer] is taken over all tokens of answers. What the head's vocabulary lacks
does not count. `first_promised` is the mean score of the best candidate as a chance, `first_right` how often it is the
answer's token: where edges are chances, both are the same.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from report import Row, cpu_name, write_report
from torch import Tensor

from outrider.models.decoder import CausalLM
from outrider.models.drafters.base import DraftModel
from outrider.models.loader import load_model
from outrider.models.store import resolve_model
from outrider_tools.training.answers import Answers, answer_questions
from outrider_tools.training.evaluate import read_text
from outrider_tools.training.evaluation_stage import load_drafter
from outrider_tools.training.prompts import ChatForm, read_questions
from outrider_tools.training.rollout import TextDraft

FACTORS = (0.8, 1.0, 1.1, 1.2, 1.25, 1.3, 1.4, 1.5, 1.7, 2.0)


def draft_places(draft: TextDraft, wanted: Tensor) -> Tensor:
    """Places of the target's tokens in the draft's vocabulary, -1 for those that it lacks."""
    ids = draft.model.target_ids
    if ids is None:
        return wanted
    places = torch.full((int(max(ids.max(), wanted.max())) + 1,), -1, device=wanted.device)
    legal = ids >= 0
    places[ids[legal].long()] = torch.arange(len(ids), device=wanted.device)[legal]
    return places[wanted]


@torch.inference_mode()
def count(target: CausalLM, model: DraftModel, answers: Answers, factors: Sequence[float]) -> Counter[str]:
    """Sums over the tokens of all answers."""
    sums: Counter[str] = Counter()
    for number in range(len(answers.categories)):
        token_ids = torch.from_numpy(answers.texts.sequence(number)).long().to(target.device)
        draft = read_text(target, model, token_ids)
        first = int(answers.texts.prompt_lens[number])
        # Row b is of position b: what it says is the token after b, or for a head after b + 1.
        rows = draft.rows[first - 1 - draft.offset : len(token_ids) - 1 - draft.offset]
        places = draft_places(draft, token_ids[first:])
        for part, logits in draft.logits(rows):
            known = places[part] >= 0
            add(sums, logits[known].float(), places[part][known], factors)
    return sums


def add(sums: Counter[str], logits: Tensor, wanted: Tensor, factors: Sequence[float]) -> None:
    """Count places with `logits` [N, V] and the answers' tokens `wanted` [N]."""
    sums["tokens"] += len(wanted)
    sums["right"] += int((logits.argmax(1) == wanted).sum())
    for factor in factors:
        edges = (logits * factor).log_softmax(1)
        sums[f"loss {factor:g}"] -= float(edges.gather(1, wanted[:, None]).sum())
        sums[f"promised {factor:g}"] += float(edges.max(1).values.exp().sum())


def main() -> None:
    """Parse options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--algorithm", default="STANDALONE", help="STANDALONE, EAGLE3, EAGLE or NEXTN")
    parser.add_argument("--draft", type=Path, required=True, help="folder of the draft model")
    parser.add_argument("--prompts", type=Path, required=True, help="questions, a JSON object a line")
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    told = parser.parse_args()
    folder = resolve_model(told.model)
    target = load_model(folder, torch.float32, torch.device("cpu"))
    model = load_drafter(told.algorithm, told.draft, folder, target)
    questions = read_questions(told.prompts)[: told.limit]
    answers = answer_questions(
        target, ChatForm(folder), questions, temperature=0.0, max_new_tokens=told.max_tokens, num_rows=16
    )
    sums = count(target, model, answers, told.factors)
    tokens = sums["tokens"]
    case = f"{folder.name.lower()} {told.algorithm.lower()} {told.draft.name.lower()} fp32 greedy"
    rows = [Row(case, "tokens", tokens, ""), Row(case, "first_right", sums["right"] / tokens, "ratio")]
    for factor in told.factors:
        rows.append(Row(f"{case} factor {factor:g}", "log_loss", sums[f"loss {factor:g}"] / tokens, "nats"))
        rows.append(Row(f"{case} factor {factor:g}", "first_promised", sums[f"promised {factor:g}"] / tokens, "ratio"))
    for row in rows:
        print(f"{row.case:70} {row.metric:16} {row.value:.4f}")
    if told.out:
        write_report(told.out, "edge_scale", cpu_name(), rows, ("torch",))


if __name__ == "__main__":
    main()
