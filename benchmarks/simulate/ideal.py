"""Upper bound of accept lengths: a draft whose host takes no time, against the same draft in lockstep.

When drafting ahead, two things bound the accept length: the draft's device, which takes only so many steps in a round,
and the delay of news. Here nothing else does: each step runs the likeliest available nodes, as many as fit, of one tree
without limits, and a round takes the best nodes that are there in time. The models are those of
`benchmarks.simulate.split`, which runs the project's own code; the difference to this bound is what better code could
still gain. Prompts take no time.

python -m benchmarks.simulate.ideal --out benchmarks/results/simulate_ideal.json
"""

from __future__ import annotations

import argparse
import heapq
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.simulate.language import ORIGIN, VOCAB, Language
from outrider_tools.bench.report import Row, cpu_name, write_report

PROMPT, TOKENS, ANSWERS = 67, 256, 6
CANDIDATES, MOST_NODES = 16, 63
ROUND_MS = 4.48
"""Time of a large round of an 8B target on an H200, with the gap before it."""
LOCKSTEP_STEPS, LOCKSTEP_WIDTH, LOCKSTEP_CANDIDATES, LOCKSTEP_NODES = 8, 8, 4, 31


@dataclass(frozen=True)
class Pace:
    """Durations, in ms."""

    step: float
    """A step of the draft's device, for `width` nodes."""
    width: int = 32
    commit: float = 0.3
    """From a round's end until steps know of its commit."""
    nodes: float = 0.5
    """From a step's end until a round can take its nodes."""
    hold: float = 2.1
    """How long a round without nodes waits."""


class IdealTree:
    """Nodes in the order in which they were found; 0 is the first root."""

    def __init__(self, language: Language, state: np.uint64, num_candidates: int = CANDIDATES) -> None:
        self._language, self._num_candidates = language, num_candidates
        self._parents, self._scores, self._states, self._ready = [-1], [0.0], [state], [0.0]
        self._below: list[dict[int, int]] = [{}]
        self._pool = [(0.0, 0)]
        """Nodes that no step has run, likeliest first."""

    def step(self, width: int, ready_at: float = 0.0) -> None:
        """Run the likeliest nodes. Their children are available from `ready_at` on."""
        run = [heapq.heappop(self._pool)[1] for _ in range(min(width, len(self._pool)))]
        states = np.array([self._states[node] for node in run], np.uint64)
        tokens, chances = self._language.candidates(states, self._num_candidates)
        edges = self._language.scores(chances)
        for place, node in enumerate(run):
            after = self._language.follow(np.repeat(states[place : place + 1], tokens.shape[1]), tokens[place])
            for token, edge, state in zip(tokens[place].tolist(), edges[place].tolist(), after, strict=True):
                child = len(self._parents)
                self._below[node][token] = child
                self._below.append({})
                self._parents.append(node)
                self._scores.append(self._scores[node] + edge)
                self._states.append(state)
                self._ready.append(ready_at)
                heapq.heappush(self._pool, (-self._scores[child], child))

    def best(self, root: int, count: int, now: float) -> set[int]:
        """Return the root and the likeliest nodes below it that are available at `now`."""
        found: set[int] = set()
        heap = [(0.0, root)]
        while heap and len(found) <= count:
            node = heapq.heappop(heap)[1]
            found.add(node)
            for child in self._below[node].values():
                if self._ready[child] <= now:
                    heapq.heappush(heap, (-self._scores[child], child))
        return found - {root}

    def child(self, node: int, token: int) -> int | None:
        """Return the child of a node with that token, or None."""
        return self._below[node].get(token)

    def is_bare(self, node: int, now: float) -> bool:
        """Whether no child of a node is available."""
        return all(self._ready[child] > now for child in self._below[node].values())

    def reroot(self, root: int) -> None:
        """Drop nodes from the pool that do not hang below `root`."""
        alive = {root}
        for node in range(root + 1, len(self._parents)):
            if self._parents[node] in alive:
                alive.add(node)
        self._pool = [entry for entry in self._pool if entry[1] in alive]
        heapq.heapify(self._pool)


class Text:
    """The target's text after a prompt, and the states along it."""

    def __init__(self, language: Language, luck: random.Random) -> None:
        prompt = [luck.randrange(VOCAB) for _ in range(PROMPT)]
        before = language.states(ORIGIN, prompt)[-1:]
        self.tokens = language.text(prompt, TOKENS + 1)
        self.states = language.states(before, self.tokens)

    def follow(self, tree: IdealTree, root: int, place: int, taken: set[int]) -> tuple[int, int]:
        """Follow the text from `root`, whose token is at `place`. Return the last accepted node and their number."""
        node, accepted = root, 0
        while place + 1 + accepted < len(self.tokens):
            child = tree.child(node, self.tokens[place + 1 + accepted])
            if child is None or child not in taken:
                break
            node, accepted = child, accepted + 1
        return node, accepted


def lockstep(language: Language, text: Text) -> tuple[int, int]:
    """Return tokens and rounds of an answer in lockstep."""
    place = rounds = 0
    while place < TOKENS - 1:
        tree = IdealTree(language, text.states[place], LOCKSTEP_CANDIDATES)
        for _ in range(LOCKSTEP_STEPS):
            tree.step(LOCKSTEP_WIDTH)
        _, accepted = text.follow(tree, 0, place, tree.best(0, LOCKSTEP_NODES, 0.0))
        place, rounds = place + accepted + 1, rounds + 1
    return place, rounds


class IdealDraft:
    """A device that takes one step after the other. It learns of a round's commit some time after the round's end."""

    def __init__(self, language: Language, state: np.uint64, pace: Pace) -> None:
        self._language, self._pace = language, pace
        self._free = pace.commit
        self._news: list[tuple[float, int]] = []
        """Roots, and the times from which steps know of them."""
        self.tree, self.root = IdealTree(language, state), 0

    def run(self, until: float) -> None:
        """Take all steps that begin before `until`."""
        while self._free < until:
            while self._news and self._news[0][0] <= self._free:
                self.tree.reroot(self._news.pop(0)[1])
            self.tree.step(self._pace.width, self._free + self._pace.step + self._pace.nodes)
            self._free += self._pace.step

    def follow(self, root: int | None, state: np.uint64, now: float) -> None:
        """Make the round's last token the root. Without a node for it, a new tree begins."""
        known = now + self._pace.commit
        if root is None:
            self.tree, root, self._news = IdealTree(self._language, state), 0, []
            self._free = max(self._free, known)
        else:
            self._news.append((known, root))
        self.root = root


def ahead(language: Language, text: Text, pace: Pace) -> tuple[int, int, float]:
    """Return tokens, rounds and ms of an answer with a draft that runs ahead."""
    draft, place, rounds, now = IdealDraft(language, text.states[0], pace), 0, 0, 0.0
    while True:
        if draft.tree.is_bare(draft.root, now):
            now += pace.hold
            draft.run(now)
        taken = draft.tree.best(draft.root, MOST_NODES, now)
        now += ROUND_MS
        draft.run(now)
        node, accepted = text.follow(draft.tree, draft.root, place, taken)
        place, rounds = place + accepted + 1, rounds + 1
        if place >= TOKENS - 1:
            return place, rounds, now
        draft.follow(draft.tree.child(node, text.tokens[place]), text.states[place], now)


PACES = {
    "as_it_is": Pace(0.555),
    "no_delays": Pace(0.555, commit=0.0, nodes=0.0),
    "hold_4.5_ms": Pace(0.555, hold=4.5),
    "64_nodes_a_step": Pace(0.65, width=64),
    "steps_of_0.45_ms": Pace(0.45),
    "steps_of_0.40_ms": Pace(0.40),
    "steps_of_0.27_ms": Pace(0.27),
}


def main() -> None:
    """Simulate all paces, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of six answers, each with other texts")
    parser.add_argument("--flatten", type=float, default=1.2, help="above 1: the draft's scores promise too little")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    told = parser.parse_args()
    language = Language(flatten=told.flatten)
    texts = [Text(language, luck) for luck in map(random.Random, range(told.seeds)) for _ in range(ANSWERS)]
    tokens, rounds = np.sum([lockstep(language, text) for text in texts], axis=0)
    baseline = tokens / rounds
    case = "llama-8b standalone lockstep ideal b1 greedy"
    rows = [Row(case, "accept_length", float(baseline), "tokens")]
    print(f"lockstep: accept length {baseline:.2f}")
    for name, pace in PACES.items():
        tokens, rounds, ms = np.sum([ahead(language, text, pace) for text in texts], axis=0)
        accept, speed = float(tokens / rounds), float(1e3 * tokens / ms)
        print(f"{name:20} accept length {accept:.2f}, {accept / baseline:.2f} of lockstep's; {speed:.0f} tokens/s")
        case = f"llama-8b standalone split ideal {name} b1 greedy"
        rows.append(Row(case, "accept_length", accept, "tokens"))
        rows.append(Row(case, "accept_over_lockstep", accept / float(baseline), ""))
        rows.append(Row(case, "tokens_per_second", speed, "1/s"))
    if told.out:
        write_report(told.out, "simulate_ideal", cpu_name(), rows, ("numpy",))


if __name__ == "__main__":
    main()
