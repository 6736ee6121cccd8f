"""Messages and bytes of any kind for a gRPC door, and what may come of them."""

from __future__ import annotations

import re
from typing import Any

import grpc
from examples import examples
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = examples(25)
"""How many calls each test makes."""

fuzz = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)

HONEST = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""What a door may answer to bad input: never that it has failed itself."""

INTERNALS = re.compile(
    r"Traceback|\.py\b|site-packages|object at 0x|\b(Key|Value|Type|Index|Attribute)Error|/home/|/root/"
)
"""What no client may read."""

_F = FieldDescriptor
_BOUNDS = {
    _F.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _F.CPPTYPE_UINT32: (0, 2**32 - 1),
    _F.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _F.CPPTYPE_UINT64: (0, 2**64 - 1),
    _F.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
_arrays = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 100), max_size=6).map(
    lambda numbers: b"".join(number.to_bytes(4, "little") for number in numbers)
)


def messages(kind: type[Any], depth: int = 4) -> st.SearchStrategy[Any]:
    """Messages of a type with some of its fields set to anything that the wire can carry."""
    return _fields(kind.DESCRIPTOR, depth).map(lambda values: _fill(kind(), values))


def wire(kind: type[Any]) -> st.SearchStrategy[bytes]:
    """Bytes where a message of a type is expected: whole messages, damaged ones, and noise."""
    whole = messages(kind).map(lambda message: message.SerializeToString())
    damaged = st.tuples(whole, st.integers(0, 400), st.integers(0, 400), st.binary(max_size=20)).map(
        lambda parts: parts[0][: parts[1]] + parts[3] + parts[0][parts[2] :]
    )
    return st.one_of(whole, damaged, st.binary(max_size=200))


def _fields(descriptor: Descriptor, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    fields = [field for field in descriptor.fields if depth or field.message_type is None]
    return st.fixed_dictionaries({}, optional={field.name: _values(field, depth) for field in fields})


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    one = _value(field, depth)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(_value(key, depth), _value(value, depth), max_size=3)
    return st.lists(one, max_size=4) if field.is_repeated else one


def _value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.cpp_type in _BOUNDS:
        low, high = _BOUNDS[field.cpp_type]
        return st.integers(max(low, -3), 70) | st.sampled_from((low, high, 1 << 20)) | st.integers(low, high)
    if field.cpp_type in (_F.CPPTYPE_DOUBLE, _F.CPPTYPE_FLOAT):
        width = 64 if field.cpp_type == _F.CPPTYPE_DOUBLE else 32
        return st.floats(-2, 2, width=32) | st.floats(width=width)
    if field.cpp_type == _F.CPPTYPE_BOOL:
        return st.booleans()
    if field.type == _F.TYPE_BYTES:
        return _arrays | st.binary(max_size=40)
    if field.cpp_type == _F.CPPTYPE_STRING:
        return st.sampled_from(("", "user", "x")) | st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
    return _fields(field.message_type, depth - 1)


def _fill(message: Message, values: dict[str, Any]) -> Message:
    for name, value in values.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        target = getattr(message, name)
        if field.message_type is None:
            if field.is_repeated:
                target.extend(value)
            else:
                setattr(message, name, value)
        elif field.message_type.GetOptions().map_entry:
            for key, entry in value.items():
                target[key] = entry
        elif field.is_repeated:
            for part in value:
                _fill(target.add(), part)
        else:
            target.SetInParent()
            _fill(target, value)
    return message


async def outcome(call: Any, most: int = 4) -> grpc.StatusCode:
    """How a call ends whose answers are read up to some number and then cancelled; fails if it says too much."""
    try:
        for _ in range(most):
            if await call.read() is grpc.aio.EOF:
                return check(await call.code(), await call.details() or "")
    except grpc.aio.AioRpcError as error:
        return check(error.code(), error.details() or "")
    call.cancel()
    return grpc.StatusCode.OK


def check(code: grpc.StatusCode, details: str) -> grpc.StatusCode:
    """The code, which must be an honest one; the details must not tell of the inside."""
    if details == "Internal error from Core":
        # grpc.aio's own word, on this side, for a write that the end of the stream overtook. What the server meant is
        # not known then; `nothing_fails` would have its log tell.
        return grpc.StatusCode.OK
    assert code in HONEST, f"{code.name}: {details}"
    assert not INTERNALS.search(details), details
    return code
