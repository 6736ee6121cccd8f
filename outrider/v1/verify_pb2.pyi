from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyServiceGenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "choice_index", "max_tokens", "stop_token_ids", "ignore_eos", "disable_speculation", "grammar", "num_prompt_logprobs", "trace", "priority", "tenant", "skip_prefix_cache", "min_tokens", "bad_words")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    DISABLE_SPECULATION_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SKIP_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    choice_index: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    disable_speculation: bool
    grammar: _common_pb2.Grammar
    num_prompt_logprobs: int
    trace: bool
    priority: int
    tenant: str
    skip_prefix_cache: bool
    min_tokens: int
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., choice_index: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., disable_speculation: _Optional[bool] = ..., grammar: _Optional[_Union[_common_pb2.Grammar, _Mapping]] = ..., num_prompt_logprobs: _Optional[int] = ..., trace: _Optional[bool] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., skip_prefix_cache: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class VerifyServiceGenerateResponse(_message.Message):
    __slots__ = ("token_ids", "origins", "logprobs", "rounds", "finish_reason", "cached_prompt_tokens", "prompt_logprobs", "round_trees", "queue_seconds")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TREES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[_common_pb2.TokenOrigin]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    rounds: _containers.RepeatedCompositeFieldContainer[_common_pb2.RoundReport]
    finish_reason: _common_pb2.FinishReason
    cached_prompt_tokens: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PromptLogprobs]
    round_trees: _containers.RepeatedCompositeFieldContainer[_common_pb2.RoundTree]
    queue_seconds: float
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[_common_pb2.TokenOrigin, str]]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[_common_pb2.RoundReport, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., cached_prompt_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.PromptLogprobs, _Mapping]]] = ..., round_trees: _Optional[_Iterable[_Union[_common_pb2.RoundTree, _Mapping]]] = ..., queue_seconds: _Optional[float] = ...) -> None: ...

class VerifyServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyServiceGetInfoResponse(_message.Message):
    __slots__ = ("model", "model_path", "tokenizer_hash", "vocab_size", "context_length", "dtype", "eos_token_ids", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_path: str
    tokenizer_hash: str
    vocab_size: int
    context_length: int
    dtype: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    version: str
    def __init__(self, model: _Optional[str] = ..., model_path: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., dtype: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., version: _Optional[str] = ...) -> None: ...

class VerifyServiceGetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyServiceGetLoadResponse(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_pages_used", "num_pages", "tokens_per_second", "num_healthy_drafts")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NUM_HEALTHY_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_pages_used: int
    num_pages: int
    tokens_per_second: float
    num_healthy_drafts: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_pages_used: _Optional[int] = ..., num_pages: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., num_healthy_drafts: _Optional[int] = ...) -> None: ...
