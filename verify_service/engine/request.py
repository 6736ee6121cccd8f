"""Requests as the engine sees them, and whose turn is next: to run, and to have its prompt computed."""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from outrider.grammar.compiler import GrammarState, Mask
from outrider.protocol.generation import FinishReason, GenerationRequest, GenerationUpdate
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import RequestSampler


class BadWords:
    """Sequences of several tokens that an output must not have: the last token is forbidden behind the others."""

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int) -> None:
        """Each of at least two tokens."""
        self._longest = max(len(word) for word in words) - 1
        self._words: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        """All but the last token, and that one, by the one before it."""
        for word in words:
            self._words[word[-2]].append((list(word[:-1]), word[-1]))
        self._all: Mask = np.full(-(-vocab_size // 32), -1, np.int32)

    def masks(
        self, tokens: Sequence[int], prompt_len: int, token_ids: Sequence[int], parents: Sequence[int]
    ) -> list[Mask]:
        """Tokens that may follow `tokens`, and the nodes of a tree behind them. The prompt is no part of a word.

        `token_ids` and `parents` as in `Nodes`. A mask is int32 [ceil(V / 32)]: bit v % 32 of word v // 32 is set where
        token v may come.
        """
        paths = [list(tokens[max(prompt_len, len(tokens) - self._longest) :])]
        for token, parent in zip(token_ids, parents, strict=True):
            paths.append([*paths[parent + 1], token][-self._longest :])
        return [self._mask(path) for path in paths]

    def _mask(self, path: list[int]) -> Mask:
        last = [last for head, last in self._words.get(path[-1], ()) if path[-len(head) :] == head] if path else []
        if not last:
            return self._all
        mask = self._all.copy()
        for token in last:
            mask.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
        return mask


@dataclass(eq=False, slots=True)
class Request:
    """State of a request.

    Between rounds `cached_len < committed_len`: the last committed token is the root, whose KV the next round
    computes. Until prefill is done, or after a preemption, more tokens than the root wait.
    """

    params: GenerationRequest
    """What was asked for."""
    tokens: list[int]
    """All committed tokens, prompt first."""
    prompt_len: int
    sampler: RequestSampler
    sink: Callable[[GenerationUpdate], None]
    """Called with every update; must not block."""
    priority: int
    """Lower is earlier, and is preempted later; it may rise above that of `params` while the request waits."""
    num_scored: int = 0
    """First positions of the prompt that log-probabilities of the token after them were told for, if asked for."""
    arrival: int = 0
    """Order of admission."""
    place: int = 0
    """How many requests of its API key run and come before it."""
    let_in: bool = False
    """Whether one that ran has made way for it; that happens once."""
    arrived_at: float = 0.0
    """Seconds on the monotonic clock."""
    queue_seconds: float = 0.0
    """How long it waited for its first place in a round."""
    cached_len: int = 0
    num_cached_prompt_tokens: int | None = None
    """Prompt tokens that the radix cache had when the request was first admitted, or that a leader computed for it;
    None before that."""
    pages: list[int] = field(default_factory=list)
    """Page table: position p lies in page `pages[p // page_size]`."""
    leader: Request | None = None
    """A request that computes the first tokens of this one as well. Until it has, this one computes nothing."""
    shared_len: int = 0
    """How many tokens that are."""
    feature_epoch: int = 0
    """`Memory.feature_epoch` when it got its pages: while that is the same, so are their features."""
    grammar: GrammarState | None = None
    """State of its grammar, if it has one; set before the request is scheduled."""
    bad_words: BadWords | None = None
    """Those of several tokens, if there are any; the others are biases of the sampler."""
    finished: bool = False

    @classmethod
    def begin(cls, params: GenerationRequest, sink: Callable[[GenerationUpdate], None], vocab_size: int) -> Request:
        """A request at its start."""
        tokens = list(params.prompt_token_ids)
        sampling = _without_bad_tokens(params)
        sampler = RequestSampler(sampling, params.prompt_token_ids, vocab_size, params.answer_end)
        words = [word for word in params.bad_words if len(word) > 1]
        bad_words = BadWords(words, vocab_size) if words else None
        return cls(params, tokens, len(tokens), sampler, sink, params.priority, bad_words=bad_words)

    @property
    def key(self) -> str:
        """Which API key it came with."""
        return _names(self)[0]

    @property
    def rank(self) -> tuple[int, int, int]:
        """Its place among running requests: the last one gives way first.

        Of equal priority that is one of the API key that has the most, the youngest: who floods gives way to others.
        """
        return self.priority, self.place, self.arrival

    @property
    def is_masked(self) -> bool:
        """Whether the host works out masks for its root and its nodes, from all tokens before them."""
        return self.grammar is not None or self.bad_words is not None

    @property
    def committed_len(self) -> int:
        """Tokens agreed."""
        return len(self.tokens)

    @property
    def most_shared(self) -> int:
        """Committed tokens whose KV may come from the radix cache: not the root's, nor any whose logits are needed."""
        if self.params.skip_prefix_cache:
            return 0  # nor after a preemption: the cache may have a part of it, and the rest would be cut elsewhere
        most = len(self.tokens) - 1
        return most if self.params.num_prompt_logprobs is None else min(most, self.num_scored)

    @property
    def draft_room(self) -> int:
        """Draft tokens that a round may accept; the last place is the bonus token's."""
        return self.params.max_tokens + self.prompt_len - len(self.tokens) - 1

    def cut(self, token_ids: Sequence[int]) -> tuple[Sequence[int], FinishReason | None]:
        """The tokens of a round that may be committed, and why the answer ends with them if it does."""
        room, stop_ids = self.draft_room + 1, self.params.stop_token_ids
        if not stop_ids.isdisjoint(token_ids):
            stop = next(index for index, token in enumerate(token_ids) if token in stop_ids)
            if stop < room:
                return token_ids[: stop + 1], FinishReason.STOP
        return token_ids[:room], FinishReason.LENGTH if len(token_ids) >= room else None


def _without_bad_tokens(params: GenerationRequest) -> SamplingParams:
    """How a request samples, with bad words of one token as biases that leave them no chance."""
    forbidden = {word[0]: -math.inf for word in params.bad_words if len(word) == 1}
    sampling = params.sampling
    return replace(sampling, logit_bias={**sampling.logit_bias, **forbidden}) if forbidden else sampling


_MAX_PASSES = 16
"""Turns in a row that higher priorities may take while lower ones wait."""

WaitingT = TypeVar("WaitingT", bound=Sized)


class FairQueue:
    """Lower priorities first. Of one priority, those that were preempted, oldest first; then clients take turns.

    A turn goes from API key to API key, and within a key from user to user; requests of one user come in their order.
    So a client that sends a thousand requests at once delays the next one of another client by one request.

    No request waits for ever: when lower priorities have been passed over `_MAX_PASSES` times in a row, the turn goes
    to the request that has waited longest of all. It takes the best waiting priority with it, and as the oldest there
    it does not have to give way at once. So one that higher priorities keep passing, with k older ones before it, has
    its turn after at most (k + 1) * (_MAX_PASSES + 1).
    """

    def __init__(self) -> None:
        self._preempted: dict[int, list[Request]] = {}
        self._turns: dict[int, dict[str, dict[str, deque[Request]]]] = {}
        """New requests by priority, API key and user; the first key has the next turn, and so has its first user."""
        self._num_requests = 0
        self._num_passes = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        for priority in self._priorities():
            yield from self._preempted.get(priority, ())
            for users in self._turns.get(priority, {}).values():
                for requests in users.values():
                    yield from requests

    def __contains__(self, request: object) -> bool:
        return any(one is request for one in self)

    @property
    def head(self) -> Request:
        """The request whose turn it is; the queue must not be empty."""
        if self._num_passes >= _MAX_PASSES:
            return min(self, key=lambda one: one.arrival)
        return next(iter(self))

    def newcomer(self, keys: Collection[str]) -> Request | None:
        """The first request of the best priority whose API key is none of these, and for which none has made way yet;
        None if there is none. The queue must not be empty."""
        best = self._priorities()[0]
        for request in self._preempted.get(best, ()):
            if request.key not in keys and not request.let_in:
                return request
        for key, users in self._turns.get(best, {}).items():
            request = next(iter(users.values()))[0]
            if key not in keys and not request.let_in:
                return request
        return None

    def add(self, request: Request) -> None:
        """Queue a new request."""
        key, user = _names(request)
        users = self._turns.setdefault(request.priority, {}).setdefault(key, {})
        users.setdefault(user, deque()).append(request)
        self._num_requests += 1

    def put_back(self, request: Request) -> None:
        """Queue a request that has had its turn and was preempted."""
        insort(self._preempted.setdefault(request.priority, []), request, key=lambda one: one.arrival)
        self._num_requests += 1

    def pop(self) -> Request:
        """Take the head out; the next turn is another client's."""
        request, best = self.head, self._priorities()[0]
        self.remove(request)
        passes_over = any(priority > request.priority for priority in self._priorities())
        aged = self._num_passes >= _MAX_PASSES
        self._num_passes = self._num_passes + 1 if passes_over and not aged else 0
        request.priority = min(request.priority, best)
        return request

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is. ValueError if it does not wait."""
        preempted = self._preempted.get(request.priority, [])
        if request in preempted:
            preempted.remove(request)
            if not preempted:
                del self._preempted[request.priority]
        else:
            self._remove_new(request)
        self._num_requests -= 1

    def _remove_new(self, request: Request) -> None:
        key, user = _names(request)
        keys = self._turns.get(request.priority, {})
        users = keys.get(key, {})
        requests = users.get(user, deque())
        if request not in requests:
            raise ValueError(f"request {request.params.request_id} does not wait")
        # Who gives up a head has had a turn, and is last from then on.
        is_user_s_turn = requests[0] is request and next(iter(users)) == user
        is_key_s_turn = is_user_s_turn and next(iter(keys)) == key
        requests.remove(request)
        _move_on(users, user, is_user_s_turn)
        _move_on(keys, key, is_key_s_turn)
        if not keys:
            del self._turns[request.priority]

    def _priorities(self) -> list[int]:
        return sorted({*self._preempted, *self._turns})


class PromptTurns:
    """Whose prompt the next round computes, of those of running requests that are not computed yet.

    Lower priorities first. Of one priority the prompt of which the least is left, so that a short one does not wait for
    all long ones that came before it; but of two chunks one goes to the prompt whose turn it is. It keeps its turn
    until it is computed, then the next one has it, in the order of a FairQueue. So a client that sends a hundred long
    ones delays the long one of another client by about one of them.

    No prompt waits for ever: when lower priorities have been passed over for `_MAX_PASSES` chunks in a row, the next
    one goes to the oldest prompt of those.
    """

    def __init__(self) -> None:
        self._queue = FairQueue()
        self._queued: dict[Request, None] = {}
        self._passed_over = False
        """Whether the last chunk was not for the prompt whose turn it was."""
        self._num_passes = 0

    def order(self, requests: Sequence[Request]) -> list[Request]:
        """Those requests, which are all that have a prompt to compute, in the order in which they may fill a chunk.

        Of equal ones the first given comes first.
        """
        left = set(requests)
        for request in [one for one in self._queued if one not in left]:
            self.leave(request)
        for request in requests:
            if request not in self._queued:
                self._queued[request] = None
                self._queue.add(request)
        if not requests:
            return []
        has_turn = self._queue.head
        order = sorted(requests, key=lambda one: (one.priority, len(one.tokens) - one.cached_len, one is not has_turn))
        self._passed_over = order[0] is not has_turn and not self._passed_over
        first = order[0] if self._passed_over else has_turn
        self._num_passes = self._num_passes + 1 if order[-1].priority > first.priority else 0
        if self._num_passes > _MAX_PASSES:
            first = min((one for one in order if one.priority > first.priority), key=lambda one: one.arrival)
            self._num_passes = 0
        order.remove(first)
        order.insert(0, first)
        return order

    def leave(self, request: Request) -> None:
        """Forget a request that has no prompt to compute any more; or never had one."""
        if request in self._queued:
            del self._queued[request]
            self._queue.remove(request)


def _move_on(turns: dict[str, WaitingT], name: str, had_turn: bool) -> None:
    """Put a name behind the others if it had its turn, and take it out if nothing waits there."""
    if had_turn or not turns[name]:
        waiting = turns.pop(name)
        if waiting:
            turns[name] = waiting


def _names(request: Request) -> tuple[str, str]:
    """The API key, and the user that it names."""
    key, _, user = request.params.client.partition("/")
    return key, user
