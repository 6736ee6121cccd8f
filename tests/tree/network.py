"""A draft's author and verify's mirror joined by a network that loses, repeats, delays, reorders and restarts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from mirror_integrity import check_mirror
from msgspec.structs import replace

from outrider.protocol.speculation import Commit, Grow, Open
from outrider.sampling.params import SamplingParams
from outrider.tree.author import Outcome, TreeAuthor
from outrider.tree.mirror import TreeMirror

VOCAB = 5
CREDIT = 12


@dataclass
class Sent:
    """What the author ever sent: (life, epoch, id) to (parent, token, score)."""

    nodes: dict[tuple[int, int, int], tuple[int, int, float]] = field(default_factory=dict)

    def note(self, life: int, grow: Grow) -> None:
        for index, node_id in enumerate(range(grow.first_id, grow.first_id + len(grow.token_ids))):
            node = (int(grow.parents[index]), int(grow.token_ids[index]), float(grow.scores[index]))
            assert self.nodes.setdefault((life, grow.epoch, node_id), node) == node, "a node changed once sent"


class Pair:
    """One request, seen from both sides. `life` counts the times that verify opened it."""

    def __init__(self) -> None:
        self.tokens = [0]
        self.sent = Sent()
        self.life = 0
        self.to_draft: list[tuple[int, Open | Commit]] = []
        self.to_verify: list[tuple[int, Grow | None]] = []
        self.author: TreeAuthor | None = None
        self.author_life = 0
        self.open()

    def open(self) -> None:
        """Verify opens the request under a new number, as after a reconnect or a retryable decline."""
        self.life += 1
        self.mirror = TreeMirror(self.tokens, VOCAB, 4 * CREDIT)
        message = Open(self.life, list(self.tokens), 1, SamplingParams(), CREDIT)
        self.to_draft.append((self.life, message))

    def restart_draft(self) -> None:
        """The draft process dies: all that was under way is gone, and verify reconnects."""
        self.author = None
        self.to_draft.clear()
        self.to_verify.clear()
        self.open()

    def commit(self, new_tokens: list[int]) -> None:
        before = len(self.tokens)
        self.tokens.extend(new_tokens)
        self.mirror.commit()
        message = Commit(
            request=self.life,
            length_before=before,
            token_ids=list(new_tokens),
            epoch=self.mirror.epoch,
            received_through=self.mirror.received_through,
            resolved_root=self.mirror.resolved_root,
            credit=CREDIT,
        )
        self.to_draft.append((self.life, message))

    def draft_receives(self, index: int) -> None:
        life, message = self.to_draft.pop(index)
        if isinstance(message, Open):
            if life > self.author_life:
                self.author, self.author_life = TreeAuthor(message, VOCAB), life
            elif life == self.author_life and self.author is not None:
                self.author.reopen(message)
        elif self.author is None or life != self.author_life or self.author.apply(message) is Outcome.GAP:
            self.to_verify.append((life, None))  # a decline: open again
            return
        self.flush()

    def grow(self, parent: int, token: int, score: float) -> None:
        if self.author is not None:
            live = self.author.live_ids()
            self.author.add(live[parent % len(live)], token, score, 0)

    def flush(self, max_nodes: int = 4) -> None:
        while self.author is not None and (grow := self.author.take(max_nodes)) is not None:
            grow = replace(grow, scores=np.array(grow.scores, np.float32).tolist())
            self.sent.note(self.author_life, grow)
            self.to_verify.append((self.author_life, grow))

    def verify_receives(self, index: int) -> None:
        life, message = self.to_verify.pop(index)
        if life != self.life:
            return
        if message is None:
            self.open()
        else:
            self.insert(message)

    def insert(self, grow: Grow) -> int:
        """What verify does with a message, whoever sent it."""
        entered = self.mirror.insert(grow)
        if self.mirror.desynced:
            self.open()
        return entered

    def deliver_all(self) -> None:
        while self.to_draft or self.to_verify:
            if self.to_draft:
                self.draft_receives(0)
            else:
                self.verify_receives(0)

    def check_safety(self) -> None:
        """Every node that verify holds is the one that the draft sent, and both live copies agree."""
        mirror = self.mirror
        check_mirror(mirror)
        live = list(mirror.descend())
        for slot in live:
            parent_id, token, score = self.sent.nodes[self.life, mirror.epoch, mirror.ids[slot]]
            assert mirror.ids[mirror.parents[slot]] == parent_id
            assert mirror.token_ids[slot] == token
            assert mirror.scores[slot] == score
        if mirror.epoch:
            assert mirror.root_len <= len(self.tokens)
        assert len(live) <= 4 * CREDIT
        if self.author is not None:
            assert self.author.num_live <= CREDIT
