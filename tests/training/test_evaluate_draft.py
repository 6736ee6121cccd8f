from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from drafters import KINDS, loaded_drafter, train_drafter
from naive_draft import NaiveDraft
from training_world import states

from kernels.sampling import gumbel as device_gumbel
from outrider.cli.main import main
from outrider.errors import ConfigError
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.heads import StandaloneDraft
from outrider.sampling.noise import gumbel
from outrider.sampling.params import SamplingParams
from outrider_tools.training.evaluate import evaluate
from outrider_tools.training.figures import AnswerCounts, ReplayedRounds, figures_of, loops, replay
from outrider_tools.training.generate import Answers, answer_questions
from outrider_tools.training.options import TreeShape
from outrider_tools.training.prompts import ChatForm, Question
from outrider_tools.training.rollout import CandidateRanker, TextRollout, noise_keys, tree_accepts
from outrider_tools.training.target import TargetModel
from outrider_tools.training.texts import Texts

SHAPE = TreeShape(nodes=7, depth=3, branching=3)
DEPTH = 3
QUESTIONS = [Question("abcabc", "letters"), Question("x", "letters"), Question("1 + 2 = ", "numbers")]


@pytest.fixture(scope="module")
def answers(target: TargetModel) -> dict[float, Answers]:
    form = ChatForm(target.folder)
    return {
        temperature: answer_questions(
            target.model, form, QUESTIONS, temperature=temperature, max_new_tokens=9, num_rows=2, seed=11
        )
        for temperature in (0.0, 1.0)
    }


@pytest.fixture(scope="module")
def drafters(
    target: TargetModel, answers: dict[float, Answers], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, DraftModel]:
    found = {}
    for kind in KINDS:
        # On the very texts, so that some guesses are right at every depth and temperature.
        texts = Texts.concat([answers[0.0].texts, answers[1.0].texts])
        learner = train_drafter(target, texts, kind, 12)
        found[kind] = loaded_drafter(target, learner, kind, tmp_path_factory.mktemp(kind))
    return found


@pytest.mark.parametrize(("kind", "temperature"), [(kind, number % 2) for number, kind in enumerate(KINDS)])
def test_figures_equal_those_of_drafting_node_by_node(
    target: TargetModel, drafters: dict[str, DraftModel], answers: dict[float, Answers], kind: str, temperature: float
) -> None:
    model, given = drafters[kind], answers[temperature]
    result = evaluate(target.model, model, given, depth=DEPTH, tree=SHAPE)
    hits, possible, rounds, tokens = [0] * DEPTH, [0] * DEPTH, {"chain": 0, "tree": 0}, 0
    reached = {"chain": [0] * SHAPE.depth, "tree": [0] * SHAPE.depth}
    for number in range(len(given.texts)):
        ids, first = given.texts.sequence(number).tolist(), int(given.texts.prompt_lens[number])
        features = None
        if model.feature_layers:
            features = states(target, torch.tensor(ids), model.feature_layers)[0]
        params = SamplingParams(temperature=temperature, seed=given.seeds[number])
        naive = NaiveDraft(model, ids, features, params)
        forced = {
            root: naive.forced(root, max(DEPTH, SHAPE.depth)) for root in range(max(1, first - SHAPE.depth), len(ids))
        }
        for root, flags in forced.items():
            for step in range(DEPTH):
                if first <= root + step + 1 < len(ids):
                    hits[step] += flags[step]
                    possible[step] += 1
        for kind_of_round in ("chain", "tree"):
            root = first - 1
            while root < len(ids) - 1:
                if kind_of_round == "tree":
                    accepted = naive.tree(root, SHAPE)
                else:
                    accepted = int(np.cumprod(forced[root][: SHAPE.depth]).sum())
                for depth in range(accepted):
                    reached[kind_of_round][depth] += 1
                rounds[kind_of_round] += 1
                root += accepted + 1
        tokens += len(ids) - first
    found = result.all
    assert (found.answers, found.tokens) == (len(given.texts), tokens)
    assert found.rates == pytest.approx([hit / count for hit, count in zip(hits, possible, strict=True)])
    for name, figures in (("chain", found.chain), ("tree", found.tree)):
        assert figures.rounds == rounds[name]
        assert figures.accept_length == pytest.approx(tokens / rounds[name])
        assert figures.reached == pytest.approx([count / rounds[name] for count in reached[name]])
    assert found.rates[0] > 0 and found.tree.accept_length > 1
    assert sum(part.tokens for part in result.categories.values()) == tokens
    assert result.categories["letters"].answers == 2


@torch.inference_mode()
def test_trees_of_all_roots_at_once_equal_those_of_one_root_at_a_time(
    target: TargetModel, drafters: dict[str, DraftModel], answers: dict[float, Answers]
) -> None:
    model, texts = drafters["EAGLE3"], answers[1.0].texts
    for number in range(len(texts)):
        ids, first = torch.from_numpy(texts.sequence(number)).long(), int(texts.prompt_lens[number]) - 1
        features, _ = states(target, ids, model.feature_layers)
        draft, ranking = TextRollout(model, ids, features), CandidateRanker(model, 1.0, 11 + number, len(ids) + 5)
        whole = tree_accepts(draft, ranking, SHAPE, first)
        visited = tree_accepts(draft, ranking, SHAPE, first, all_roots=False)
        root = first
        while root < len(ids) - 1:
            assert visited[root] == whole[root]
            root += int(whole[root]) + 1


def test_the_target_as_its_own_drafter_is_always_right(target: TargetModel, answers: dict[float, Answers]) -> None:
    for given in answers.values():
        result = evaluate(target.model, StandaloneDraft(target.model, ""), given, tree=SHAPE)
        assert result.all.rates == [1.0] * 10
        lengths = given.texts.lengths - given.texts.prompt_lens
        assert result.all.chain.rounds == sum(-(-int(length) // (SHAPE.depth + 1)) for length in lengths)


def test_sampled_answers_are_drawn_with_the_shared_noise(target: TargetModel, answers: dict[float, Answers]) -> None:
    given = answers[1.0]
    for number, seed in enumerate((11, 12, 13)):
        assert given.seeds[number] == seed
        ids, first = given.texts.sequence(number), int(given.texts.prompt_lens[number])
        _, hidden = states(target, torch.from_numpy(ids.astype(np.int64)))
        logits = target.model.logits(hidden).numpy()
        for place in range(first, len(ids)):
            noise = gumbel(seed, 0, place, vocab_size=target.config.vocab_size)
            assert int((logits[place - 1] + noise).argmax()) == ids[place]


def test_keys_for_the_device_name_the_noise_of_the_seed() -> None:
    seeds, places = [3, 2**40 + 7], torch.tensor([5, 900], dtype=torch.int32)
    found = device_gumbel(noise_keys(seeds), places, 50)
    for row, (seed, place) in enumerate(zip(seeds, places.tolist(), strict=True)):
        np.testing.assert_array_equal(found[row].numpy(), gumbel(seed, 0, place, vocab_size=50))


def test_loops_are_told_from_long_answers() -> None:
    random = np.random.default_rng(0).integers(0, 1000, 200).tolist()
    for period in (1, 7, 32):
        turn = random[:period]
        assert loops(random + (turn * 64)[:64])
        assert not loops((turn * 64)[:63])
        assert not loops([*(turn * 64)[:63], 1001])
    assert not loops(random[:33] * 4)
    assert not loops(random)


def test_answers_in_loops_are_reported_apart(target: TargetModel, drafters: dict[str, DraftModel]) -> None:
    random = np.random.default_rng(1).integers(3, 259, 80).tolist()
    texts = Texts.join([[5, 6, 7]] * 2, [random, [9, 10] * 40])
    result = evaluate(target.model, drafters["EAGLE"], Answers(texts, 0.0, [0, 0], ["", ""]), depth=2, tree=SHAPE)
    assert result.loops is not None and result.without_loops is not None
    assert (result.loops.answers, result.without_loops.answers, result.all.answers) == (1, 1, 2)
    assert result.all.tree.rounds == result.loops.tree.rounds + result.without_loops.tree.rounds
    assert result.categories == {}
    only = evaluate(target.model, drafters["EAGLE"], Answers(Texts.join([[5]], [random]), 0.0, [0], [""]), tree=SHAPE)
    assert only.loops is None and only.without_loops == only.all


def test_rounds_follow_from_what_is_accepted() -> None:
    # Roots 2, 5 and 6; the last round is cut by the answer's end.
    assert replay(np.array([0, 0, 2, 3, 3, 0, 1, 0]), 3) == [2, 0, 1]
    agree = np.ones((2, 6), np.bool_)
    agree[0, 5:] = agree[1, 4:] = False
    counts = AnswerCounts.of(agree, np.array([0, 0, 1, 0, 0, 0]), 3, 2, 2)
    assert counts.possible == [3, 3] and counts.tree == [1, 0]
    figures = figures_of([counts, counts], 2)
    assert figures.rates == [1.0, 1.0] and (figures.answers, figures.tokens) == (2, 6)
    assert figures.tree == ReplayedRounds(1.5, 4, [0.5, 0.0])


def test_a_drafter_of_another_size_is_refused(target: TargetModel, drafters: dict[str, DraftModel]) -> None:
    model = drafters["EAGLE"]
    given = Answers(Texts.join([[5]], [[6, 7]]), 0.0, [0], [""])
    model.hidden_size += 1
    try:
        with pytest.raises(ConfigError, match="takes features of size 65, the target's is 64"):
            evaluate(target.model, model, given)
    finally:
        model.hidden_size -= 1


def test_the_command_tells_the_kind_by_itself_and_writes_everything(
    target: TargetModel, answers: dict[float, Answers], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = train_drafter(target, answers[0.0].texts, "NEXTN", 2)
    loaded_drafter(target, learner, "NEXTN", tmp_path / "head")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": q.text, "category": q.category}) + "\n" for q in QUESTIONS))
    words = ["evaluate-draft", "--model", str(target.folder), "--draft", str(tmp_path / "head"), "--device", "cpu"]
    words += ["--prompts", str(prompts), "--limit", "2", "--max-new-tokens", "8", "--nodes", "5", "--depth", "3"]
    assert main([*words, "--temperature", "0", "0.7", "--json", str(tmp_path / "all.json")]) == 0
    output = capsys.readouterr().out
    for words in (
        "chain, tree: tokens",
        "depth 6 / 1: ",
        "accept rate: ",
        "trees that reach it: ",
    ):
        assert words in output, "the tables' words are explained"
    assert "greedy, letters" in output and "t0.7, all" in output
    record = json.loads((tmp_path / "all.json").read_text())
    assert record["algorithm"] == "NEXTN"
    assert [found["temperature"] for found in record["evaluation"]] == [0.0, 0.7]
    assert [found["all"]["answers"] for found in record["evaluation"]] == [2, 2]
    assert len(record["evaluation"][0]["all"]["rates"]) == 10


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x.json", tmp_path):
        assert main(["evaluate-draft", "--draft", "none", "--prompts", "none", "--json", str(path)]) == 2
        assert f"--json: {path} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--model", "--draft", "--prompts"])
def test_what_cannot_be_read_is_named(
    option: str, target: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}')
    given = {"--model": str(target.folder), "--draft": str(target.folder), "--prompts": str(prompts)}
    given[option] = str(tmp_path / "none")
    words = [word for pair in given.items() for word in pair]
    assert main(["evaluate-draft", *words]) == 2
    assert f"{option}: " in capsys.readouterr().err


def test_other_beginnings_stand_in_the_same_table(
    target: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "abc"}) + "\n")
    words = ["evaluate-draft", "--model", str(target.folder), "--draft", str(target.folder), "--device", "cpu"]
    words += ["--prompts", str(prompts), "--max-new-tokens", "8", "--nodes", "4", "--depth", "3", "--temperature", "0"]
    words += ["--system", "Be brief.", "--system", "", "--raw", "--json", str(tmp_path / "all.json")]
    assert main(words) == 0
    names = ["", "system 'Be brief.'", "no system message", "raw"]
    table = capsys.readouterr().out.split("depth  ")[0]
    assert [f"greedy, {name}, all" in table for name in names[1:]] == [True] * 3
    evaluation = json.loads((tmp_path / "all.json").read_text())["evaluation"]
    assert [found["beginning"] for found in evaluation] == names
    # The target is its own drafter, so every token is there whatever stands in front.
    assert [found["all"]["rates"][0] for found in evaluation] == [1.0] * 4


def test_questions_that_leave_no_room_are_left_out(
    target: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "abc " * 200}) + "\n")
    words = ["evaluate-draft", "--model", str(target.folder), "--draft", str(target.folder), "--device", "cpu"]
    assert main([*words, "--prompts", str(prompts), "--temperature", "0"]) == 2
    assert "no question leaves room for an answer" in capsys.readouterr().err


def test_a_draft_of_another_kind_is_refused_in_the_words_of_the_command(
    target: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.jsonl").write_text('{"prompt": "x"}')
    words = [f"--model={target.folder}", f"--draft={target.folder}", f"--prompts={tmp_path}/one.jsonl"]
    assert main(["evaluate-draft", "--algorithm=EAGLE3", "--device=cpu", *words]) == 2
    stderr = capsys.readouterr().err
    assert "error: --algorithm EAGLE3: " in stderr and "give --algorithm STANDALONE, or another --draft\n" in stderr
