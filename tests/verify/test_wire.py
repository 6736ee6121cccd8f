"""What crosses between the door and the engine arrives as it left, however the stream is cut."""

from __future__ import annotations

import inspect
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import errors
from outrider.config.verify import VerifyOptions
from outrider.errors import InternalError, OutriderError
from outrider.host.frames import MAX_FRAME_BYTES, FeaturePieces, FrameReader, FromVerify, Start, pack
from outrider.protocol.generation import (
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    PromptLogprobs,
    RoundCounts,
    RoundTree,
    TokenLogprobs,
    TokenOrigin,
)
from outrider.protocol.generation_codec import REQUEST
from outrider.protocol.speculation import (
    Close,
    Commit,
    Decline,
    DeclineReason,
    FeatureRing,
    Features,
    FeaturesBegin,
    Grow,
    Hello,
    LineOffer,
    Open,
    Pause,
    ProjectionPart,
    Resume,
)
from outrider.sampling.params import SamplingParams
from outrider.tree.handshake import Terms
from verify_service.frames import (
    Cancel,
    DraftUp,
    EngineUpdates,
    FeatureStreamAccepted,
    FeatureStreamReleased,
    FromDoor,
    FromDraft,
    FromEngine,
    OpenFeatureStream,
    ProjectionFrame,
    RoundFigures,
    RoundReport,
    Snapshot,
    Submit,
    from_door,
    from_engine,
)

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=8)
ids = st.integers(0, 2**31 - 1)
numbers = st.floats(allow_nan=False)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 100),
    seed=st.integers(0, 2**64 - 1),
    choice_index=st.integers(0, 9),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100), max_size=3),
    num_logprobs=st.none() | st.integers(0, 20),
)
requests = st.builds(
    GenerationRequest,
    request_id=st.text(max_size=9),
    prompt_token_ids=tokens,
    sampling=sampling,
    max_tokens=st.integers(1, 99),
    stop_token_ids=st.frozensets(ids, max_size=4),
    disable_speculation=st.booleans(),
    num_prompt_logprobs=st.none() | st.integers(0, 20),
    trace=st.booleans(),
)


def described(count: int, num_top: int) -> PromptLogprobs:
    numbers = np.arange(count * (1 + num_top), dtype=np.float32) / -7
    top_ids = np.arange(count * num_top, dtype=np.int32).reshape(count, num_top)
    ranks = np.arange(1, count + 1, dtype=np.uint32)
    return PromptLogprobs(3, numbers[:count], ranks, top_ids, numbers[count:].reshape(count, num_top))


trees = st.builds(
    RoundTree,
    ids,
    ids,
    parents=st.lists(st.integers(-1, 9), max_size=4),
    token_ids=tokens,
    drafters=st.lists(st.integers(0, 9), max_size=4),
    scores=st.lists(numbers, max_size=4),
    accepted=st.lists(st.integers(0, 9), max_size=4),
    drafter_names=st.lists(st.text(max_size=4), max_size=2),
)
updates = st.builds(
    GenerationUpdate,
    token_ids=tokens,
    origins=st.lists(st.sampled_from(TokenOrigin), max_size=4),
    logprobs=st.lists(
        st.builds(TokenLogprobs, numbers, st.lists(st.tuples(ids, numbers), max_size=3)),
        max_size=3,
    ),
    rounds=st.lists(st.builds(RoundCounts, st.integers(0, 99), st.integers(0, 99)), max_size=3),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    cached_prompt_tokens=ids,
    prompt_logprobs=st.lists(st.builds(described, st.integers(0, 4), st.integers(0, 3)), max_size=2),
    round_trees=st.lists(trees, max_size=2),
)
words = st.text(max_size=9)
CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OutriderError)]


@st.composite
def any_error(draw: st.DrawFn) -> OutriderError:
    """One of any class of `outrider.errors`, with or without a code of its own and what else it takes."""
    kind = draw(st.sampled_from(CLASSES))
    taken = inspect.signature(kind).parameters
    values = {name: st.floats(0, 60) if name == "retry_after" else words for name in taken}
    return kind(
        **{name: draw(values[name]) for name, one in taken.items() if one.default is one.empty or draw(st.booleans())}
    )


grows = st.builds(
    Grow,
    request=ids,
    epoch=ids,
    base_len=ids,
    acked_len=ids,
    first_id=st.integers(0, 2**32),
    parents=tokens,
    token_ids=tokens,
    scores=st.lists(st.floats(allow_nan=False), max_size=5),
    sources=st.binary(max_size=5),
)
declines = st.builds(Decline, ids, st.sampled_from(DeclineReason), st.booleans(), words)
verify_messages = st.one_of(
    st.builds(Open, ids, tokens, ids, sampling, ids),
    st.builds(Commit, ids, ids, tokens, ids, st.integers(0, 2**40), st.none() | ids, ids),
    st.builds(Pause, ids),
    st.builds(Resume, ids, ids),
    st.builds(Close, ids),
)


dtypes = st.sampled_from(["bfloat16", "float16", "float32"])


def to_engine(frame: FromDoor) -> FromDoor:
    (body,) = FrameReader().feed(bytes(pack(frame)))
    return from_door.decode(body)


def to_door(frame: FromEngine) -> FromEngine:
    (body,) = FrameReader().feed(bytes(pack(frame)))
    return from_engine.decode(body)


@given(requests)
def test_a_request_arrives_as_it_left(request: GenerationRequest) -> None:
    assert to_engine(Submit(7, request)) == Submit(7, request)
    wanted = REQUEST.encode(request)
    assert REQUEST.decode(type(wanted).FromString(wanted.SerializeToString())) == request


@given(updates)
def test_an_update_arrives_as_it_left(update: GenerationUpdate) -> None:
    frame = EngineUpdates([(7, update)], [], [], {}, None)
    assert to_door(frame) == frame


@given(any_error())
def test_an_error_arrives_with_all_that_a_client_is_told(error: OutriderError) -> None:
    frame = to_door(EngineUpdates([(7, GenerationUpdate(error=error))], [], [], {}, None))
    assert isinstance(frame, EngineUpdates)
    got = frame.updates[0][1].error
    assert type(got) is type(error) and got is not None and str(got) == str(error)
    for name in ("message", "code", "field", "problem", "fix", "retry_after"):
        assert getattr(got, name, None) == getattr(error, name, None)


@given(st.lists(grows | declines, max_size=3))
def test_what_drafts_say_arrives_as_it_left(messages: list[Grow | Decline]) -> None:
    frame = FromDraft(3, 1.5, 16, [*messages, Hello(0, 0)])
    assert to_engine(frame) == frame


@given(st.lists(verify_messages, max_size=4))
def test_what_drafts_are_told_arrives_as_it_left(messages: list[Commit]) -> None:
    frame = FromVerify(3, [*messages])
    assert to_door(frame) == frame


@given(st.lists(st.builds(Features, ids, ids, ids, st.booleans(), st.binary(max_size=9), dtypes, ids), max_size=3))
def test_features_arrive_as_they_left(messages: list[Features]) -> None:
    frame = FeaturePieces(3, messages)
    assert to_door(frame) == frame


def test_what_a_session_says_of_features_arrives() -> None:
    for frame in (
        DraftUp(1, "a:1", Terms(vocab_size=50, feature_layers=(3, 1), line=LineOffer("host", "path"))),
        FeatureStreamAccepted(1, 9, True),
        FeatureStreamReleased(1, 2**40),
        ProjectionFrame(1, ProjectionPart(6, "x", 0, b"y")),
    ):
        assert to_engine(frame) == frame


@pytest.mark.parametrize("ring", [None, FeatureRing("here", "cuda:0", bytes(64), 1 << 24, bytes(32))])
@pytest.mark.parametrize("flags", [(False, False), (True, False), (True, True)])
def test_a_features_stream_begins_as_the_engine_says(ring: FeatureRing | None, flags: tuple[bool, bool]) -> None:
    begin = FeaturesBegin("", (3, 1), 16, "bfloat16", ring, *flags)
    assert to_door(OpenFeatureStream(7, begin)) == OpenFeatureStream(7, begin)


def test_places_in_a_ring_arrive() -> None:
    frame = FeaturePieces(3, [Features(3, 5, 2, True, memoryview(b""), "float16", 9, ring_offset=0)])
    assert to_door(frame) == frame


def test_options_arrive_as_they_left() -> None:
    options = VerifyOptions(draft=("a:1", "b:2"), max_hold_ms=1.5, disable_radix_cache=True, threads=3)
    assert to_engine(Start(options)) == Start(options)


def test_numbers_of_numpy_arrive_as_plain_ones_and_other_things_do_not_leave() -> None:
    update = GenerationUpdate(
        token_ids=[np.int32(5)], logprobs=[TokenLogprobs(np.float32(-0.5), [(np.int64(5), -math.inf)])]
    )  # type: ignore[list-item,arg-type]
    frame = to_door(EngineUpdates([(1, update)], [], [], {}, None))
    assert isinstance(frame, EngineUpdates)
    ((_, got),) = frame.updates
    assert got.token_ids == [5] and got.logprobs == [TokenLogprobs(-0.5, [(5, -math.inf)])]
    with pytest.raises(TypeError, match="does not travel"):
        pack(Cancel(object()))  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 2**40), max_size=6), st.integers(1, 9))
def test_a_stream_may_be_cut_anywhere(sessions: list[int], size: int) -> None:
    stream = b"".join(bytes(pack(Cancel(number))) for number in sessions)
    reader = FrameReader()
    got = [body for start in range(0, len(stream), size) for body in reader.feed(stream[start : start + size])]
    assert [from_door.decode(body) for body in got] == [Cancel(number) for number in sessions]


def test_an_absurd_length_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(InternalError, match="broken"):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


def test_a_frame_that_would_be_refused_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = ProjectionFrame(1, ProjectionPart(5, "float32", 0, bytes(100)))
    monkeypatch.setattr("outrider.host.frames.MAX_FRAME_BYTES", len(pack(frame)) - 4)
    assert to_engine(frame) == frame
    with pytest.raises(InternalError, match="too long"):
        pack(ProjectionFrame(1, ProjectionPart(5, "float32", 0, bytes(101))))


def test_a_frame_of_the_other_direction_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        to_engine(EngineUpdates([], [], [RoundReport(0, 0, [], [], 0, RoundFigures(0.0, 0.0))], {}, Snapshot()))  # type: ignore[arg-type]
