"""Texts that begin otherwise than the chat template lets them, and those that a head reads in two parts."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from drafters import OPTIONS, train_drafter
from training_world import make_head, random_texts, states

from outrider.models.loader import load_decoder
from outrider_tools.training.attention import Spans
from outrider_tools.training.corpus import Corpus, StoredTexts, run_texts
from outrider_tools.training.figures import Report
from outrider_tools.training.learner import DraftInput
from outrider_tools.training.options import CorpusOptions, RunOptions
from outrider_tools.training.parallel import RankGroup
from outrider_tools.training.prompts import SYSTEM_MESSAGES, Beginnings, ChatForm, Question, endings
from outrider_tools.training.target import TargetModel
from outrider_tools.training.texts import Batches, Texts

QUESTION = "What is a fish?"


@pytest.fixture(scope="module")
def chat(tiny_folder: Path) -> ChatForm:
    return ChatForm(tiny_folder)


def test_a_share_of_the_prompts_begins_otherwise_and_a_seed_says_which(chat: ChatForm) -> None:
    first, again, other = (Beginnings(chat, 0.5, ["Invented."], seed) for seed in (3, 3, 4))
    prompts = [first.prompt(QUESTION) for _ in range(800)]
    assert prompts[:100] == [again.prompt(QUESTION) for _ in range(100)]
    assert prompts[:100] != [other.prompt(QUESTION) for _ in range(100)]
    usual = chat.ask(QUESTION)
    raw = chat.words("What is")
    system = [chat.with_system(message).ask(QUESTION) for message in (*SYSTEM_MESSAGES, "Invented.")]
    # The tiny template puts no system message of its own, so a chat without one is the usual chat.
    assert prompts.count(usual) == pytest.approx(800 * (0.5 + 0.125), abs=60)
    assert sum(prompt[: len(raw)] == raw for prompt in prompts) == pytest.approx(100, abs=40)
    assert all(message in prompts for message in system)
    assert prompts.count(system[-1]) == pytest.approx(100, abs=40)
    assert max(map(len, prompts)) <= len(chat.words(QUESTION)) + first.room
    counts = first.counts(Texts.join(prompts, [[7]] * len(prompts)))
    assert counts == {
        "chat template": prompts.count(usual),
        "system message": sum(map(prompts.count, system)),
        "no chat": sum(prompt[: len(raw)] == raw for prompt in prompts),
    }
    assert Beginnings(chat, 0.0).prompt(QUESTION) == usual


def test_a_question_is_found_behind_any_beginning(chat: ChatForm) -> None:
    beginnings = Beginnings(chat, 1.0)
    asked = [beginnings.prompt(QUESTION) for _ in range(40)]
    others = [beginnings.prompt("What was a fish?") for _ in range(40)]
    texts = Texts.join([*asked, *others], [[7, 8]] * 80)
    for question in (QUESTION, chat.words(QUESTION)):
        kept = texts.without(endings(chat, question))
        assert [kept.sequence(number).tolist() for number in range(len(kept))] == [[*other, 7, 8] for other in others]


def test_a_question_without_words_that_is_held_out_leaves_the_text_as_it_is(
    target: TargetModel, chat: ChatForm, tmp_path: Path
) -> None:
    texts = Texts.join([chat.ask(QUESTION)], [[7, 8]])
    StoredTexts(texts, [[1, 0, 1], chat.words("Who?")]).save(tmp_path)
    kept, asked, _ = run_texts(target, chat, RunOptions(text=tmp_path), tmp_path, Report(StringIO()), RankGroup())
    assert len(kept) == 1 and asked == [Question("Who?")]


def test_the_record_says_what_texts_begin_with(target: TargetModel, chat: ChatForm, tmp_path: Path) -> None:
    options = CorpusOptions(
        tokens=2000,
        invented=24,
        question_tokens=30,
        answer_tokens=20,
        held_out=2,
        num_rows=24,
        question_temperature=3.0,
        beginnings=1.0,
    )
    output = StringIO()

    def make(beginnings: float) -> tuple[Texts, dict[str, int]]:
        folder = tmp_path / str(beginnings)
        folder.mkdir(exist_ok=True)
        corpus = Corpus(target.model, chat, replace(options, beginnings=beginnings), folder, Report(output))
        found = corpus.texts([Question(f"What is {number}?") for number in range(40)])
        return found.texts, found.beginnings

    texts, counts = make(1.0)
    assert "system messages: inventing" in output.getvalue()
    prompts = [texts.sequence(number)[: texts.prompt_lens[number]].tolist() for number in range(len(texts))]
    assert sum(counts.values()) == len(texts) and min(counts.values()) > 0 and len(counts) == 3
    record = json.loads((tmp_path / "1.0" / "texts.json").read_text())
    assert record["beginnings"] == counts and record["options"]["beginnings"] == 1.0
    own = [chat.with_system(message).before for message in SYSTEM_MESSAGES]
    assert any(prompt[: len(before)] == before for prompt in prompts for before in own)
    assert make(1.0)[1] == counts
    usual, counts = make(0.0)
    assert counts == {"chat template": len(usual)}


def test_some_texts_are_cut_for_the_head_at_places_that_a_seed_decides(target: TargetModel) -> None:
    texts = random_texts(target, 60, 6, 40)
    for fixed_shape in (False, True):
        packing = Batches(texts, 512, 4, fixed_shape, cuts=0.5)
        shapes, cut, count = set(), 0, 0
        for group in packing.groups(3):
            batch = packing.batch(group, 1)
            shapes.add(batch.parts.shape)
            assert set(batch.bounds) <= set(batch.parts) and (np.diff(batch.parts) >= 0).all()
            np.testing.assert_array_equal(batch.parts, packing.batch(group, 1).parts)
            assert batch.parts.tolist() != packing.batch(group, 2).parts.tolist()
            cut += len(set(batch.parts) - set(batch.bounds))
            count += len(group)
        assert cut == pytest.approx(count / 2, abs=12)
        assert not fixed_shape or len(shapes) == 1
    whole = Batches(texts, 512, 4).batch(np.arange(5), 1)
    assert whole.parts.tolist() == whole.bounds.tolist()


def test_behind_a_cut_a_head_runs_as_if_nothing_stood_before(target: TargetModel) -> None:
    ids, cut, steps = torch.randint(3, 259, (24,), generator=torch.Generator().manual_seed(2)), 9, 3
    head = make_head(target)
    features, _ = states(target, ids, head.feature_layers)

    def run(start: int, bounds: list[int]) -> list[torch.Tensor]:
        spans = Spans.of(torch.tensor(bounds, dtype=torch.int32), 24 - start, 24)
        given = DraftInput(ids[start:], target.embed(ids[start:]), features[start:], spans)
        return list(head.runner(target.rotary, lambda piece: piece)(given, steps))

    whole, parted, alone = run(0, [0, 24]), run(0, [0, cut, 24]), run(cut, [0, 24 - cut])
    for step in range(steps):
        torch.testing.assert_close(parted[step][cut:], alone[step])
        # The first part's last bases go on with the tokens behind the cut.
        torch.testing.assert_close(parted[step][:cut], whole[step][:cut])
        assert (parted[step][cut:] - whole[step][cut:]).abs().max() > 1e-2


def test_heads_learn_from_parts_and_language_models_from_whole_texts(target: TargetModel) -> None:
    texts = random_texts(target, 6, 6, 40)
    batch = Batches(texts, 512, OPTIONS.trainer.unroll + 1, cuts=1.0).batch(np.arange(6))
    for kind, same in (("EAGLE3", False), ("STANDALONE", True)):
        learner = train_drafter(target, texts, kind, 1)
        cut, whole = (learner.losses(given)[0] for given in (batch, replace(batch, parts=batch.bounds)))
        assert torch.equal(cut, whole) == same


def test_text_is_no_longer_than_the_target_has_positions(tiny_folder: Path, chat: ChatForm, tmp_path: Path) -> None:
    model = load_decoder(tiny_folder, context_length=64)
    options = CorpusOptions(tokens=2000, invented=4, question_temperature=3.0, held_out=0, num_rows=8, beginnings=0.0)
    output = StringIO()
    corpus = Corpus(model, chat, options, tmp_path, Report(output))
    texts = corpus.texts([*(Question(f"{number} " * number) for number in range(1, 9)), Question("x" * 60)]).texts
    assert 50 < texts.lengths.max() <= 64
    assert "left out: 1 prompt of more than 63 tokens" in output.getvalue()
