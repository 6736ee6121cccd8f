"""Between what door and engine work with and the parts of their frames. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from outrider.errors import (
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    OutriderError,
    OverloadedError,
    UnavailableError,
)
from outrider.tokens import FinishReason, TokenLogprobs, TokenOrigin
from outrider.tree.messages import (
    Close,
    Commit,
    Decline,
    DeclineReason,
    DraftMessage,
    FeatureRing,
    Features,
    FeaturesBegin,
    Grow,
    Hello,
    Open,
    Pause,
    Resume,
    VerifyMessage,
)
from verify_service.submission import Submission, Update
from verify_service.wire import (
    ClosePart,
    CommitPart,
    DeclinePart,
    ErrorPart,
    FeaturesOpen,
    FeaturesPart,
    GrowPart,
    OpenPart,
    PausePart,
    ResumePart,
    RingFrame,
    Submit,
    UnexpectedPart,
    UpdatePart,
)

DraftPart = GrowPart | DeclinePart | UnexpectedPart
VerifyPart = OpenPart | CommitPart | PausePart | ResumePart | ClosePart

_FIELD_ERRORS: dict[str, type[InvalidRequestError]] = {
    kind.__name__: kind for kind in (InvalidRequestError, ContextLengthError)
}
_LATER_ERRORS: dict[str, type[OverloadedError | UnavailableError]] = {
    kind.__name__: kind for kind in (OverloadedError, UnavailableError)
}

Number = TypeVar("Number", bound=np.generic)


def pack_submission(number: int, submission: Submission) -> Submit:
    """A submission as a frame."""
    return Submit(
        number=number,
        request_id=submission.request_id,
        tokens=np.array(submission.tokens, np.int32).tobytes(),
        sampling=submission.sampling,
        max_tokens=submission.max_tokens,
        stop_ids=sorted(submission.stop_ids),
        speculate=submission.speculate,
    )


def unpack_submission(frame: Submit) -> Submission:
    """The submission of a frame."""
    return Submission(
        request_id=frame.request_id,
        tokens=_array(frame.tokens, np.int32).tolist(),
        sampling=frame.sampling,
        max_tokens=frame.max_tokens,
        stop_ids=frozenset(frame.stop_ids),
        speculate=frame.speculate,
    )


def pack_update(number: int, update: Update) -> UpdatePart:
    """An update of request `number`."""
    return UpdatePart(
        number,
        list(update.token_ids),
        bytes(update.origins),
        [(entry.logprob, list(entry.top)) for entry in update.logprobs],
        update.num_draft_tokens,
        update.num_accepted_tokens,
        update.num_cached_prompt_tokens,
        update.finish or 0,
        pack_error(update.error) if update.error is not None else None,
    )


def unpack_update(part: UpdatePart) -> Update:
    """The update of a part."""
    return Update(
        token_ids=part.token_ids,
        origins=[TokenOrigin(origin) for origin in part.origins],
        logprobs=[TokenLogprobs(logprob, top) for logprob, top in part.logprobs],
        num_draft_tokens=part.num_draft_tokens,
        num_accepted_tokens=part.num_accepted_tokens,
        num_cached_prompt_tokens=part.num_cached_prompt_tokens,
        finish=FinishReason(part.finish) if part.finish else None,
        error=unpack_error(part.error) if part.error is not None else None,
    )


def pack_error(error: OutriderError) -> ErrorPart:
    """An error; one that is not for clients becomes an InternalError on the other side."""
    arguments = [error.message]
    if isinstance(error, InvalidRequestError):
        arguments = [error.field, error.problem, error.fix]
    return ErrorPart(type(error).__name__, arguments, error.code, getattr(error, "retry_after", None))


def unpack_error(part: ErrorPart) -> OutriderError:
    """The error of a part."""
    if part.kind in _FIELD_ERRORS:
        return _FIELD_ERRORS[part.kind](*part.arguments, code=part.code)
    if part.kind in _LATER_ERRORS:
        return _LATER_ERRORS[part.kind](*part.arguments, retry_after=part.retry_after or 0.0, code=part.code)
    return InternalError(part.arguments[0], code=part.code)


def pack_drafts(messages: Sequence[DraftMessage]) -> list[DraftPart]:
    """What a draft sent, in order."""
    return [_pack_draft(message) for message in messages]


def unpack_drafts(parts: Sequence[DraftPart]) -> list[DraftMessage]:
    """What a draft sent, in order. Arrays cannot be written to."""
    return [_unpack_draft(part) for part in parts]


def pack_verify(messages: Sequence[VerifyMessage]) -> list[VerifyPart]:
    """Messages for a draft, in order. Raises TypeError for a Hello, which only the door sends."""
    return [_pack_verify(message) for message in messages]


def unpack_verify(parts: Sequence[VerifyPart]) -> list[VerifyMessage]:
    """Messages for a draft, in order. Arrays cannot be written to."""
    return [_unpack_verify(part) for part in parts]


def pack_features(messages: Sequence[Features]) -> list[FeaturesPart]:
    """Features for a draft, in order; their dtype is known at the other end."""
    return [
        FeaturesPart(
            *(part.request, part.start, part.count, part.final, part.sequence),
            data=cast(bytes, part.data),
            ring_offset=part.ring_offset,
        )
        for part in messages
    ]


def unpack_features(parts: Sequence[FeaturesPart], dtype: str) -> list[Features]:
    """Features for a draft, in order."""
    return [
        Features(
            *(part.request, part.start, part.count, part.final, part.data, dtype, part.sequence),
            ring_offset=part.ring_offset,
        )
        for part in parts
    ]


def pack_begin(session: int, begin: FeaturesBegin) -> FeaturesOpen:
    """The beginning of a features stream, but for its token, which the door knows."""
    given = begin.ring
    ring = None
    if given is not None:
        ring = RingFrame(given.host, given.device, given.handle, given.num_bytes, given.magic)
    return FeaturesOpen(
        session, list(begin.layers), begin.width, begin.dtype, ring, begin.projected, begin.wants_projection
    )


def unpack_begin(frame: FeaturesOpen) -> FeaturesBegin:
    """The beginning of a features stream, without its token."""
    given = frame.ring
    ring = None
    if given is not None:
        ring = FeatureRing(given.host, given.device, given.handle, given.num_bytes, given.magic)
    return FeaturesBegin(
        "", tuple(frame.layers), frame.width, frame.dtype, ring, frame.projected, frame.wants_projection
    )


def _pack_draft(message: DraftMessage) -> DraftPart:
    match message:
        case Grow():
            return GrowPart(
                message.request,
                message.epoch,
                message.base_len,
                message.acked_len,
                message.first_id,
                _bytes(message.parents, np.uint32),
                _bytes(message.token_ids, np.int32),
                _bytes(message.scores, np.float32),
                _bytes(message.sources, np.uint8),
            )
        case Decline():
            return DeclinePart(message.request, message.reason.value, message.retryable, message.detail)
        case Hello():
            return UnexpectedPart()


def _unpack_draft(part: DraftPart) -> DraftMessage:
    match part:
        case GrowPart():
            return Grow(
                part.request,
                part.epoch,
                part.base_len,
                part.acked_len,
                part.first_id,
                _array(part.parents, np.uint32),
                _array(part.token_ids, np.int32),
                _array(part.scores, np.float32),
                _array(part.sources, np.uint8),
            )
        case DeclinePart():
            return Decline(part.request, DeclineReason(part.reason), part.retryable, part.detail)
        case UnexpectedPart():
            return Hello(0, 0)


def _pack_verify(message: VerifyMessage) -> VerifyPart:
    match message:
        case Commit():
            return CommitPart(
                message.request,
                message.length_before,
                _bytes(message.token_ids, np.int32),
                message.epoch,
                message.received_through,
                message.resolved_root,
                message.credit,
            )
        case Open():
            tokens = _bytes(message.token_ids, np.int32)
            return OpenPart(message.request, tokens, message.prompt_len, message.sampling, message.credit)
        case Pause():
            return PausePart(message.request)
        case Resume():
            return ResumePart(message.request, message.credit)
        case Close():
            return ClosePart(message.request)
        case Hello():
            raise TypeError("a session's hello is the door's")


def _unpack_verify(part: VerifyPart) -> VerifyMessage:
    match part:
        case CommitPart():
            return Commit(
                part.request,
                part.length_before,
                _array(part.token_ids, np.int32),
                part.epoch,
                part.received_through,
                part.resolved_root,
                part.credit,
            )
        case OpenPart():
            return Open(part.request, _array(part.token_ids, np.int32), part.prompt_len, part.sampling, part.credit)
        case PausePart():
            return Pause(part.request)
        case ResumePart():
            return Resume(part.request, part.credit)
        case ClosePart():
            return Close(part.request)


def _bytes(array: NDArray[Any], dtype: type[np.generic]) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _array(data: bytes, dtype: type[Number]) -> NDArray[Number]:
    return np.frombuffer(data, dtype)
