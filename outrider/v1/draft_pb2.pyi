from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeclineReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECLINE_REASON_UNSPECIFIED: _ClassVar[DeclineReason]
    DECLINE_REASON_GAP: _ClassVar[DeclineReason]
    DECLINE_REASON_UNKNOWN_REQUEST: _ClassVar[DeclineReason]
    DECLINE_REASON_OVERLOADED: _ClassVar[DeclineReason]
    DECLINE_REASON_TOO_LONG: _ClassVar[DeclineReason]
    DECLINE_REASON_INVALID: _ClassVar[DeclineReason]
    DECLINE_REASON_DRAINING: _ClassVar[DeclineReason]
DECLINE_REASON_UNSPECIFIED: DeclineReason
DECLINE_REASON_GAP: DeclineReason
DECLINE_REASON_UNKNOWN_REQUEST: DeclineReason
DECLINE_REASON_OVERLOADED: DeclineReason
DECLINE_REASON_TOO_LONG: DeclineReason
DECLINE_REASON_INVALID: DeclineReason
DECLINE_REASON_DRAINING: DeclineReason

class Hello(_message.Message):
    __slots__ = ("protocol_version", "noise_version", "model", "token_ids_hash", "vocab_size", "hidden_size", "feature_layers", "max_positions", "sources", "num_layers", "features_token", "projection_columns", "projection_hash", "features_optional", "line", "drafts_on_demand")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NOISE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_HASH_FIELD_NUMBER: _ClassVar[int]
    FEATURES_OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_ON_DEMAND_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    noise_version: int
    model: str
    token_ids_hash: str
    vocab_size: int
    hidden_size: int
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    max_positions: int
    sources: _containers.RepeatedScalarFieldContainer[str]
    num_layers: int
    features_token: str
    projection_columns: int
    projection_hash: str
    features_optional: bool
    line: Line
    drafts_on_demand: bool
    def __init__(self, protocol_version: _Optional[int] = ..., noise_version: _Optional[int] = ..., model: _Optional[str] = ..., token_ids_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., hidden_size: _Optional[int] = ..., feature_layers: _Optional[_Iterable[int]] = ..., max_positions: _Optional[int] = ..., sources: _Optional[_Iterable[str]] = ..., num_layers: _Optional[int] = ..., features_token: _Optional[str] = ..., projection_columns: _Optional[int] = ..., projection_hash: _Optional[str] = ..., features_optional: _Optional[bool] = ..., line: _Optional[_Union[Line, _Mapping]] = ..., drafts_on_demand: _Optional[bool] = ...) -> None: ...

class Line(_message.Message):
    __slots__ = ("host", "path", "token")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    host: str
    path: str
    token: str
    def __init__(self, host: _Optional[str] = ..., path: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("request", "token_ids", "sampling", "choice_index", "prompt_len", "credit", "grammar", "tenant")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request: int
    token_ids: bytes
    sampling: _common_pb2.SamplingParams
    choice_index: int
    prompt_len: int
    credit: int
    grammar: _common_pb2.Grammar
    tenant: str
    def __init__(self, request: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., choice_index: _Optional[int] = ..., prompt_len: _Optional[int] = ..., credit: _Optional[int] = ..., grammar: _Optional[_Union[_common_pb2.Grammar, _Mapping]] = ..., tenant: _Optional[str] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("request", "length_before", "token_ids", "epoch", "received_through", "resolved_root", "credit")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BEFORE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_ROOT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    request: int
    length_before: int
    token_ids: bytes
    epoch: int
    received_through: int
    resolved_root: int
    credit: int
    def __init__(self, request: _Optional[int] = ..., length_before: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., epoch: _Optional[int] = ..., received_through: _Optional[int] = ..., resolved_root: _Optional[int] = ..., credit: _Optional[int] = ...) -> None: ...

class Pause(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    def __init__(self, request: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("request", "credit")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    request: int
    credit: int
    def __init__(self, request: _Optional[int] = ..., credit: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    def __init__(self, request: _Optional[int] = ...) -> None: ...

class VerifyEvent(_message.Message):
    __slots__ = ("hello", "open", "commit", "pause", "resume", "close")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    open: Open
    commit: Commit
    pause: Pause
    resume: Resume
    close: Close
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., pause: _Optional[_Union[Pause, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class DraftServiceSpeculateRequest(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[VerifyEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[VerifyEvent, _Mapping]]] = ...) -> None: ...

class Grow(_message.Message):
    __slots__ = ("request", "epoch", "base_len", "acked_len", "first_id", "parents", "token_ids", "scores", "sources")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    ACKED_LEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_ID_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    request: int
    epoch: int
    base_len: int
    acked_len: int
    first_id: int
    parents: bytes
    token_ids: bytes
    scores: bytes
    sources: bytes
    def __init__(self, request: _Optional[int] = ..., epoch: _Optional[int] = ..., base_len: _Optional[int] = ..., acked_len: _Optional[int] = ..., first_id: _Optional[int] = ..., parents: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., scores: _Optional[bytes] = ..., sources: _Optional[bytes] = ...) -> None: ...

class Decline(_message.Message):
    __slots__ = ("request", "reason", "retryable", "detail")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    request: int
    reason: DeclineReason
    retryable: bool
    detail: str
    def __init__(self, request: _Optional[int] = ..., reason: _Optional[_Union[DeclineReason, str]] = ..., retryable: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class DraftEvent(_message.Message):
    __slots__ = ("hello", "grow", "decline")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GROW_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    grow: Grow
    decline: Decline
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., grow: _Optional[_Union[Grow, _Mapping]] = ..., decline: _Optional[_Union[Decline, _Mapping]] = ...) -> None: ...

class DraftServiceSpeculateResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DraftEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[DraftEvent, _Mapping]]] = ...) -> None: ...

class FeatureRing(_message.Message):
    __slots__ = ("host", "device", "handle", "num_bytes", "magic")
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAGIC_FIELD_NUMBER: _ClassVar[int]
    host: str
    device: str
    handle: bytes
    num_bytes: int
    magic: bytes
    def __init__(self, host: _Optional[str] = ..., device: _Optional[str] = ..., handle: _Optional[bytes] = ..., num_bytes: _Optional[int] = ..., magic: _Optional[bytes] = ...) -> None: ...

class FeaturesBegin(_message.Message):
    __slots__ = ("token", "layers", "width", "dtype", "ring", "projected", "wants_projection")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    PROJECTED_FIELD_NUMBER: _ClassVar[int]
    WANTS_PROJECTION_FIELD_NUMBER: _ClassVar[int]
    token: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    width: int
    dtype: str
    ring: FeatureRing
    projected: bool
    wants_projection: bool
    def __init__(self, token: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., width: _Optional[int] = ..., dtype: _Optional[str] = ..., ring: _Optional[_Union[FeatureRing, _Mapping]] = ..., projected: _Optional[bool] = ..., wants_projection: _Optional[bool] = ...) -> None: ...

class FeatureProjection(_message.Message):
    __slots__ = ("num_columns", "dtype", "offset", "data")
    NUM_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    num_columns: int
    dtype: str
    offset: int
    data: bytes
    def __init__(self, num_columns: _Optional[int] = ..., dtype: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class FeaturesAccept(_message.Message):
    __slots__ = ("uses_ring", "window", "projects", "takes_batches")
    USES_RING_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    PROJECTS_FIELD_NUMBER: _ClassVar[int]
    TAKES_BATCHES_FIELD_NUMBER: _ClassVar[int]
    uses_ring: bool
    window: int
    projects: bool
    takes_batches: bool
    def __init__(self, uses_ring: _Optional[bool] = ..., window: _Optional[int] = ..., projects: _Optional[bool] = ..., takes_batches: _Optional[bool] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("request", "start", "count", "final", "sequence", "data", "ring_offset")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    RING_OFFSET_FIELD_NUMBER: _ClassVar[int]
    request: int
    start: int
    count: int
    final: bool
    sequence: int
    data: bytes
    ring_offset: int
    def __init__(self, request: _Optional[int] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., final: _Optional[bool] = ..., sequence: _Optional[int] = ..., data: _Optional[bytes] = ..., ring_offset: _Optional[int] = ...) -> None: ...

class FeaturesBatch(_message.Message):
    __slots__ = ("features",)
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    features: _containers.RepeatedCompositeFieldContainer[Features]
    def __init__(self, features: _Optional[_Iterable[_Union[Features, _Mapping]]] = ...) -> None: ...

class FeaturesReleased(_message.Message):
    __slots__ = ("through",)
    THROUGH_FIELD_NUMBER: _ClassVar[int]
    through: int
    def __init__(self, through: _Optional[int] = ...) -> None: ...

class DraftServiceFeaturesRequest(_message.Message):
    __slots__ = ("begin", "features", "batch")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    begin: FeaturesBegin
    features: Features
    batch: FeaturesBatch
    def __init__(self, begin: _Optional[_Union[FeaturesBegin, _Mapping]] = ..., features: _Optional[_Union[Features, _Mapping]] = ..., batch: _Optional[_Union[FeaturesBatch, _Mapping]] = ...) -> None: ...

class DraftServiceFeaturesResponse(_message.Message):
    __slots__ = ("accept", "released", "projection")
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_FIELD_NUMBER: _ClassVar[int]
    accept: FeaturesAccept
    released: FeaturesReleased
    projection: FeatureProjection
    def __init__(self, accept: _Optional[_Union[FeaturesAccept, _Mapping]] = ..., released: _Optional[_Union[FeaturesReleased, _Mapping]] = ..., projection: _Optional[_Union[FeatureProjection, _Mapping]] = ...) -> None: ...

class DraftServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetInfoResponse(_message.Message):
    __slots__ = ("sources", "num_requests", "num_sessions", "num_nodes", "version")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedScalarFieldContainer[str]
    num_requests: int
    num_sessions: int
    num_nodes: int
    version: str
    def __init__(self, sources: _Optional[_Iterable[str]] = ..., num_requests: _Optional[int] = ..., num_sessions: _Optional[int] = ..., num_nodes: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...
