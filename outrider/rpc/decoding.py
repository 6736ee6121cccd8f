"""Strict decoding of requests: what protobuf cannot read, or reads without understanding, is the client's mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from outrider.errors import InvalidRequestError

Deserializer = Callable[[bytes], Any]

_LENGTH_DELIMITED = 2
_FIXED_SIZES = {1: 8, 5: 4}

_MAX_PARTS = 4096
"""Messages or fields of a request that are looked at to say which one is wrong; decoding runs in the event loop."""
_MAX_UNKNOWN_BYTES = 65536


def strict(deserialize: Deserializer, *, allow_unknown: bool) -> Deserializer:
    """Wrap a request deserializer: malformed bytes and, unless allowed, unknown fields raise InvalidRequestError."""
    message_type = getattr(deserialize, "__self__", None)
    descriptor = getattr(message_type, "DESCRIPTOR", None)

    def decode(data: bytes) -> Any:
        try:
            message = deserialize(data)
        except DecodeError as error:
            raise _malformed(descriptor, data) from error
        if not allow_unknown and isinstance(message, Message):
            check_known(message)
        return message

    return decode


def check_known(message: Message) -> None:
    """Raise InvalidRequestError if `message`, or one inside it, carries a field that its type does not have."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    num_unknown = message.ByteSize() - known.ByteSize()
    if not num_unknown:
        return
    fix = "remove it, or use a server that knows it"
    # The rest names the field; a message of millions of parts or unknown fields is not worth that.
    found = None if num_unknown > _MAX_UNKNOWN_BYTES else _first_unknown(message)
    if found is None:
        name = message.DESCRIPTOR.full_name
        raise InvalidRequestError("", f"{num_unknown} bytes are no fields of {name}", fix, code="unknown_field")
    path, number, owner = found
    raise InvalidRequestError(
        f"{path}{number}", f"{owner.DESCRIPTOR.full_name} has no field number {number}", fix, code="unknown_field"
    )


def _first_unknown(message: Message) -> tuple[str, int, Message] | None:
    """Path, number and message of the first unknown field in what may be looked at."""
    for path, part in islice(_all_parts(message, ""), _MAX_PARTS):
        for unknown in _unknown_fields(part):
            return path, unknown.field_number, part
    return None


def _all_parts(message: Message, path: str) -> Iterator[tuple[str, Message]]:
    """`message` and all messages inside it, each with its path."""
    yield path, message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for name, part in _parts(field, value):
                yield from _all_parts(part, f"{path}{name}.")


def _parts(field: FieldDescriptor, value: Any) -> Iterator[tuple[str, Message]]:
    """The messages in a field's value, each with its name."""
    if isinstance(value, Message):
        yield field.name, value
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        for key in value:
            if isinstance(value[key], Message):
                yield f"{field.name}[{key}]", value[key]
    else:
        for index, part in enumerate(value):
            yield f"{field.name}[{index}]", part


def _unknown_fields(message: Message) -> Any:
    # The published types do not say that a set can be iterated.
    return UnknownFieldSet(message)


def _malformed(descriptor: Descriptor | None, data: bytes) -> InvalidRequestError:
    name = descriptor.full_name if descriptor is not None else "the request"
    path = (
        next(filter(None, islice(_texts(descriptor, data, ""), _MAX_PARTS)), None) if descriptor is not None else None
    )
    if path is not None:
        return InvalidRequestError(path, "is not valid UTF-8", "encode the text as UTF-8", code="invalid_utf8")
    return InvalidRequestError(
        "", f"the bytes are not a valid {name}", "send a whole message of that type", code="malformed_message"
    )


def _texts(descriptor: Descriptor, data: bytes, prefix: str) -> Iterator[str]:
    """For each field in `data`: its name if it is a string that is not UTF-8, else "". Ends at unreadable bytes."""
    try:
        Empty.FromString(data)  # to a message without fields everything is unknown: this checks the form alone
    except DecodeError:
        return
    for number, wire_type, value in _split(data):
        yield ""
        field = descriptor.fields_by_number.get(number)
        if field is None or wire_type != _LENGTH_DELIMITED:
            continue
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                value.decode("utf-8")
            except UnicodeDecodeError:
                yield prefix + field.name
        elif field.message_type is not None:
            yield from _texts(field.message_type, value, f"{prefix}{field.name}.")


def _split(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Number, wire type and, if it has a length, value of each field of well-formed bytes, up to the first group."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        size = _FIXED_SIZES.get(wire_type, 0)
        if wire_type == 0:
            _, at = _varint(data, at)
        elif wire_type == _LENGTH_DELIMITED:
            size, at = _varint(data, at)
        elif not size:
            return
        yield number, wire_type, data[at : at + size] if wire_type == _LENGTH_DELIMITED else b""
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at` and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
