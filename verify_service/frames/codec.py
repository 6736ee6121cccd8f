"""Between requests as door and engine work with them and the parts of their frames. Torch-free."""

from __future__ import annotations

import numpy as np

from outrider.errors import (
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    OutriderError,
    OverloadedError,
    UnavailableError,
)
from outrider.host.frames import array_of, bytes_of
from outrider.protocol.generation import FinishReason, PromptLogprobs, RoundTree, TokenLogprobs, TokenOrigin
from verify_service.frames.requests import ErrorPart, PromptLogprobsPart, Submit, TreePart, UpdatePart
from verify_service.frames.submission import Submission, Update

_FIELD_ERRORS: dict[str, type[InvalidRequestError]] = {
    kind.__name__: kind for kind in (InvalidRequestError, ContextLengthError)
}
_LATER_ERRORS: dict[str, type[OverloadedError | UnavailableError]] = {
    kind.__name__: kind for kind in (OverloadedError, UnavailableError)
}


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
        num_prompt_logprobs=submission.num_prompt_logprobs,
        trace=submission.trace,
        priority=submission.priority,
        tenant=submission.tenant,
        client=submission.client,
    )


def unpack_submission(frame: Submit) -> Submission:
    """The submission of a frame."""
    return Submission(
        request_id=frame.request_id,
        tokens=array_of(frame.tokens, np.int32).tolist(),
        sampling=frame.sampling,
        max_tokens=frame.max_tokens,
        stop_ids=frozenset(frame.stop_ids),
        speculate=frame.speculate,
        num_prompt_logprobs=frame.num_prompt_logprobs,
        trace=frame.trace,
        priority=frame.priority,
        tenant=frame.tenant,
        client=frame.client,
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
        _pack_prompt(update.prompt_logprobs) if update.prompt_logprobs is not None else None,
        _pack_tree(update.tree) if update.tree is not None else None,
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
        prompt_logprobs=_unpack_prompt(part.prompt_logprobs) if part.prompt_logprobs is not None else None,
        tree=_unpack_tree(part.tree) if part.tree is not None else None,
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


def _pack_prompt(part: PromptLogprobs) -> PromptLogprobsPart:
    return PromptLogprobsPart(
        part.start,
        part.top_ids.shape[1],
        bytes_of(part.logprobs, np.float32),
        bytes_of(part.ranks, np.uint32),
        bytes_of(part.top_ids, np.int32),
        bytes_of(part.top_logprobs, np.float32),
    )


def _unpack_prompt(part: PromptLogprobsPart) -> PromptLogprobs:
    logprobs = array_of(part.logprobs, np.float32)
    shape = (len(logprobs), part.num_top)
    return PromptLogprobs(
        part.start,
        logprobs,
        array_of(part.ranks, np.uint32),
        array_of(part.top_ids, np.int32).reshape(shape),
        array_of(part.top_logprobs, np.float32).reshape(shape),
    )


def _pack_tree(tree: RoundTree) -> TreePart:
    return TreePart(
        tree.position,
        tree.num_tokens,
        list(tree.parents),
        list(tree.token_ids),
        list(tree.drafters),
        list(tree.scores),
        list(tree.accepted),
        list(tree.drafter_names),
    )


def _unpack_tree(part: TreePart) -> RoundTree:
    return RoundTree(
        part.position,
        part.num_tokens,
        part.parents,
        part.token_ids,
        part.drafters,
        part.scores,
        part.accepted,
        part.drafter_names,
    )
