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
    """Sequences of several tokens that an output must not have: the last token is forbidden after the others."""

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int) -> None:
        """`words`: each of at least two tokens."""
        self._longest = max(len(word) for word in words) - 1
        self._words: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        """By next-to-last token: all tokens of a word but the last, and the last one."""
        for word in words:
            self._words[word[-2]].append((list(word[:-1]), word[-1]))
        self._all: Mask = np.full(-(-vocab_size // 32), -1, np.int32)

    def masks(
        self, tokens: Sequence[int], prompt_len: int, token_ids: Sequence[int], parents: Sequence[int]
    ) -> list[Mask]:
        """Return masks of what may follow `tokens` and each node of a tree behind them. No word includes the prompt.

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
    computes. Until prefill is done, or after a preemption, more tokens than the root are uncached.
    """

    params: GenerationRequest
    """The request as it was submitted."""
    tokens: list[int]
    """All committed tokens, prompt first."""
    prompt_len: int
    sampler: RequestSampler
    sink: Callable[[GenerationUpdate], None]
    """Called with every update; must not block."""
    priority: int
    """Lower is earlier, and is preempted later. It may fall below that of `params` if the request has waited long."""
    num_scored: int = 0
    """For how many positions of the prompt the log-probability of the token after them was sent, if asked for."""
    arrival: int = 0
    """Order of admission."""
    place: int = 0
    """How many requests of the same API key run and come before it."""
    has_displaced: bool = False
    """Whether a running request has made way for this one; that happens once."""
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
    """A request that computes the first tokens of this one as well. This one computes nothing until they are there."""
    shared_len: int = 0
    """How many tokens the leader computes for this request."""
    feature_epoch: int = 0
    """`Memory.feature_epoch` when it got its pages; while that is unchanged, so are the features of these pages."""
    grammar: GrammarState | None = None
    """State of its grammar, if it has one; set before the request is scheduled."""
    bad_words: BadWords | None = None
    """Bad words of several tokens, if there are any; those of one token are biases of the sampler."""
    finished: bool = False

    @classmethod
    def begin(cls, params: GenerationRequest, sink: Callable[[GenerationUpdate], None], vocab_size: int) -> Request:
        """Create a request at its start."""
        tokens = list(params.prompt_token_ids)
        sampling = _without_bad_tokens(params)
        sampler = RequestSampler(sampling, params.prompt_token_ids, vocab_size, params.answer_end)
        words = [word for word in params.bad_words if len(word) > 1]
        bad_words = BadWords(words, vocab_size) if words else None
        return cls(params, tokens, len(tokens), sampler, sink, params.priority, bad_words=bad_words)

    @property
    def key(self) -> str:
        """The API key that the request came with."""
        return _names(self)[0]

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key of running requests: the last one gives way first.

        Among equal priorities, that is the youngest request of the API key with the most, so that no client floods out
        the others.
        """
        return self.priority, self.place, self.arrival

    @property
    def is_masked(self) -> bool:
        """Whether the host works out masks for its root and its nodes, from all tokens before them."""
        return self.grammar is not None or self.bad_words is not None

    @property
    def committed_len(self) -> int:
        """Number of committed tokens."""
        return len(self.tokens)

    @property
    def most_shared(self) -> int:
        """Most tokens whose KV may come from the radix cache: neither the root's, nor any whose logits are needed."""
        if self.params.skip_prefix_cache:
            return 0  # also after a preemption: after a cached part, chunks would be cut at other places
        most = len(self.tokens) - 1
        return most if self.params.num_prompt_logprobs is None else min(most, self.num_scored)

    @property
    def draft_room(self) -> int:
        """Most draft tokens that a round may accept; the last place is the bonus token's."""
        return self.params.max_tokens + self.prompt_len - len(self.tokens) - 1

    def cut(self, token_ids: Sequence[int]) -> tuple[Sequence[int], FinishReason | None]:
        """Return the tokens of a round that may be committed, and why the answer ends with them, if it does."""
        room, stop_ids = self.draft_room + 1, self.params.stop_token_ids
        if not stop_ids.isdisjoint(token_ids):
            stop = next(index for index, token in enumerate(token_ids) if token in stop_ids)
            if stop < room:
                return token_ids[: stop + 1], FinishReason.STOP
        return token_ids[:room], FinishReason.LENGTH if len(token_ids) >= room else None


def _without_bad_tokens(params: GenerationRequest) -> SamplingParams:
    """Return a request's sampling parameters, with bad words of one token as biases that leave them no chance."""
    forbidden = {word[0]: -math.inf for word in params.bad_words if len(word) == 1}
    sampling = params.sampling
    return replace(sampling, logit_bias={**sampling.logit_bias, **forbidden}) if forbidden else sampling


_MAX_PASSES = 16
"""Turns in a row that more urgent priorities may take while less urgent ones wait."""

WaitingT = TypeVar("WaitingT", bound=Sized)


class FairQueue:
    """Lowest priority number first. Within a priority, preempted requests first, by age; then clients take turns.

    Turns go from API key to API key, and within a key from user to user; requests of one user keep their order. So a
    client that sends a thousand requests at once delays another client's next request by one request.

    No request waits forever: when less urgent priorities have been passed over `_MAX_PASSES` times in a row, the turn
    goes to the request that has waited longest of all. It gets the best waiting priority, and as the oldest there it
    does not have to give way at once. So a request that more urgent ones keep passing, with k older ones before it, has
    its turn after at most (k + 1) * (_MAX_PASSES + 1) turns.
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
        """Return the first request of the best priority whose API key is not in `keys`, and for which none has made way
        yet; None if there is none. The queue must not be empty."""
        best = self._priorities()[0]
        for request in self._preempted.get(best, ()):
            if request.key not in keys and not request.has_displaced:
                return request
        for key, users in self._turns.get(best, {}).items():
            request = next(iter(users.values()))[0]
            if key not in keys and not request.has_displaced:
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
        """Remove and return the head; the next turn is another client's."""
        request, best = self.head, self._priorities()[0]
        self.remove(request)
        passes_over = any(priority > request.priority for priority in self._priorities())
        aged = self._num_passes >= _MAX_PASSES
        self._num_passes = self._num_passes + 1 if passes_over and not aged else 0
        request.priority = min(request.priority, best)
        return request

    def remove(self, request: Request) -> None:
        """Remove a request, wherever it is. Raises ValueError if it does not wait."""
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
        # A client whose head is removed has had its turn, and is last from then on.
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
    """Decides whose prompt the next round computes, among running requests with a prompt still to compute.

    Lowest priority number first. Within a priority, the prompt with the least left comes first, so that a short one
    does not wait for all long ones that came before it; but every other chunk goes to the prompt whose turn it is. A
    prompt keeps its turn until it is computed, then the next one has it, in the order of a FairQueue. So a client that
    sends a hundred long prompts delays a long one of another client by about one of them.

    No prompt waits forever: when less urgent priorities have been passed over for `_MAX_PASSES` chunks in a row, the
    next chunk goes to the oldest of their prompts.
    """

    def __init__(self) -> None:
        self._queue = FairQueue()
        self._queued: dict[Request, None] = {}
        self._passed_over = False
        """Whether the last chunk was not for the prompt whose turn it was."""
        self._num_passes = 0

    def order(self, requests: Sequence[Request]) -> list[Request]:
        """Sort `requests`, all that have a prompt to compute, into the order in which they may fill a chunk.

        Equal ones keep their order.
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
        """Forget a request that has no prompt to compute any more, or never had one."""
        if request in self._queued:
            del self._queued[request]
            self._queue.remove(request)


def _move_on(turns: dict[str, WaitingT], name: str, had_turn: bool) -> None:
    """Move a name behind the others if it had its turn; remove it if nothing waits under it."""
    if had_turn or not turns[name]:
        waiting = turns.pop(name)
        if waiting:
            turns[name] = waiting


def _names(request: Request) -> tuple[str, str]:
    """Return a request's API key, and the user that it names."""
    key, _, user = request.params.client.partition("/")
    return key, user
