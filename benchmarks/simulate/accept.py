"""Accept lengths on equal texts: of trees grown inside the round, of lockstep, of n-grams, and of combinations.

A target's greedy text is given. Each drafter is asked in turn, after what it got right, which nodes it has for the next
round. So no other text takes part in the comparison, and the target runs only once. Drafting inside the round is
`RoundDrafter` with the reference versions of its kernels; lockstep and n-grams are the draft service's own growers.
With `--ngram` a round takes the nodes of n-grams, too.

python -m benchmarks.simulate.accept --model SmolLM2-135M-Instruct --draft models/SmolLM2-135M-Instruct-EAGLE3 \
    --prompts mt_bench.jsonl --steps 5 --topk 8 --nodes 31 --out benchmarks/results/accept_eagle3_cpu.json
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.split.load import chat_prompts
from kernels.frontier_state import PARENT, SLOT, TOKEN
from kernels.sampling_state import RoundTokens
from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.paged import PromptChunk
from outrider.attention.torch_backend import TorchAttention
from outrider.attention.triton_backend import TritonAttention
from outrider.config.draft import DraftOptions
from outrider.drafting.base import Needs
from outrider.drafting.model.burst import BurstShape
from outrider.drafting.model.drafter import ModelDrafter
from outrider.drafting.model.round_drafter import MAX_COMMITTED, RoundDrafter, RoundResults, RoundShape
from outrider.drafting.model.runner import RunnerOptions
from outrider.drafting.model.torch_runner import TorchRunner
from outrider.drafting.registry import build_drafter
from outrider.drafting.requests import AnswerPort, Requests
from outrider.models.capacity import ROUND_REGION
from outrider.models.decoder import CausalLM
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.loader import load_draft_model
from outrider.models.loader import load_model
from outrider.models.store import resolve_model
from outrider.protocol.speculation import Commit, DraftMessage, Features, Grow, Open
from outrider.sampling.params import SamplingParams
from outrider.tree.mirror import TreeMirror
from outrider_tools.bench.report import Row, cpu_name, write_report

GREEDY = SamplingParams(temperature=0.0)
PAGE = 16
_CREDIT = 256
_CPU = torch.device("cpu")

Paths = set[tuple[int, ...]]
"""A tree: for each node, the tokens from below the root to the node."""


class WrittenText(NamedTuple):
    """A text that the target wrote."""

    tokens: list[int]
    prompt_len: int
    features: Tensor | None
    """The target's features [tokens, layers * hidden], as the draft model takes them before `project`."""


class Drafting(Protocol):
    """A drafter of one text."""

    def commit(self, count: int) -> Paths:
        """Commit the text's next `count` tokens. Return the tree that the next round would verify."""


class Inside:
    """Drafting inside the round, after rounds that commit the text. Slots are positions."""

    def __init__(self, text: WrittenText, model: DraftModel, steps: int, topk: int, num_nodes: int) -> None:
        pages = -(-(len(text.tokens) + 64) // PAGE)
        shape = BurstShape(
            num_rows=1,
            region=ROUND_REGION,
            branching=topk,
            lone_branching=topk,
            max_seeds=1,
            max_steps=steps,
            max_width=128,
            page_size=PAGE,
            num_pages=pages,
            max_context=pages * PAGE,
            feature_size=model.feature_size,
        )
        self._text, self._growth, self._committed = text, (steps, num_nodes), text.prompt_len
        self._given = None if text.features is None else model.project(text.features)
        features = None if text.features is None else self.rows
        options = {"max_round_tokens": 64, "vocab_limit": model.target_vocab_size, "floor": -12.0}
        self._drafter = RoundDrafter(model, shape, TritonAttention(), self, features, **options)  # type: ignore[arg-type]
        self._shape = RoundShape(MAX_COMMITTED, 1)
        self._drafter.admit(0, GREEDY)
        self._drafter.memory.plan.page_tables[0, :pages] = torch.arange(pages, dtype=torch.int32)
        slots = np.arange(text.prompt_len - self._drafter.lag, dtype=np.int32)
        prompt = PromptChunk(0, text.tokens[self._drafter.lag : text.prompt_len], 0, slots)
        self._drafter.compute_context([prompt], slots.tolist())

    def rows(self, slots: Tensor) -> Tensor:
        """See FeatureRows."""
        assert self._given is not None
        return self._given.index_select(0, slots.clamp(max=len(self._given) - 1))

    def results(self, shape: RoundShape) -> RoundResults:
        """See RoundExecutor."""
        return self._results

    def note_drafted(self) -> None:
        """See RoundExecutor."""

    def commit(self, count: int) -> Paths:
        """See Drafting."""
        new = self._text.tokens[self._committed : self._committed + count]
        zeros, none = torch.zeros(self._shape.tokens, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        positions, committed = zeros.clone(), torch.zeros(1, MAX_COMMITTED, dtype=torch.int32)
        positions[0], committed[0, :count] = self._committed - 1, torch.tensor(new, dtype=torch.int32)
        tokens = RoundTokens(zeros, positions, zeros, zeros, zeros, none, none, none)
        self._results = RoundResults(tokens, torch.full_like(none, count), committed, torch.ones_like(none))
        self._committed += count
        self._drafter.grow(self._shape, *self._growth)
        entries, grown = self._drafter.grown.pool.entries, self._drafter.grown.order.tolist()
        slots: dict[int, tuple[int, ...]] = {-1: ()}
        paths: Paths = set()
        for index in grown[: grown.index(-1) if -1 in grown else None]:
            parent, slot, token = (int(entries[field, index]) for field in (PARENT, SLOT, TOKEN))
            paths.add((*slots[parent], token))
            if slot >= 0:
                slots[slot] = (*slots[parent], token)
        return paths


class LockstepDraft:
    """A draft service with this text as a request. It is sent each commit, and asked once it has settled."""

    def __init__(self, text: WrittenText, requests: Requests, vocab_size: int) -> None:
        self._text, self._requests, self._received = text, requests, list[DraftMessage]()
        self._tokens = text.tokens[: text.prompt_len]
        self._mirror, self._sent = TreeMirror(self._tokens, vocab_size, _CREDIT), 0
        self._port = AnswerPort(vocab_size, None, self._received.extend)
        requests.handle(self._port, Open(0, list(self._tokens), text.prompt_len, GREEDY, _CREDIT))
        self._settle()

    def commit(self, count: int) -> Paths:
        """See Drafting."""
        before, mirror = len(self._tokens), self._mirror
        self._tokens += self._text.tokens[before : before + count]
        mirror.commit()
        seen = (mirror.epoch, mirror.received_through, mirror.resolved_root)
        self._requests.handle(self._port, Commit(0, before, self._tokens[before:], *seen, _CREDIT))
        self._settle()
        if mirror.num_unresolved:
            return set()
        paths: dict[int, tuple[int, ...]] = {mirror.root: ()}
        for slot in mirror.descend():
            paths[slot] = (*paths[mirror.parents[slot]], mirror.token_ids[slot])
        return {path for path in paths.values() if path}

    def _settle(self) -> None:
        """Send the available features, and let the trees grow until there is nothing to do."""
        features, end = self._text.features, len(self._tokens) - 1
        if features is not None:
            data = features[self._sent : end].contiguous().numpy().tobytes()
            chunk = Features(0, self._sent, end - self._sent, False, memoryview(data), "float32")
            self._requests.handle(self._port, chunk)
            self._sent = end
        growth = self._requests.growth
        while growth.has_work or not growth.idle:
            growth.work(math.inf)
            growth.grow(math.inf, lambda: False)
        self._requests.send_nodes()
        for message in self._received:
            if not isinstance(message, Grow):
                raise RuntimeError(f"the draft service sent {message}")
            self._mirror.insert(message)
        self._received.clear()


def lockstep(text: WrittenText, model: DraftModel, options: DraftOptions) -> LockstepDraft:
    """Return a draft service in lockstep, with the shape that it has on a GPU."""
    topk = options.speculative_eagle_topk
    shape = BurstShape(
        num_rows=1,
        region=256,
        branching=topk,
        max_seeds=512,
        max_steps=64,
        max_width=64,
        page_size=PAGE,
        num_pages=-(-options.max_positions // PAGE),
        max_context=options.max_positions,
        feature_size=model.feature_size,
    )
    runner = TorchRunner(model, shape, TorchAttention(), RunnerOptions())
    requests = Requests(ModelDrafter(runner, ("model",), Needs()), options)
    return LockstepDraft(text, requests, model.target_vocab_size)


def ngrams(text: WrittenText, vocab_size: int) -> LockstepDraft:
    """Return an n-gram draft service that knows only this text."""
    options = DraftOptions(speculative_algorithm=("NGRAM",))
    return LockstepDraft(text._replace(features=None), Requests(build_drafter(options), options), vocab_size)


def rounds(text: WrittenText, draftings: Sequence[Drafting]) -> Iterator[int]:
    """Yield the tokens that each round commits if it takes the trees of all `draftings`, each node once."""
    at, count = text.prompt_len, 1
    while True:
        at += count
        yield count
        if at >= len(text.tokens):
            return
        trees: Paths = set().union(*(drafting.commit(count) for drafting in draftings))
        count = 1
        most = min(len(text.tokens) - at, MAX_COMMITTED)
        while count < most and tuple(text.tokens[at : at + count]) in trees:
            count += 1


def write_text(model: CausalLM, prompt: list[int], max_tokens: int, layers: Sequence[int]) -> WrittenText:
    """Return the target's greedy answer, past the end of sequence as in benchmarks, and its features."""
    tokens = list(prompt)
    prompt_len, kv, start = len(tokens), model.new_kv(len(tokens) + max_tokens), 0
    features: list[Tensor] = []
    while len(tokens) < prompt_len + max_tokens:
        new = torch.arange(start, len(tokens))
        batch = ForwardBatch(torch.tensor(tokens[start:]), new, [Segment(len(new), torch.arange(len(tokens)))])
        hidden, found = model.forward_with_features(batch, kv, TorchAttention(), layers)
        features += [torch.cat(found, 1)] if found else []
        start = len(tokens)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return WrittenText(tokens, prompt_len, torch.cat(features) if features else None)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--algorithm", default="EAGLE3")
    parser.add_argument("--draft", required=True, help="folder of the draft model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=31)
    parser.add_argument("--ngram", action="store_true", help="n-grams beside it in place of lockstep")
    parser.add_argument("--label", default="smollm2-135m", help="the model's name in results")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    """Measure and report."""
    arguments = parse_arguments()
    steps, topk, nodes = arguments.steps, arguments.topk, arguments.nodes
    folder = resolve_model(arguments.model)
    target = load_model(folder, torch.float32, _CPU)
    options = DraftOptions(
        speculative_algorithm=(arguments.algorithm,),
        speculative_draft_model_path=arguments.draft,
        target_model_path=str(folder),
        lockstep=True,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
        max_positions=2048,
    )
    model = load_draft_model(options, _CPU, torch.float32)
    name = arguments.algorithm.lower()
    counts: dict[str, list[int]] = {}
    for prompt in chat_prompts(folder, arguments.prompts)[: arguments.limit]:
        text = write_text(target, prompt, arguments.max_tokens, model.feature_layers)
        vocab = model.target_vocab_size

        def inside(text: WrittenText = text) -> Inside:
            return Inside(text, model, steps, topk, nodes)

        cases: dict[str, list[Drafting]] = {f"{name} colocated": [inside()]}
        if arguments.ngram:
            cases["ngram"] = [ngrams(text, vocab)]
            cases[f"{name}+ngram colocated"] = [inside(), ngrams(text, vocab)]
        else:
            cases[f"{name} lockstep"] = [lockstep(text, model, options)]
        for case, draftings in cases.items():
            found = list(rounds(text, draftings))
            counts.setdefault(case, []).extend(found)
            print(f"{case:28s} {len(found):5d} rounds, accept length {sum(found) / len(found):.3f}", flush=True)
    report(arguments, counts)


def report(arguments: argparse.Namespace, counts: dict[str, list[int]]) -> None:
    """Print the figures over all texts, and write them."""
    options = f"steps={arguments.steps} topk={arguments.topk} nodes={arguments.nodes}"
    lengths = {case: sum(found) / len(found) for case, found in counts.items()}
    rows = []
    for case, length in lengths.items():
        title = f"{arguments.label} {case} {options} b1 fp32 greedy"
        rows.append(Row(title, "rounds", len(counts[case]), "rounds"))
        rows.append(Row(title, "accept_length", length, "tokens"))
        own = case.replace("colocated", "lockstep")
        if own != case and own in lengths:
            rows.append(Row(title, "accept_over_lockstep", length / lengths[own], "ratio"))
    for row in rows:
        print(row.case, row.metric, round(row.value, 4))
    if arguments.out:
        write_report(arguments.out, "accept", cpu_name(), rows, ("torch",))


if __name__ == "__main__":
    main()
