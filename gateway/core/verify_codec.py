"""Between the gateway's dataclasses and the messages of the verify service."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.events import Round, VerifyChunk
from gateway.core.request import Job
from outrider.protocol.generation import FinishReason, TokenLogprobs, TokenOrigin
from outrider.protocol.generation_codec import decode_prompt_logprobs, decode_tree, encode_grammar, encode_sampling
from outrider.v1 import common_pb2, verify_pb2

_ORIGINS = {int(origin): origin for origin in TokenOrigin}
_REASONS = {int(reason): reason for reason in FinishReason}


@dataclass(frozen=True, slots=True)
class VerifyInfo:
    """What a verify replica serves."""

    model: str
    model_path: str
    tokenizer_hash: str
    vocab_size: int
    context_length: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    version: str


@dataclass(frozen=True, slots=True)
class VerifyLoad:
    """How busy a verify replica is."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages_used: int = 0
    num_pages: int = 0
    tokens_per_second: float = 0.0
    num_healthy_drafts: int = 0


def encode_request(job: Job, choice_index: int) -> verify_pb2.VerifyServiceGenerateRequest:
    """The call for one answer of a job."""
    return verify_pb2.VerifyServiceGenerateRequest(
        request_id=f"{job.request_id}-{choice_index}",
        prompt_token_ids=job.prompt_token_ids,
        sampling=encode_sampling(job.sampling),
        choice_index=choice_index,
        max_tokens=job.max_tokens,
        stop_token_ids=job.stop_token_ids,
        ignore_eos=job.ignore_eos,
        disable_speculation=not job.speculation,
        num_prompt_logprobs=job.num_prompt_logprobs,
        trace=job.trace,
        priority=job.priority,
        tenant=job.tenant,
        grammar=encode_grammar(job.sampling.grammar),
    )


def decode_chunk(message: verify_pb2.VerifyServiceGenerateResponse) -> VerifyChunk:
    """Committed tokens; words of a newer protocol become UNSPECIFIED or STOP."""
    reason = None
    if message.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED:
        reason = _REASONS.get(message.finish_reason, FinishReason.STOP)
    return VerifyChunk(
        token_ids=tuple(message.token_ids),
        origins=tuple(_ORIGINS.get(origin, TokenOrigin.UNSPECIFIED) for origin in message.origins),
        logprobs=tuple(
            TokenLogprobs(entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
            for entry in message.logprobs
        ),
        rounds=tuple(Round(r.num_draft_tokens, r.num_accepted_tokens) for r in message.rounds),
        finish_reason=reason,
        cached_prompt_tokens=message.cached_prompt_tokens,
        prompt_logprobs=tuple(decode_prompt_logprobs(part) for part in message.prompt_logprobs),
        trees=tuple(decode_tree(tree) for tree in message.round_trees),
    )


def decode_info(message: verify_pb2.VerifyServiceGetInfoResponse) -> VerifyInfo:
    """The model and its limits."""
    return VerifyInfo(
        model=message.model,
        model_path=message.model_path,
        tokenizer_hash=message.tokenizer_hash,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        dtype=message.dtype,
        eos_token_ids=tuple(message.eos_token_ids),
        version=message.version,
    )


def decode_load(message: verify_pb2.VerifyServiceGetLoadResponse) -> VerifyLoad:
    """The present load."""
    return VerifyLoad(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_pages_used=message.num_pages_used,
        num_pages=message.num_pages,
        tokens_per_second=message.tokens_per_second,
        num_healthy_drafts=message.num_healthy_drafts,
    )
