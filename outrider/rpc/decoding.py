"""Strict decoding of requests: what protobuf cannot read, or reads without understanding, is the client's mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from outrider.errors import InvalidRequestError

Deserializer = Callable[[bytes], Any]

_LENGTH_DELIMITED = 2


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


def check_known(message: Message, path: str = "") -> None:
    """Raise InvalidRequestError if `message`, or one inside it, carries a field that its type does not have."""
    for unknown in _unknown_fields(message):
        number = unknown.field_number
        raise InvalidRequestError(
            f"{path}{number}",
            f"{message.DESCRIPTOR.full_name} has no field number {number}",
            "remove it, or use a server that knows it",
            code="unknown_field",
        )
    for field, value in message.ListFields():
        if field.message_type is not None:
            for name, part in _parts(field, value):
                check_known(part, f"{path}{name}.")


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
    path = _bad_text(descriptor, data, "") if descriptor is not None else None
    if path is not None:
        return InvalidRequestError(path, "is not valid UTF-8", "encode the text as UTF-8", code="invalid_utf8")
    return InvalidRequestError(
        "", f"the bytes are not a valid {name}", "send a whole message of that type", code="malformed_message"
    )


def _bad_text(descriptor: Descriptor, data: bytes, prefix: str) -> str | None:
    """Name of the first string field in `data` that is not UTF-8; None if there is none or the bytes cannot be read."""
    try:
        # To a message without fields everything is unknown, so this splits any well-formed bytes into fields.
        fields = _unknown_fields(Empty.FromString(data))
    except DecodeError:
        return None
    for entry in fields:
        field = descriptor.fields_by_number.get(entry.field_number)
        if field is None or entry.wire_type != _LENGTH_DELIMITED:
            continue
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                entry.data.decode("utf-8")
            except UnicodeDecodeError:
                return prefix + field.name
        elif field.message_type is not None:
            found = _bad_text(field.message_type, entry.data, f"{prefix}{field.name}.")
            if found is not None:
                return found
    return None
