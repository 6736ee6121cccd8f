"""What the benchmark of the split makes of its command line and of metrics pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from benchmarks.common import Cost
from benchmarks.serving.soak import IdleState, judge
from benchmarks.split.cases import SplitCase
from benchmarks.split.figures import Measured, compare, table, work_out
from benchmarks.split.load import CaseAnswers, prompts_for, read_prompts, request
from outrider.errors import ConfigError
from outrider.metrics import Histogram, MetricsPage


def test_a_case_says_drafters_mode_load_and_options() -> None:
    case = SplitCase.parse("eagle3@random+ngram,lockstep,steps=4,topk=2,b=16,t=0.8")
    assert case.outside == ["eagle3@random", "ngram"] and case.verify_arguments({}) == ["--lockstep"]
    assert case.title("m", "bf16") == "m eagle3@random+ngram lockstep steps=4 topk=2 b16 bf16 t0.8"
    options = case.draft_options({"random": Path("/heads/r")}, ["--device=cpu"])
    assert options.speculative_algorithm == ("EAGLE3", "NGRAM") and options.lockstep
    assert options.speculative_draft_model_path == "/heads/r" and options.speculative_num_steps == 4
    assert options.speculative_eagle_topk == 2 and options.device == "cpu"
    inside = SplitCase.parse("eagle3,colocated,lockstep,steps=5,max_draft_tokens=31,b=64,ctx=1024,out=32,n=128")
    assert inside.title("m", "bf16") == (
        "m eagle3 colocated lockstep steps=5 max_draft_tokens=31 b64 ctx1k out32 n128 bf16 greedy"
    )
    argv = inside.verify_arguments({"eagle3": Path("/heads/e")})
    assert {"--lockstep", "--max-draft-tokens=31", "--speculative-num-steps=5"} <= set(argv)
    both = SplitCase.parse("eagle3+standalone@small+ngram,colocated")
    paths = {"eagle3": Path("/heads/e"), "small": Path("/models/s")}
    assert both.verify_arguments(paths) == [
        "--speculative-algorithm=EAGLE3",
        "--speculative-draft-model-path=/heads/e",
    ]
    assert both.draft_options(paths, []).speculative_algorithm == ("STANDALONE", "NGRAM")
    assert not inside.has_service
    inside_alone = SplitCase.parse("eagle3,colocated")
    both = SplitCase.parse("eagle3+ngram,colocated,json")
    assert both.title("m", "bf16") == "m eagle3+ngram colocated b1 json bf16 greedy" and both.has_service
    assert both.draft_options({}, ["--device=cpu"]).speculative_algorithm == ("NGRAM",)
    assert request("x", 1, 8, both).grammar.json_schema and not request("x", 1, 8, both).ignore_eos
    assert both.target == SplitCase.parse("eagle3+standalone@small,colocated,b=16").target == inside_alone.target
    assert len({both.target, inside.target, SplitCase.parse("standalone,colocated").target}) == 3
    plain = SplitCase.parse("plain")
    assert plain.target == SplitCase.parse("standalone,steps=4").target
    assert not plain.drafts and not plain.has_service and plain.title("m", "fp32") == "m plain b1 fp32 greedy"


def test_a_case_without_its_model_or_with_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="--draft standalone=PATH"):
        SplitCase.parse("standalone").draft_options({}, [])
    with pytest.raises(ConfigError, match="no-such-option"):
        SplitCase.parse("ngram,no_such_option=1").draft_options({}, [])
    with pytest.raises(ConfigError, match="fast"):
        SplitCase.parse("ngram,fast")


def test_prompts_are_of_the_length_that_a_case_asks_for() -> None:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate("abcdefgh")}))
    words.pre_tokenizer = Whitespace()
    questions = ["a b c", "d", "e f", "g h"]
    prompts = prompts_for(SplitCase.parse("plain,b=3,ctx=7"), questions, 1, words)
    assert [len(prompt.split()) for prompt in prompts] == [7] * 6 and len(set(prompts)) == 6
    assert prompts[0] == "a b c d e f g"
    assert prompts_for(SplitCase.parse("plain,n=5"), questions, 1, words) == [*questions, questions[0]]


def test_a_quantile_lies_within_its_bucket() -> None:
    histogram = Histogram(10.0, 10.0, {1.0: 4.0, 2.0: 8.0, 4.0: 10.0, float("inf"): 10.0})
    assert histogram.mean == 1.0
    assert histogram.quantile(0.5) == 1.25 and histogram.quantile(0.9) == 3.0
    assert Histogram(0.0, 0.0, {}).quantile(0.5) == 0.0


def run(text: str, texts: list[list[int]], seconds: float, rounds: int, **counters: float) -> Measured:
    """A case with these answers and counters of verify."""
    page = MetricsPage({f"outrider_verify_{name}": value for name, value in counters.items()})
    case = SplitCase.parse(text)
    measured = Measured(case, case.title("m", "bf16"), CaseAnswers(texts, seconds, rounds), page)
    work_out(measured)
    return measured


def test_cases_are_set_beside_plain_and_lockstep_of_the_same_load() -> None:
    texts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    runs = [
        run("plain", texts, 8.0, 8),
        run("plain,t=0.8", texts, 1.0, 8),
        run("standalone", [texts[0], [5, 6, 9, 8]], 2.0, 4, drafted_rounds=4, hit_rounds=3),
        run("standalone,lockstep,steps=8", texts, 4.0, 2),
        run("standalone,lockstep,steps=2", texts, 3.2, 3),
        run("ngram", texts, 8.0, 8),
    ]
    compare(runs)
    split = runs[2]
    assert split.get("tokens_per_second") == 4.0 and split.get("speedup_over_plain") == 4.0
    assert split.get("hit_rate") == 0.75 and split.get("accept_length") == 2.0
    assert split.get("speedup_over_lockstep") == pytest.approx(1.6), "the fastest lockstep setting"
    assert split.get("accept_over_lockstep") == 0.5, "the deepest lockstep tree"
    assert split.get("equal_texts") == 1 and split.get("texts") == 2 and split.get("tokens_until_texts_part") == 2
    assert "speedup_over_lockstep" not in runs[5].figures and "speedup_over_plain" not in runs[1].figures
    assert len(table(runs).splitlines()) == 7


def test_phases_of_answers_are_told_apart() -> None:
    page = "# TYPE outrider_draft_answer_seconds histogram\n"
    for phase, seconds in (("features", 0.001), ("send", 0.003)):
        for bound, count in (("0.002", 2 * (seconds < 0.002)), ("+Inf", 2)):
            page += f'outrider_draft_answer_seconds_bucket{{le="{bound}",phase="{phase}"}} {count}\n'
        page += f'outrider_draft_answer_seconds_sum{{phase="{phase}"}} {2 * seconds}\n'
        page += f'outrider_draft_answer_seconds_count{{phase="{phase}"}} 2\n'
    case = SplitCase.parse("dspark")
    measured = Measured(case, "", CaseAnswers([[1]], 1.0, 1), MetricsPage(), MetricsPage.parse(page))
    work_out(measured)
    assert measured.get("draft_answer_features_ms") == 1.0 and measured.get("draft_answer_send_ms") == 3.0
    assert not any("launch" in name or "seconds" in name for name in measured.figures if "answer" in name)


def test_a_soak_fails_for_what_is_left_and_for_memory_that_grows() -> None:
    def rest(resident: float, pages: float = 0.0) -> IdleState:
        return IdleState({"outrider_verify_kv_pages_used": pages}, {"verify": Cost(1.0, resident, 100.0)})

    # Code, pools, caches and tries fill in two spells.
    assert judge([rest(100), rest(300), rest(400), rest(420)], 10.0) == []
    assert judge([rest(100), rest(300), rest(400), rest(431)], 10.0) == ["verify: resident_mib grew from 400 to 431"]
    assert judge([rest(100), rest(100, 3.0)], 10.0) == ["after spell 1: outrider_verify_kv_pages_used is 3, not 0"]


def test_prompts_are_first_turns(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n\n{"prompt": "c"}\n')
    assert read_prompts(path) == ["a", "c"]
