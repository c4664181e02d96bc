"""Events of every format become the same rows, and an event that is not one says why."""

import io
import json
import logging
import re
import struct
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

from isthmus.features.definition.streams import Avro, Format, Json, Protobuf
from isthmus.features.errors import ConfigurationError, DataError, DependencyError
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


JSON_SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}, "delay": {"type": ["null", "number"]}}}
NAMED = {**AVRO, "fields": [{"name": "bus", "type": "city.Bus"}, *AVRO["fields"][1:]]}


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


def nested() -> dict[str, bytes]:
    """Schema files whose third message has the messages `Other` and `Stop`. `Stop` has a part from another file."""
    shared = descriptors().file[1]
    file = descriptor_pb2.FileDescriptorProto(name="default", package="city.trips", syntax="proto3")
    file.dependency.extend(["shared/stop.proto", "google/protobuf/api.proto"])
    file.message_type.add(name="First")
    file.message_type.add(name="Second")
    trips = file.message_type.add(name="Trips")
    trips.nested_type.add(name="Other")
    trips.nested_type.add().CopyFrom(shared.message_type[0])
    kinds = descriptor_pb2.FieldDescriptorProto
    more = trips.nested_type[1].field
    more.add(name="next", number=20, type=kinds.TYPE_MESSAGE, type_name=".city.Stop", label=kinds.LABEL_OPTIONAL)
    return {"": file.SerializeToString(), "shared/stop.proto": shared.SerializeToString()}


def compiled(file: bytes) -> str:
    return b64encode(file).decode()


@dataclass
class Registry:
    """What a schema registry with Confluent's API answers."""

    url: str = ""
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    login: str = ""


@pytest.fixture
def registry() -> Iterator[Registry]:
    one, files = Registry(), nested()
    reference = [{"name": "shared/stop.proto", "subject": "a/b", "version": 3}]
    one.answers = {
        "/schemas/ids/7": {"schema": json.dumps(AVRO)},
        "/schemas/ids/9": {"schema": json.dumps(JSON_SCHEMA), "schemaType": "JSON"},
        "/schemas/ids/10?format=serialized": {"schema": compiled(descriptors().file[1].SerializeToString()),
                                              "schemaType": "PROTOBUF"},
        "/schemas/ids/11?format=serialized": {"schema": compiled(files[""]), "schemaType": "PROTOBUF",
                                              "references": reference},
        "/subjects/a%2Fb/versions/3?deleted=true&format=serialized": {"schema": compiled(files["shared/stop.proto"])},
        "/schemas/ids/12?format=serialized": {"schema": 'syntax = "proto3";', "schemaType": "PROTOBUF"},
        "/schemas/ids/13": {"schema": json.dumps(NAMED),
                            "references": [{"name": "city.Bus", "subject": "bus", "version": 1}]},
        "/subjects/bus/versions/1?deleted=true": {
            "schema": json.dumps({"type": "fixed", "name": "Bus", "namespace": "city", "size": 1})
        },
    }  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            one.asked.append(self.path)
            found = one.answers.get(self.path)
            body, status = found, 200
            if one.login and self.headers["Authorization"] != f"Basic {b64encode(one.login.encode()).decode()}":
                body, status = {"error_code": 401, "message": "Unauthorized"}, 401
            elif found is None:
                code = 40403 if self.path.startswith(("/schemas/ids/", "/subjects/")) else 404
                body, status = {"error_code": code, "message": "not found"}, 404
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    one.url = f"http://127.0.0.1:{server.server_port}"
    yield one
    server.shutdown()
    server.server_close()


def frame(number: int, message: bytes = b"") -> bytes:
    return struct.pack(">bI", 0, number) + message


def decoder(form: Format, root: Path) -> EventDecoder:
    return EventDecoder("stops", COLUMNS, ["at"], form, root)


def events(values: list[bytes]) -> list[StreamEvent]:
    return [StreamEvent("0", n, value) for n, value in enumerate(values)]


def test_every_format_gives_the_same_rows(tmp_path: Path, registry: Registry) -> None:
    (tmp_path / "stop.avsc").write_text(json.dumps(AVRO))
    (tmp_path / "stop.pb").write_bytes(descriptors().SerializeToString())
    (tmp_path / "stop.json").write_text(json.dumps(JSON_SCHEMA))
    url = registry.url + "/"
    epoch = AT.timestamp()
    formats: list[tuple[Format, Callable[[dict[str, Any]], bytes]]] = [
        (Json(), lambda row: plain(row, AT.isoformat())),
        (Json("ms"), lambda row: plain(row, round(epoch * 1e3))),
        (Json("us"), lambda row: plain(row, round(epoch * 1e6))),
        (Json(schema="stop.json"), lambda row: plain(row, AT.isoformat())),
        (Json(registry=url), lambda row: frame(9) + plain(row, AT.isoformat())),
        (Avro("stop.avsc"), avro),
        (Avro(registry=url), lambda row: frame(7) + avro(row)),
        (Protobuf("stop.pb", "city.Stop"), protobuf),
        (Protobuf("stop.pb", "city.Stop", framed=True), lambda row: frame(7, b"\0") + protobuf(row)),
        (Protobuf(registry=url), lambda row: frame(10, b"\0") + protobuf(row)),
        (Protobuf(registry=url, message="city.Stop"), lambda row: frame(10, b"\2\0") + protobuf(row)),
        # The place is the third message's second one: a count and two numbers, each times two.
        (Protobuf(registry=url), lambda row: frame(11, b"\4\4\2") + protobuf(row)),
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
    ("kind", "value", "reason"),
    [
        (Avro, b"", "does not begin with the id of a schema"),
        (Avro, b"\x01\0\0\0\x07", "does not begin with the id of a schema"),
        (Avro, frame(8) + avro(ROWS[0]), "the schema registry does not have schemas/ids/8"),
        (Avro, frame(9) + avro(ROWS[0]), "schema 9 of the registry has type JSON, not AVRO"),
        (Avro, frame(7) + avro(ROWS[0]) + b"x", "has 1 bytes after the Avro record"),
        (Json, plain(ROWS[0], AT.isoformat()), "does not begin with the id of a schema"),
        (Json, frame(8) + plain(ROWS[0], AT.isoformat()), "does not have schemas/ids/8"),
        (Json, frame(7) + plain(ROWS[0], AT.isoformat()), "has type AVRO, not JSON"),
        (Json, frame(9) + plain(ROWS[0], 3), "Expected `str`, got `int`|Expected `datetime`, got `int`"),
        (Protobuf, protobuf(ROWS[0]), "does not begin with the id of a schema"),
        (Protobuf, frame(8, b"\0") + protobuf(ROWS[0]), "does not have schemas/ids/8"),
        (Protobuf, frame(7, b"\0") + protobuf(ROWS[0]), "does not have schemas/ids/7"),
        (Protobuf, frame(10), "ends within the place of its message"),
        (Protobuf, frame(10, b"\6\0"), "ends within the place of its message"),
        (Protobuf, frame(10, b"\2\1"), "is message -1 of its schema file, which does not exist"),
        (Protobuf, frame(10, b"\2\2"), "is message 1 of its schema file, which does not exist"),
        (Protobuf, frame(10, b"\0\xff\xff"), "is not a message city.Stop"),
        (Protobuf, frame(11, b"\2\4"), "is a message city.trips.Trips, not city.Stop"),
    ],
)  # fmt: skip
def test_an_event_that_does_not_fit_its_registry(
    tmp_path: Path, registry: Registry, kind: type[Format], value: bytes, reason: str
) -> None:
    form = Protobuf(registry=registry.url, message="city.Stop") if kind is Protobuf else kind(registry=registry.url)
    unreadable = decoder(form, tmp_path).rows(events([value]))[2]
    assert len(unreadable) == 1
    assert re.search(reason, unreadable[0].reason), unreadable[0].reason


@pytest.mark.parametrize("value", [b"\xff\xff", b"\x0a\xff", struct.pack(">bI", 0, 7)])
def test_protobuf_that_cannot_be_read(tmp_path: Path, value: bytes) -> None:
    (tmp_path / "stop.pb").write_bytes(descriptors().SerializeToString())
    assert len(decoder(Protobuf("stop.pb", "city.Stop"), tmp_path).rows(events([value]))[2]) == 1


def test_avro_may_refer_to_schemas_of_other_subjects(tmp_path: Path, registry: Registry) -> None:
    columns = COLUMNS.set(0, pa.field("bus", pa.binary()))
    value = frame(13) + avro(ROWS[0])[1:]  # a fixed value has no length
    own = EventDecoder("stops", columns, ["at"], Avro(registry=registry.url), tmp_path)
    assert own.rows(events([value]))[0].to_pylist() == [{**ROWS[0], "bus": b"A"}]


def test_each_schema_is_fetched_once_and_a_missing_one_not_for_each_event(tmp_path: Path, registry: Registry) -> None:
    own = decoder(Avro(registry=registry.url), tmp_path)
    values = [frame(number) + avro(ROWS[0]) for number in (7, 8, 7, 8)]
    assert [len(part) for part in own.rows(events(values))] == [2, 2, 2]
    assert len(own.rows(events(values))[2]) == 2
    assert registry.asked == ["/schemas/ids/7", "/schemas/ids/8"]


def test_bytes_of_confluents_serializer(tmp_path: Path, registry: Registry) -> None:
    schema = (
        "CgpzdG9wLnByb3RvEgRjaXR5Gh9nb29nbGUvcHJvdG9idWYvdGltZXN0YW1wLnByb3RvIgcKBUZpcnN0IkQKBVRyaXBzGjsKBFN0b3ASCwoDYn"
        "VzGAEgASgJEiYKAmF0GAIgASgLMhouZ29vZ2xlLnByb3RvYnVmLlRpbWVzdGFtcGIGcHJvdG8z"
    )
    registry.answers["/schemas/ids/20?format=serialized"] = {"schema": schema, "schemaType": "PROTOBUF"}
    value = b"\x00\x00\x00\x00\x14\x04\x02\x00\n\x01A\x12\x06\x08\xc8\x94\x87\xaf\x06"
    own = decoder(Protobuf(registry=registry.url, message="city.Trips.Stop"), tmp_path)
    rows, _, unreadable = own.rows(events([value]))
    assert not unreadable
    assert rows.select(["bus", "at"]).to_pylist() == [{"bus": "A", "at": AT.replace(second=0, microsecond=0)}]


FORMATS = [Json, Avro, Protobuf]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_registry_that_does_not_answer_is_no_fault_of_the_event(tmp_path: Path, kind: type[Format]) -> None:
    own = decoder(kind(registry="http://user:hidden@127.0.0.1:9"), tmp_path)
    with pytest.raises(DependencyError, match=r"registry http://127\.0\.0\.1:9 does not answer.*no event is lost"):
        own.rows(events([frame(7) + b"\0"]))


@pytest.mark.parametrize("kind", FORMATS)
def test_another_server_is_no_fault_of_the_event(tmp_path: Path, registry: Registry, kind: type[Format]) -> None:
    with pytest.raises(DataError, match=r"/api/schemas/ids/7 is not a schema.*Confluent's API"):
        decoder(kind(registry=f"{registry.url}/api"), tmp_path).rows(events([frame(7) + b"\0"]))


def test_the_password_of_a_registry_is_used_and_not_shown(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    registry.login = "me:hid/den"
    monkeypatch.setenv("LOGIN", "me:hid%2Fden")
    value = frame(7) + avro(ROWS[0])
    url = registry.url.replace("//", "//${LOGIN}@")
    assert len(decoder(Avro(registry=url), tmp_path).rows(events([value]))[0]) == 1
    registry.login = "other:word"
    with pytest.raises(DependencyError, match="answers 401 to http://127") as failed:
        decoder(Avro(registry=url), tmp_path).rows(events([value]))
    assert "HTTP Request: GET http://127.0.0.1" in caplog.text
    assert "hid" not in caplog.text + str(failed.value) + str(failed.value.__cause__)
    monkeypatch.setenv("LOGIN", "me:hid@den:1/")
    with pytest.raises(ConfigurationError, match=r"is not the URL of a schema registry.*Percent-encode") as failed_url:
        decoder(Avro(registry=url.replace("http:", "ftp:")), tmp_path)
    monkeypatch.delenv("LOGIN")
    with pytest.raises(ConfigurationError, match="the environment variable LOGIN is not set"):
        decoder(Avro(registry=url), tmp_path)
    assert "den" not in str(failed_url.value)


def test_a_registry_that_does_not_compile_protobuf(tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(DataError, match=r"does not return compiled Protobuf schemas.*framed=True"):
        decoder(Protobuf(registry=registry.url), tmp_path).rows(events([frame(12, b"\0")]))


@pytest.mark.parametrize(
    ("form", "content", "problem"),
    [
        (Avro("stop.avsc"), None, "cannot be read"),
        (Avro("stop.avsc"), b"{}", "is not an Avro schema"),
        (Json(schema="stop.avsc"), b"[]", "is not a JSON schema"),
        (
            Json(schema="stop.avsc"),
            b'{"properties": {"n": {"type": "string"}}}',
            "property n: has type string; expected one of integer, number, since the column has type int64",
        ),
        (
            Json("ms", schema="stop.avsc"),
            b'{"properties": {"at": {"type": ["string", "null"]}}}',
            "property at: has type",
        ),
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
