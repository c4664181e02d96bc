"""Events of every format become the same rows, and an event that is not one says why."""

import io
import json
import re
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

from isthmus.features.definition.streams import Avro, Format, Json, Protobuf
from isthmus.features.errors import ConfigurationError, DependencyError
from isthmus.features.streams.formats import EventDecoder, StreamEvent

TIME = pa.timestamp("us", "UTC")
COLUMNS = pa.schema([
    ("bus", pa.string()), ("at", TIME), ("n", pa.int64()), ("small", pa.int32()), ("delay", pa.float64()),
    ("open", pa.bool_()), ("tags", pa.list_(pa.string())),
])  # fmt: skip
AT = datetime(2024, 3, 1, 12, 30, 1, 250_000, UTC)
ROWS = [
    {"bus": "A", "at": AT, "n": 2**62, "small": -5, "delay": 0.1, "open": True, "tags": ["x", "y"]},
    {"bus": "B", "at": AT, "n": 0, "small": 0, "delay": 0.0, "open": False, "tags": []},
]
AVRO = {
    "type": "record", "name": "Stop", "fields": [
        {"name": "bus", "type": "string"}, {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "n", "type": "long"}, {"name": "small", "type": "int"}, {"name": "delay", "type": "double"},
        {"name": "open", "type": "boolean"}, {"name": "tags", "type": {"type": "array", "items": "string"}},
    ],
}  # fmt: skip


def avro(row: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(AVRO), row)
    return stream.getvalue()


def descriptors() -> descriptor_pb2.FileDescriptorSet:
    files = descriptor_pb2.FileDescriptorSet()
    files.file.add().CopyFrom(descriptor_pb2.FileDescriptorProto.FromString(timestamp_pb2.DESCRIPTOR.serialized_pb))
    file = files.file.add(name="stop.proto", package="city", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    message, kinds = file.message_type.add(name="Stop"), descriptor_pb2.FieldDescriptorProto
    types = {"bus": kinds.TYPE_STRING, "at": kinds.TYPE_MESSAGE, "n": kinds.TYPE_INT64, "small": kinds.TYPE_INT32,
             "delay": kinds.TYPE_DOUBLE, "open": kinds.TYPE_BOOL, "tags": kinds.TYPE_STRING}  # fmt: skip
    for number, (name, kind) in enumerate(types.items(), 1):
        label = kinds.LABEL_REPEATED if name == "tags" else kinds.LABEL_OPTIONAL
        field = message.field.add(name=name, number=number, type=kind, label=label)
        if name == "at":
            field.type_name = ".google.protobuf.Timestamp"
    return files


def protobuf(row: dict[str, Any]) -> bytes:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptors().file:
        pool.Add(file)
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("city.Stop"))()
    for name, value in row.items():
        if name == "at":
            message.at.FromDatetime(value)
        elif name == "tags":
            message.tags.extend(value)
        else:
            setattr(message, name, value)
    return bytes(message.SerializeToString())


def plain(row: dict[str, Any], at: Any) -> bytes:
    return json.dumps({**row, "at": at}).encode()


@pytest.fixture
def registry() -> Iterator[str]:
    """A schema registry with Confluent's API that has one schema, number 7."""

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/schemas/ids/7"
            body = json.dumps({"schema": json.dumps(AVRO)} if found else {"error_code": 40403}).encode()
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def decoder(form: Format, root: Path) -> EventDecoder:
    return EventDecoder("stops", COLUMNS, ["at"], form, root)


def events(values: list[bytes]) -> list[StreamEvent]:
    return [StreamEvent("0", n, value) for n, value in enumerate(values)]


def test_every_format_gives_the_same_rows(tmp_path: Path, registry: str) -> None:
    (tmp_path / "stop.avsc").write_text(json.dumps(AVRO))
    (tmp_path / "stop.pb").write_bytes(descriptors().SerializeToString())
    frame = struct.pack(">bI", 0, 7)
    epoch = AT.timestamp()
    formats: list[tuple[Format, Callable[[dict[str, Any]], bytes]]] = [
        (Json(), lambda row: plain(row, AT.isoformat())),
        (Json("ms"), lambda row: plain(row, round(epoch * 1e3))),
        (Json("us"), lambda row: plain(row, round(epoch * 1e6))),
        (Avro("stop.avsc"), avro),
        (Avro(registry=registry), lambda row: frame + avro(row)),
        (Protobuf("stop.pb", "city.Stop"), protobuf),
        (Protobuf("stop.pb", "city.Stop", framed=True), lambda row: frame + b"\0" + protobuf(row)),
    ]
    for form, encode in formats:
        rows, places, unreadable = decoder(form, tmp_path).rows(events([encode(row) for row in ROWS]))
        assert (rows.to_pylist(), len(places), unreadable) == (ROWS, 2, []), form
        assert rows.schema.types == COLUMNS.types


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"{", "JSON is malformed|truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"\xff", "JSON is malformed|utf-8"),
        (b"", "truncated"),
        (b'{"bus": "A"}', "missing required field `at`"),
        (b'{"at": null}', "got `null` - at `\\$.at`"),
        (b'{"at": "2024-03-01T00:00:00"}', "timezone"),
        (b'{"at": "yesterday"}', "Invalid"),
        (b'{"at": "2024-03-01T00:00:00Z", "n": "1"}', "Expected `int | null`, got `str` - at `\\$.n`"),
        (b'{"at": "2024-03-01T00:00:00Z", "n": 1.5}', "Expected `int | null`, got `float`"),
        (b'{"at": "2024-03-01T00:00:00Z", "small": 2147483648}', "2147483647|< 2147483648"),
        (b'{"at": "2024-03-01T00:00:00Z", "tags": [null]}', "at `\\$.tags"),
    ],
)
def test_an_unreadable_event_has_a_reason(tmp_path: Path, value: bytes, reason: str) -> None:
    good = plain(ROWS[0], AT.isoformat())
    rows, places, unreadable = decoder(Json(), tmp_path).rows(events([good, value, good]))
    assert [event.offset for event in places] == [0, 2]
    assert rows.to_pylist() == [ROWS[0], ROWS[0]]
    assert [each.event.offset for each in unreadable] == [1]
    assert re.search(reason, unreadable[0].reason), unreadable[0].reason


@pytest.mark.parametrize("time", [99999999999999999, -99999999999999999, 253402300800, 9223372036854775807])
def test_a_time_that_no_column_holds_is_the_fault_of_its_event(tmp_path: Path, time: int) -> None:
    good = plain(ROWS[0], round(AT.timestamp()))
    rows, places, unreadable = decoder(Json("s"), tmp_path).rows(events([good, plain(ROWS[0], time), good]))
    assert ([event.offset for event in places], len(rows), len(unreadable)) == ([0, 2], 2, 1)
    assert unreadable[0].event.offset == 1


def test_new_and_missing_members_are_fine(tmp_path: Path) -> None:
    rows, _, unreadable = decoder(Json(), tmp_path).rows(events([b'{"at": "2024-03-01T00:00:00Z", "color": "red"}']))
    assert not unreadable
    assert rows.to_pylist()[0]["bus"] is None


@pytest.mark.parametrize(
    "value", [b"", b"\x01\0\0\0\x07", struct.pack(">bI", 0, 8) + avro(ROWS[0]), avro(ROWS[0]) + b"x"]
)
def test_avro_that_cannot_be_read(tmp_path: Path, registry: str, value: bytes) -> None:
    assert len(decoder(Avro(registry=registry), tmp_path).rows(events([value]))[2]) == 1


@pytest.mark.parametrize("value", [b"\xff\xff", b"\x0a\xff", struct.pack(">bI", 0, 7)])
def test_protobuf_that_cannot_be_read(tmp_path: Path, value: bytes) -> None:
    (tmp_path / "stop.pb").write_bytes(descriptors().SerializeToString())
    assert len(decoder(Protobuf("stop.pb", "city.Stop"), tmp_path).rows(events([value]))[2]) == 1


def test_a_registry_that_does_not_answer_is_no_fault_of_the_event(tmp_path: Path) -> None:
    with pytest.raises(DependencyError, match="does not answer"):
        decoder(Avro(registry="http://127.0.0.1:9"), tmp_path).rows(events([struct.pack(">bI", 0, 7) + avro(ROWS[0])]))


@pytest.mark.parametrize(
    ("form", "content", "problem"),
    [
        (Avro("stop.avsc"), None, "cannot be read"),
        (Avro("stop.avsc"), b"{}", "is not an Avro schema"),
        (Protobuf("stop.pb", "city.Stop"), b"\xff", "is not a descriptor set"),
        (Protobuf("stop.pb", "city.Train"), descriptors().SerializeToString(), "does not have the message city.Train"),
    ],
)
def test_a_schema_file_that_cannot_be_used(tmp_path: Path, form: Format, content: bytes | None, problem: str) -> None:
    if content is not None:
        for name in ("stop.avsc", "stop.pb"):
            (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=problem):
        decoder(form, tmp_path)


def test_a_column_that_events_cannot_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="column price: has type decimal"):
        EventDecoder("stops", COLUMNS.append(pa.field("price", pa.decimal128(5, 2))), ["at"], Json(), tmp_path)
