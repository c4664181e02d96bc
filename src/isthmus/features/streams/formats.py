"""Decode events to rows with the columns of their source."""

import io
import json
import re
from base64 import b64decode
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features import clock
from isthmus.features.days import FIRST, LAST
from isthmus.features.definition.streams import Avro, Format, Json, Protobuf
from isthmus.features.errors import ConfigurationError, DataError, IsthmusError, Problem, extra, first_line, one_of
from isthmus.features.streams.registry import RegisteredSchema, SchemaRegistry, unframe
from isthmus.features.types import SCALARS
from isthmus.features.values.arrow import ARROW

_SCALE = {"s": 1_000_000, "ms": 1_000, "us": 1}
_INT32, _INT64 = 1 << 31, 1 << 63
_TIME = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)$"
"""Times that Arrow and msgspec read alike. Events with other texts are decoded one by one, with msgspec."""
_STANDARD = re.compile(r"google/protobuf/\w+\.proto")
"""Files that every Protobuf library has, so that a registry does not keep them."""


class StreamEvent(msgspec.Struct, frozen=True, gc=False):
    """An undecoded event. `offset` is its position in its partition, ascending. `value` is None for a deletion."""

    partition: str
    offset: int
    value: bytes | None


class Unreadable(NamedTuple):
    """An event that cannot become a row, and the reason."""

    event: StreamEvent
    reason: str


class EventDecoder:
    """Decodes the events of a source to Arrow rows.

    `columns` are the types of the source's columns. Columns in `required` (the times) must not be null. Relative paths
    of schema files start from `root`. Raises ConfigurationError for a type that events cannot have or a schema file
    that cannot be read, and DependencyError if the format's library is missing.
    """

    def __init__(self, source: str, columns: pa.Schema, required: Sequence[str], form: Format, root: Path) -> None:
        self._where = f"source {source}, stream"
        self.schema = pa.schema([column.with_nullable(True) for column in columns])
        self._scale = _SCALE.get("iso" if isinstance(form, Avro) else form.times)
        # Columns may have names that Python's attributes cannot have.
        self._members = {f"f{n}": name for n, name in enumerate(columns.names)}
        self._decode = self._decoder(form, self._struct(required), root)
        lines = isinstance(form, Json) and not form.registry
        # Read times as texts: Arrow converts a whole column of them at once.
        self._decode_lines = msgspec.json.Decoder(self._struct(required, times=str)).decode_lines if lines else None

    def _struct(self, required: Sequence[str], times: Any = None) -> Any:
        fields = [(own, *self._type(self.schema.field(name), name in required, times))
                  for own, name in self._members.items()]  # fmt: skip
        return msgspec.defstruct("Event", fields, rename=self._members, kw_only=True, gc=False)

    def rows(self, events: Sequence[StreamEvent]) -> tuple[pa.Table, list[StreamEvent], list[Unreadable]]:
        """Return the rows of the readable events, these events in the same order, and the unreadable events.

        Raises DependencyError or DataError if the schema registry fails.
        """
        if (table := self._all_at_once(events)) is not None:
            return table, list(events), []
        decoded, readable, unreadable = self._one_by_one(events)
        try:
            return self._table(decoded), readable, unreadable
        except (pa.ArrowException, OverflowError, ValueError):
            # A value that no column can hold, such as a time beyond 64 bits: find the events, one by one.
            reasons = [self._problem(each) for each in decoded]
        unreadable += [Unreadable(event, why) for event, why in zip(readable, reasons, strict=True) if why]
        kept = [n for n, why in enumerate(reasons) if not why]
        return self._table([decoded[n] for n in kept]), [readable[n] for n in kept], unreadable

    def _all_at_once(self, events: Sequence[StreamEvent]) -> pa.Table | None:
        """Decode JSON events that are one line each. Return None if an event may be unreadable, or is not one line."""
        values = [event.value for event in events if event.value is not None]
        text = b"\n".join(values)
        if self._decode_lines is None or len(values) < len(events) or text.count(b"\n") != len(values) - 1:
            return None
        with suppress(msgspec.DecodeError, pa.ArrowException, OverflowError, ValueError):
            decoded: list[Any] = self._decode_lines(text)
            return self._table(decoded) if len(decoded) == len(events) else None
        return None

    def _one_by_one(self, events: Sequence[StreamEvent]) -> tuple[list[Any], list[StreamEvent], list[Unreadable]]:
        decoded, readable, unreadable = [], [], list[Unreadable]()
        for event in events:
            if event.value is None:
                unreadable.append(Unreadable(event, "is a deletion, without a value"))
                continue
            try:
                decoded.append(self._decode(event.value))
            except IsthmusError:
                raise
            except Exception as error:  # noqa: BLE001 - an event may be anything, and must not stop the others
                unreadable.append(Unreadable(event, first_line(error)))
            else:
                readable.append(event)
        return decoded, readable, unreadable

    def _problem(self, decoded: Any) -> str:
        try:
            self._table([decoded])
        except (pa.ArrowException, OverflowError, ValueError) as error:
            return first_line(error)
        return ""

    def _table(self, decoded: Sequence[Any]) -> pa.Table:
        columns = [self._column(decoded, name, field) for name, field in zip(self._members, self.schema, strict=True)]
        return pa.table(columns, schema=self.schema)

    def _column(self, decoded: Sequence[Any], name: str, field: pa.Field) -> pa.Array:
        values = [getattr(each, name) for each in decoded]
        if pa.types.is_timestamp(field.type):
            if self._scale:
                values = [None if value is None else value * self._scale for value in values]
            text = isinstance(next((value for value in values if value is not None), None), str)
            times = _parse_times(pa.array(values, pa.string()), field.type) if text else pa.array(values, field.type)
            last = pc.max(times.cast(pa.int64())).as_py()
            first = pc.min(times.cast(pa.int64())).as_py()
            if last is not None and not FIRST <= first <= last <= LAST:
                raise ValueError(f"{field.name} is outside the years 1 to 9999")
            return times
        return pa.array(values, field.type)

    def _type(self, field: pa.Field, required: bool, times: Any = None) -> tuple[Any, ...]:
        kind = self._python_type(field.type)
        if times is not None and pa.types.is_timestamp(field.type) and not self._scale:
            kind = times
        if kind is None:
            problem = Problem(f"{self._where}, column {field.name}", f"has type {field.type}",
                              f"one of {', '.join(map(str, SCALARS))}, or an array of these",
                              "cast the column at the writer of the source's data")  # fmt: skip
            raise ConfigurationError("definitions.py", [problem])
        return (kind,) if required else (kind | None, None)

    def _python_type(self, dtype: pa.DataType) -> Any:
        if pa.types.is_list(dtype):
            inner = self._python_type(dtype.value_type)
            # A type computed at run time, which type checkers do not accept in a subscript.
            return None if inner is None else list.__class_getitem__(inner)
        return {
            ARROW["Bool"]: bool,
            ARROW["Int32"]: Annotated[int, msgspec.Meta(ge=-_INT32, lt=_INT32)],
            ARROW["Int64"]: Annotated[int, msgspec.Meta(ge=-_INT64, le=_INT64 - 1)],
            ARROW["Float32"]: float,
            ARROW["Float64"]: float,
            ARROW["UnixTimestamp"]: int if self._scale else Annotated[datetime, msgspec.Meta(tz=True)],
            ARROW["String"]: str,
            ARROW["Bytes"]: bytes,
        }.get(dtype)

    def _decoder(self, form: Format, kind: Any, root: Path) -> Callable[[bytes], Any]:
        if isinstance(form, Json):
            return self._json(form, msgspec.json.Decoder(kind).decode, root)
        parse = self._avro(form, root) if isinstance(form, Avro) else self._protobuf(form, root)
        return lambda value: msgspec.convert(parse(value), kind)

    def _json(self, form: Json, decode: Callable[[bytes], Any], root: Path) -> Callable[[bytes], Any]:
        if form.schema:
            self._require_properties(root / form.schema)
        if not form.registry:
            return decode
        registry = SchemaRegistry(self._where, form.registry, "JSON", lambda found: found)

        def framed(value: bytes) -> Any:
            number, content = unframe(value)
            registry.schema(number)  # the columns have the types
            return decode(content)

        return framed

    def _require_properties(self, file: Path) -> None:
        """Raise ConfigurationError if a JSON schema gives a column a type from which it cannot be decoded."""
        problems = []
        try:
            properties = json.loads(self._file(file)).get("properties", {})
            for column in self.schema:
                types = properties.get(column.name, {}).get("type", [])
                types, accepted = [types] if isinstance(types, str) else types, self._json_types(column.type)
                if types and not accepted.intersection(types):
                    problems.append(
                        Problem(f"{self._where}, {file}, property {column.name}", f"has type {one_of(types)}",
                                f"{one_of(sorted(accepted))}, since the column has type {column.type}")
                    )  # fmt: skip
        except (ValueError, TypeError, AttributeError) as error:
            raise self._unusable(file, f"is not a JSON schema ({first_line(error)})") from error
        if problems:
            raise ConfigurationError("definitions.py", problems)

    def _json_types(self, dtype: pa.DataType) -> set[str]:
        if pa.types.is_list(dtype):
            return {"array"}
        if pa.types.is_boolean(dtype):
            return {"boolean"}
        text = not self._scale if pa.types.is_timestamp(dtype) else not pa.types.is_primitive(dtype)
        return {"string"} if text else {"integer", "number"}

    def _avro(self, form: Avro, root: Path) -> Callable[[bytes], Any]:
        with extra("streams"):
            import fastavro

        def parsed(found: RegisteredSchema) -> Any:
            named = dict[str, Any]()
            schemas = [fastavro.parse_schema(json.loads(text), named) for text in (*found.imports.values(), found.text)]
            return schemas[-1]

        if form.registry:
            registry = SchemaRegistry(self._where, form.registry, "AVRO", parsed)

            def framed(value: bytes) -> Any:
                number, content = unframe(value)
                return _whole(fastavro, registry.schema(number), content)

            return framed
        text = self._file(root / form.schema)
        try:
            written = fastavro.parse_schema(json.loads(text))
        except (ValueError, TypeError, KeyError, fastavro.schema.SchemaParseException) as error:
            raise self._unusable(root / form.schema, f"is not an Avro schema ({first_line(error)})") from error
        return lambda value: _whole(fastavro, written, value)

    def _protobuf(self, form: Protobuf, root: Path) -> Callable[[bytes], Any]:
        with extra("streams"):
            from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
            from google.protobuf.message import DecodeError
        if form.registry:
            registry = SchemaRegistry(self._where, form.registry, "PROTOBUF", self._compiled)
        else:
            file = root / form.descriptors
            try:
                pool, files = descriptor_pool.DescriptorPool(), descriptor_pb2.FileDescriptorSet()
                files.ParseFromString(self._file(file))
                for each in files.file:
                    pool.Add(each)
                only = pool.FindMessageTypeByName(form.message)
            except (DecodeError, TypeError) as error:
                raise self._unusable(file, f"is not a descriptor set of protoc ({first_line(error)})") from error
            except KeyError as error:
                raise self._unusable(file, f"does not have the message {form.message}") from error

        def parse(value: bytes) -> dict[str, Any]:
            place, number = [0], 0
            if form.registry or form.framed:
                number, content = unframe(value)
                place, value = _indexes(content)
            kind: Any = _message(registry.schema(number), place) if form.registry else only
            if kind.full_name != (form.message or kind.full_name):
                raise ValueError(f"is a message {kind.full_name}, not {form.message}")
            if place != [0] and not form.registry:
                raise ValueError("is not the first message of its schema file")
            try:
                message = message_factory.GetMessageClass(kind).FromString(value)
            except DecodeError as error:
                raise ValueError(f"is not a message {kind.full_name} ({first_line(error)})") from error
            return _members(message)

        return parse

    def _compiled(self, found: RegisteredSchema) -> Any:
        """Return the file descriptor of a schema. Raise DataError if the registry has not compiled it."""
        from google.protobuf import descriptor_pb2, descriptor_pool
        from google.protobuf.message import DecodeError

        pool, main = descriptor_pool.DescriptorPool(), "isthmus/event.proto"
        try:
            for name, text in (*found.imports.items(), (main, found.text)):
                file = descriptor_pb2.FileDescriptorProto.FromString(b64decode(text, validate=True))
                file.name = name
                for each in file.dependency:
                    _add_standard(pool, each)
                pool.Add(file)
            return pool.FindFileByName(main)
        except (DecodeError, ValueError, TypeError) as error:
            raise DataError(
                self._where, f"the schema registry does not return compiled Protobuf schemas ({first_line(error)})",
                expected="a descriptor in base64 for format=serialized",
                remedy="compile the schema with protoc; declare descriptors= and framed=True instead of registry=",
            ) from error  # fmt: skip

    def _file(self, file: Path) -> bytes:
        try:
            return file.read_bytes()
        except OSError as error:
            raise self._unusable(file, f"cannot be read ({error.strerror})") from error

    def _unusable(self, file: Path, found: str) -> ConfigurationError:
        return ConfigurationError("definitions.py", [Problem(self._where, f"{file} {found}")])


def _parse_times(texts: pa.Array, dtype: pa.DataType) -> pa.Array:
    if not pc.all(pc.match_substring_regex(texts, _TIME)).as_py():
        raise ValueError("a text may not be a time")
    return texts.cast(dtype)


def _whole(fastavro: Any, schema: Any, content: bytes) -> Any:
    stream = io.BytesIO(content)
    record = fastavro.schemaless_reader(stream, schema)
    if left := len(content) - stream.tell():
        raise ValueError(f"has {left} bytes after the Avro record")
    return record


def _add_standard(pool: Any, name: str) -> None:
    if _STANDARD.fullmatch(name):
        file = import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2").DESCRIPTOR
        for each in file.dependencies:
            _add_standard(pool, each.name)
        pool.AddSerializedFile(file.serialized_pb)


def _indexes(content: bytes) -> tuple[list[int], bytes]:
    """Split Confluent's place of a message in its schema file from the message: zigzag numbers after their count."""
    numbers, at = list[int](), 0
    while not numbers or len(numbers) <= numbers[0]:
        value = shift = 0
        while True:
            if at == len(content):
                raise ValueError("ends within the place of its message in the schema file")
            value |= (content[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if content[at - 1] < 128:
                break
        numbers.append(value >> 1 ^ -(value & 1))
    return numbers[1:] or [0], content[at:]


def _message(file: Any, place: Sequence[int]) -> Any:
    kind, kinds = file, list(file.message_types_by_name.values())
    for index in place:
        if not 0 <= index < len(kinds):
            raise ValueError(f"is message {'.'.join(map(str, place))} of its schema file, which does not exist")
        kind = kinds[index]
        kinds = list(kind.nested_types)
    return kind


def _members(message: Any) -> dict[str, Any]:
    members = dict[str, Any]()
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None:
            stamp = field.message_type.full_name == "google.protobuf.Timestamp"
            if field.is_repeated:
                members[field.name] = [_moment(each) for each in value] if stamp else None
            else:
                members[field.name] = _moment(value) if stamp and message.HasField(field.name) else None
        elif field.is_repeated:
            members[field.name] = list(value)
        elif not field.has_presence or message.HasField(field.name):
            members[field.name] = value
    return members


def _moment(stamp: Any) -> datetime:
    return clock.moment(stamp.seconds * 1_000_000 + stamp.nanos // 1000)
