"""Codecs between structs and protobuf messages with equal field names, from tables that are built once at import."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar, get_origin, get_type_hints

import msgspec
from google.protobuf.message import Message

from outrider.errors import InvalidRequestError

StructT = TypeVar("StructT", bound=msgspec.Struct)
MessageT = TypeVar("MessageT", bound=Message)

Convert = Callable[[Any], Any]


class StructCodec(Generic[StructT, MessageT]):
    """Encodes a struct as a message and back, field by field.

    A field that is unset on the wire gets the struct's default, or None if it has none.
    """

    def __init__(
        self,
        struct: type[StructT],
        message: type[MessageT],
        *,
        packed: Mapping[str, str] | None = None,
        nested: Mapping[str, StructCodec[Any, Any]] | None = None,
        encoders: Mapping[str, Callable[[StructT], Any]] | None = None,
        decoders: Mapping[str, Callable[[MessageT], Any]] | None = None,
        local: Collection[str] = (),
    ) -> None:
        """Build the tables. Raises TypeError if a field of the struct has no counterpart.

        `packed`: fields that are lists here and bytes in the message, with `array`'s type code (little-endian).
        `nested`: fields that are structs, or lists of them. `encoders`: fields of the message computed from the whole
        struct. `decoders`: fields of the struct computed from the whole message. `local`: fields of the struct that the
        message does not have.
        """
        packed, nested, encoders, decoders = packed or {}, nested or {}, encoders or {}, decoders or {}
        self.struct, self._message = struct, message
        self._encoders, self._decoders = list(encoders.items()), list(decoders.items())
        known = {field.name: field for field in message.DESCRIPTOR.fields}
        names = [name for name in struct.__struct_fields__ if name not in local]
        self._encoded = [name for name in names if name in known and name not in encoders]
        self._decoded = [name for name in names if name not in decoders]
        if missing := set(self._decoded) - known.keys():
            raise TypeError(f"{message.DESCRIPTOR.full_name} lacks {', '.join(sorted(missing))}")
        self._of_struct, self._of_message = _reader(self._encoded), _reader(self._decoded)
        self._convert_out: list[tuple[str, Convert]] = []
        self._convert_in: list[tuple[str, Convert]] = []
        hints = get_type_hints(struct)
        for name in self._encoded:
            if name in packed:
                self._convert_out.append((name, _packer(packed[name])))
            elif name in nested:
                self._convert_out.append((name, _encoder(nested[name], known[name].is_repeated)))
        for name in self._decoded:
            if name in packed:
                self._convert_in.append((name, _unpacker(packed[name], f"{message.DESCRIPTOR.name.lower()}.{name}")))
            elif name in nested:
                collect = _container(hints[name]) if known[name].is_repeated else None
                self._convert_in.append((name, _decoder(nested[name], collect)))
            elif known[name].is_repeated:
                self._convert_in.append((name, _container(hints[name])))
        defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
        self._unset = [
            (name, None if defaults[name] is msgspec.NODEFAULT else defaults[name])
            for name in self._decoded
            if known[name].has_presence
        ]
        # A fast path for small structs, of which a message brings many.
        self._is_plain = not (self._convert_in or self._unset or decoders or local)

    def encode(self, struct: StructT) -> MessageT:
        """Return the struct as a message."""
        fields = dict(zip(self._encoded, self._of_struct(struct), strict=True))
        for name, convert in self._convert_out:
            fields[name] = convert(fields[name])
        for name, make in self._encoders:
            fields[name] = make(struct)
        return self._message(**fields)

    def decode(self, message: MessageT) -> StructT:
        """Return the message as a struct. Raises InvalidRequestError for a packed array of the wrong size."""
        values = self._of_message(message)
        if self._is_plain:
            return self.struct(*values)
        fields = dict(zip(self._decoded, values, strict=True))
        for name, convert in self._convert_in:
            fields[name] = convert(fields[name])
        for name, default in self._unset:
            if not message.HasField(name):
                fields[name] = default
        for name, make in self._decoders:
            fields[name] = make(message)
        return self.struct(**fields)


def _reader(names: list[str]) -> Callable[[object], tuple[Any, ...]]:
    """Return a function that reads these attributes into a tuple, which `attrgetter` does not do for a single one."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda source: tuple(getattr(source, name) for name in names)


def _container(hint: Any) -> Convert:
    """Return the type that collects values of a repeated field or a map: list, tuple, frozenset or dict."""
    origin: Any = get_origin(hint)
    return list if origin is Sequence else origin


def _packer(code: str) -> Convert:
    return lambda values: array(code, values).tobytes()


def _unpacker(code: str, label: str) -> Convert:
    size = array(code).itemsize

    def unpack(data: bytes) -> list[Any]:
        if len(data) % size:
            raise InvalidRequestError(label, f"{len(data)} bytes are no whole number of {size}-byte values")
        return array(code, data).tolist()

    return unpack


def _encoder(codec: StructCodec[Any, Any], is_repeated: bool) -> Convert:
    if is_repeated:
        return lambda structs: [codec.encode(struct) for struct in structs]
    return lambda struct: None if struct is None else codec.encode(struct)


def _decoder(codec: StructCodec[Any, Any], collect: Convert | None) -> Convert:
    if collect is None:
        return codec.decode
    return lambda messages: collect([codec.decode(message) for message in messages])
