"""Drafts respect a request's grammar where they can, and draft without it where they cannot."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from draft_fakes import Guesses, RecordingPort, ScriptedDrafter, commit_message, open_message
from tiny_grammar import CHOICE, END, TOKENS, VOCAB, text_of, tiny_vocabulary

from outrider.config.draft import DraftOptions
from outrider.drafting.base import FrontierNode
from outrider.drafting.ngram.drafter import NgramDrafter
from outrider.drafting.requests import Requests, find_tokenizer
from outrider.grammar.spec import Grammar, GrammarKind
from outrider.sampling.params import SamplingParams
from outrider.tree.mirror import TreeMirror

WORDS = [TOKENS.index(word) for word in ("yes", "n", "o", "ab", "b", "a", ",", "Ġ")]
PROMPT = [0, 1]


def every_word(node: FrontierNode) -> Guesses:
    """The same children everywhere, most of which lead nowhere."""
    return dict.fromkeys((*WORDS, END), 0.12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("target")
    tiny_vocabulary(made)
    (made / "config.json").write_text(json.dumps({"eos_token_id": END}))
    return made


class Service:
    """A service with one request."""

    def __init__(self, target: Path | str, grammar: Grammar | None = CHOICE) -> None:
        options = DraftOptions(
            target_model_path=str(target),
            min_path_probability=0.0,
            speculative_num_steps=3,
            speculative_num_draft_tokens=2000,
        )
        self.requests = Requests(ScriptedDrafter(every_word), options)
        self.peer = RecordingPort(VOCAB)
        self.tokens = list(PROMPT)
        self.mirror = TreeMirror(self.tokens, VOCAB, 4096)
        sampling = SamplingParams(temperature=0.0, grammar=grammar)
        self.requests.handle(self.peer, open_message(self.tokens, credit=1000, sampling=sampling))
        self.requests.grammars._orders.join()

    def commit(self, tokens: list[int]) -> None:
        before = len(self.tokens)
        self.tokens += tokens
        self.mirror.commit()
        self.requests.handle(self.peer, commit_message(before, tokens, mirror=self.mirror, credit=1000))

    def held(self) -> set[str]:
        """Texts of the paths that verify holds below its root, after all has grown."""
        while not self.requests.growth.idle:
            self.requests.growth.grow(math.inf, lambda: False)
        self.requests.send_nodes()
        for grow in self.peer.grows():
            self.mirror.insert(grow)
        mirror, paths = self.mirror, {self.mirror.root: list[int]()}
        for slot in mirror.descend():
            paths[slot] = [*paths[mirror.parents[slot]], mirror.token_ids[slot]]
        texts = {row: text_of(path) + ("." if path and path[-1] == END else "") for row, path in paths.items()}
        return {text for row, text in texts.items() if row != mirror.root}


def test_only_what_the_grammar_allows_is_sent(folder: Path) -> None:
    held = Service(folder).held()
    assert held == {"yes", "yes.", "yes,", "yes, ", "n", "no", "no.", "ab", "abb", "abba", "a"}


def test_the_end_of_a_model_that_is_part_of_a_larger_one_is_known(folder: Path, tmp_path: Path) -> None:
    tiny_vocabulary(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": END}}))
    assert Service(tmp_path).held() == Service(folder).held()


def test_nothing_is_sent_behind_an_end(folder: Path) -> None:
    service = Service(folder)
    service.held()
    mirror = service.mirror
    ends = [slot for slot in mirror.descend() if mirror.token_ids[slot] == END]
    assert ends and not any(mirror.below[slot] for slot in ends)


def test_the_grammar_follows_commits_hits_and_misses(folder: Path) -> None:
    service = Service(folder)
    service.held()
    service.commit([TOKENS.index("ab"), TOKENS.index("b")])
    assert service.held() == {"a", "a."}
    service = Service(folder)
    service.held()
    service.commit([TOKENS.index("y")])  # nobody guessed it; "yes" is written out
    assert service.held() == {"e", "es", "es.", "es,"}


def test_a_token_without_an_alternative_is_sent_though_no_drafter_guessed_it(folder: Path) -> None:
    service = Service(folder)
    service.held()
    service.commit([TOKENS.index("yes"), TOKENS.index(",")])
    assert service.held() == {" ", " y", " ye"}
    assert {service.mirror.scores[slot] for slot in service.mirror.descend()} == {0.0}


@pytest.mark.parametrize("grammar", [Grammar(GrammarKind.REGEX, "(a"), Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}')])
def test_a_grammar_that_does_not_compile_is_left_out_of_account(folder: Path, grammar: Grammar) -> None:
    assert Service(folder, grammar).held() == Service(folder, None).held()


def test_without_the_targets_tokenizer_all_is_sent(folder: Path, tmp_path: Path) -> None:
    assert Service(tmp_path).held() == Service("").held() == Service(folder, None).held()
    assert len(Service(folder, None).held()) > 500


def test_a_tokenizer_counts_only_if_it_is_the_targets(folder: Path) -> None:
    options = DraftOptions(target_model_path=str(folder))
    assert find_tokenizer(options, "") == folder
    assert find_tokenizer(options, "0" * 64) is None
    assert find_tokenizer(DraftOptions(target_model_path="smollm2"), "0" * 64) is None


def test_a_tokenizer_of_the_hub_counts_where_it_is_here(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    for commit, reference in (("1" * 40, "main"), ("2" * 40, "v2")):
        repository = tmp_path / "hub" / "models--owner--name"
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / reference).write_text(commit)
        (snapshot / "config.json").write_text("{}")
        if reference == "v2":
            (snapshot / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert find_tokenizer(DraftOptions(target_model_path="owner/name@v2"), "") == snapshot
    draft = DraftOptions(speculative_draft_model_path="owner/name", speculative_draft_model_revision="v2")
    assert find_tokenizer(draft, "") == snapshot
    for name in ("owner/name", "owner/other"):
        assert find_tokenizer(DraftOptions(target_model_path=name), "") is None


def test_n_grams_of_the_prompt_are_kept_back_where_they_do_not_fit(folder: Path) -> None:
    ab, x, y = (TOKENS.index(text) for text in ("ab", "x", "y"))
    options = DraftOptions(target_model_path=str(folder), min_path_probability=0.0)
    prompt = [y, ab, x, ab, x, ab, x, END, y]
    sent: dict[bool, set[int]] = {}
    for bound in (False, True):
        requests, peer = Requests(NgramDrafter(options), options), RecordingPort(VOCAB)
        grammar = Grammar(GrammarKind.REGEX, "(ab|q){3}") if bound else None
        sampling = SamplingParams(temperature=0.0, grammar=grammar)
        requests.handle(peer, open_message(prompt, sampling=sampling))
        requests.grammars._orders.join()
        requests.growth.work(math.inf)
        while not requests.growth.idle:
            requests.growth.grow(math.inf, lambda: False)
        requests.send_nodes()
        sent[bound] = {int(token) for grow in peer.grows() for token in grow.token_ids}
    assert {ab, x} <= sent[False]
    assert sent[True] == {ab}
