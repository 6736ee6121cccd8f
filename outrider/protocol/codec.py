"""Between the messages of the speculation stream and protobuf. Nothing generated passes this module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidRequestError
from outrider.protocol.grammar_codec import decode_grammar, encode_grammar
from outrider.protocol.messages import (
    Close,
    Commit,
    Decline,
    DeclineReason,
    DraftMessage,
    Grow,
    Hello,
    LineOffer,
    Open,
    Pause,
    Resume,
    VerifyMessage,
)
from outrider.sampling.params import SamplingParams
from outrider.v1 import common_pb2, draft_pb2

MAX_NODES_PER_MESSAGE = 4096
"""A `Grow` with more nodes than this is malformed."""

MAX_LINE_FIELD = 256
"""Characters of a field of a `Line`."""

MAX_EVENTS_AT_ONCE = 256
"""Events that are decoded in one go; a message may hold millions, and other streams wait meanwhile."""

Batch = TypeVar("Batch", draft_pb2.DraftServiceSpeculateRequest, draft_pb2.DraftServiceSpeculateResponse)


def encode_sampling(params: SamplingParams) -> common_pb2.SamplingParams:
    """Sampling fields as a message; every field is set, so that defaults of other versions do not matter."""
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        num_logprobs=params.num_logprobs,
    )


def decode_sampling(message: common_pb2.SamplingParams, *, choice_index: int, fresh_seed: int) -> SamplingParams:
    """Sampling fields of a message; unset ones take their defaults, an unset seed is `fresh_seed`."""

    def value(name: str, default: Any) -> Any:
        return getattr(message, name) if message.HasField(name) else default

    return SamplingParams(
        temperature=value("temperature", 1.0),
        top_k=value("top_k", 0),
        top_p=value("top_p", 1.0),
        min_p=value("min_p", 0.0),
        seed=value("seed", fresh_seed),
        choice_index=choice_index,
        presence_penalty=value("presence_penalty", 0.0),
        frequency_penalty=value("frequency_penalty", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        logit_bias=dict(message.logit_bias),
        num_logprobs=value("num_logprobs", None),
    )


def encode_verify(messages: Iterable[VerifyMessage]) -> draft_pb2.DraftServiceSpeculateRequest:
    """Messages from verify to draft, in order."""
    return draft_pb2.DraftServiceSpeculateRequest(events=[_encode_verify_event(message) for message in messages])


def encode_draft(messages: Iterable[DraftMessage]) -> draft_pb2.DraftServiceSpeculateResponse:
    """Messages from draft to verify, in order."""
    return draft_pb2.DraftServiceSpeculateResponse(events=[_encode_draft_event(message) for message in messages])


def decode_verify(batch: draft_pb2.DraftServiceSpeculateRequest) -> list[VerifyMessage]:
    """Raises InvalidRequestError for an array that is no array and for an event that this version does not know."""
    return [_decode_event(event, _VERIFY_DECODERS) for event in batch.events]


def decode_draft(batch: draft_pb2.DraftServiceSpeculateResponse) -> list[DraftMessage]:
    """Raises InvalidRequestError for an array that is no array and for an event that this version does not know."""
    return [_decode_event(event, _DRAFT_DECODERS) for event in batch.events]


def in_parts(batch: Batch) -> Iterator[Batch]:
    """The batch in messages of at most `MAX_EVENTS_AT_ONCE` events; a short one, as nearly all are, as it is."""
    if len(batch.events) <= MAX_EVENTS_AT_ONCE:
        yield batch
        return
    for start in range(0, len(batch.events), MAX_EVENTS_AT_ONCE):
        yield type(batch)(events=batch.events[start : start + MAX_EVENTS_AT_ONCE])


def _encode_verify_event(message: VerifyMessage) -> draft_pb2.VerifyEvent:
    match message:
        case Commit():
            commit = draft_pb2.Commit(
                request=message.request,
                length_before=message.length_before,
                token_ids=_pack(message.token_ids, "<i4"),
                epoch=message.epoch,
                received_through=message.received_through,
                resolved_root=message.resolved_root,
                credit=message.credit,
            )
            return draft_pb2.VerifyEvent(commit=commit)
        case Open():
            opened = draft_pb2.Open(
                request=message.request,
                token_ids=_pack(message.token_ids, "<i4"),
                sampling=encode_sampling(message.sampling),
                choice_index=message.sampling.choice_index,
                prompt_len=message.prompt_len,
                credit=message.credit,
                grammar=encode_grammar(message.sampling.grammar),
                tenant=message.tenant,
            )
            return draft_pb2.VerifyEvent(open=opened)
        case Pause():
            return draft_pb2.VerifyEvent(pause=draft_pb2.Pause(request=message.request))
        case Resume():
            return draft_pb2.VerifyEvent(resume=draft_pb2.Resume(request=message.request, credit=message.credit))
        case Close():
            return draft_pb2.VerifyEvent(close=draft_pb2.Close(request=message.request))
        case Hello():
            return draft_pb2.VerifyEvent(hello=_encode_hello(message))


def _encode_draft_event(message: DraftMessage) -> draft_pb2.DraftEvent:
    match message:
        case Grow():
            grow = draft_pb2.Grow(
                request=message.request,
                epoch=message.epoch,
                base_len=message.base_len,
                acked_len=message.acked_len,
                first_id=message.first_id,
                parents=_pack(message.parents, "<u4"),
                token_ids=_pack(message.token_ids, "<i4"),
                scores=_pack(message.scores, "<f4"),
                sources=_pack(message.sources, "u1"),
            )
            return draft_pb2.DraftEvent(grow=grow)
        case Decline():
            decline = draft_pb2.Decline(
                request=message.request,
                reason=message.reason.value,  # type: ignore[arg-type]
                retryable=message.retryable,
                detail=message.detail,
            )
            return draft_pb2.DraftEvent(decline=decline)
        case Hello():
            return draft_pb2.DraftEvent(hello=_encode_hello(message))


def _encode_hello(hello: Hello) -> draft_pb2.Hello:
    return draft_pb2.Hello(
        protocol_version=hello.protocol_version,
        noise_version=hello.noise_version,
        model=hello.model,
        tokenizer_hash=hello.tokenizer_hash,
        vocab_size=hello.vocab_size,
        hidden_size=hello.hidden_size,
        feature_layers=hello.feature_layers,
        max_positions=hello.max_positions,
        sources=hello.sources,
        num_layers=hello.num_layers,
        features_token=hello.features_token,
        projection_columns=hello.projection_columns,
        projection_hash=hello.projection_hash,
        features_optional=hello.features_optional,
        line=_encode_line(hello.line),
    )


def _encode_line(line: LineOffer | None) -> draft_pb2.Line | None:
    return None if line is None else draft_pb2.Line(host=line.host, path=line.path, token=line.token)


def _decode_hello(event: Any) -> Hello:
    hello = event.hello
    return Hello(
        protocol_version=hello.protocol_version,
        noise_version=hello.noise_version,
        model=hello.model,
        tokenizer_hash=hello.tokenizer_hash,
        vocab_size=hello.vocab_size,
        hidden_size=hello.hidden_size,
        feature_layers=tuple(hello.feature_layers),
        max_positions=hello.max_positions,
        sources=tuple(hello.sources),
        num_layers=hello.num_layers,
        features_token=hello.features_token,
        projection_columns=hello.projection_columns,
        projection_hash=hello.projection_hash,
        features_optional=hello.features_optional,
        line=_decode_line(hello.line) if hello.HasField("line") else None,
    )


def _decode_line(line: draft_pb2.Line) -> LineOffer:
    for field in ("host", "path", "token"):
        if len(getattr(line, field)) > MAX_LINE_FIELD:
            raise InvalidRequestError(f"hello.line.{field}", f"is longer than {MAX_LINE_FIELD} characters")
    return LineOffer(line.host, line.path, line.token)


def _decode_open(event: draft_pb2.VerifyEvent) -> Open:
    opened = event.open
    tokens = _unpack(opened.token_ids, "<i4", "open.token_ids")
    if not 1 <= opened.prompt_len <= len(tokens):
        raise InvalidRequestError("open.prompt_len", f"{opened.prompt_len} is not within 1 to {len(tokens)} tokens")
    return Open(
        request=opened.request,
        token_ids=tokens,
        prompt_len=opened.prompt_len,
        sampling=_decode_target_sampling(opened),
        credit=opened.credit,
        tenant=opened.tenant,
    )


def _decode_target_sampling(opened: draft_pb2.Open) -> SamplingParams:
    sampling = decode_sampling(opened.sampling, choice_index=opened.choice_index, fresh_seed=0)
    if opened.HasField("grammar"):
        # One that this version does not know only makes for worse guesses.
        with suppress(InvalidRequestError):
            return replace(sampling, grammar=decode_grammar(opened.grammar))
    return sampling


def _decode_commit(event: draft_pb2.VerifyEvent) -> Commit:
    commit = event.commit
    tokens = _unpack(commit.token_ids, "<i4", "commit.token_ids")
    if not len(tokens):
        raise InvalidRequestError("commit.token_ids", "is empty", "commit at least one token")
    return Commit(
        request=commit.request,
        length_before=commit.length_before,
        token_ids=tokens,
        epoch=commit.epoch,
        received_through=commit.received_through,
        resolved_root=commit.resolved_root if commit.HasField("resolved_root") else None,
        credit=commit.credit,
    )


def _decode_grow(event: draft_pb2.DraftEvent) -> Grow:
    grow = event.grow
    tokens = _unpack(grow.token_ids, "<i4", "grow.token_ids")
    if len(tokens) > MAX_NODES_PER_MESSAGE:
        raise InvalidRequestError("grow.token_ids", f"{len(tokens)} nodes, at most {MAX_NODES_PER_MESSAGE}")
    return Grow(
        request=grow.request,
        epoch=grow.epoch,
        base_len=grow.base_len,
        acked_len=grow.acked_len,
        first_id=grow.first_id,
        parents=_unpack(grow.parents, "<u4", "grow.parents"),
        token_ids=tokens,
        scores=_unpack(grow.scores, "<f4", "grow.scores"),
        sources=_unpack(grow.sources, "u1", "grow.sources"),
    )


def _decode_decline(event: draft_pb2.DraftEvent) -> Decline:
    decline = event.decline
    known = decline.reason in {reason.value for reason in DeclineReason}
    reason = DeclineReason(decline.reason) if known else DeclineReason.UNSPECIFIED
    return Decline(request=decline.request, reason=reason, retryable=decline.retryable, detail=decline.detail)


_VERIFY_DECODERS: dict[str, Callable[[Any], Any]] = {
    "hello": _decode_hello,
    "open": _decode_open,
    "commit": _decode_commit,
    "pause": lambda event: Pause(event.pause.request),
    "resume": lambda event: Resume(event.resume.request, event.resume.credit),
    "close": lambda event: Close(event.close.request),
}

_DRAFT_DECODERS: dict[str, Callable[[Any], Any]] = {
    "hello": _decode_hello,
    "grow": _decode_grow,
    "decline": _decode_decline,
}


def _decode_event(event: Any, decoders: dict[str, Callable[[Any], Any]]) -> Any:
    kind = event.WhichOneof("event")
    if kind is None:
        raise InvalidRequestError("event", "is empty or not known to this version")
    return decoders[kind](event)


def _pack(array: NDArray[Any], dtype: str) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _unpack(data: bytes, dtype: str, field: str) -> NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise InvalidRequestError(field, f"{len(data)} bytes are no whole number of {dtype} values")
    return np.frombuffer(data, dtype)
