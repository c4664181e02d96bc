"""Declarations of streams: where events arrive (`Kafka`, `RedisStream`, `FileStream`) and how they are encoded."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from isthmus.features.definition.failure import type_problems
from isthmus.features.errors import Problem, one_of

USER = re.compile(r"(?!(?i:abfss?)://[^/:@]*@)[^/]*://[^/]*@")
"""A URL with a user. In Azure's URLs, the part before "@" is a container."""
VARIABLE = re.compile(r"(?!ISTHMUS_)[A-Za-z_][A-Za-z0-9_]*")
_TIMES = ("iso", "s", "ms", "us")
_SECRET = (".password", ".key.pem", ".secret")
"""Endings of the names of librdkafka's properties that hold secrets."""


@dataclass(frozen=True)
class Json:
    """Events as JSON objects, one column per member. Unknown members are ignored.

    Missing members are null. An event without one of the source's times is unreadable.

    Attributes:
        times: form of the time columns: ISO 8601 text with a time zone, or seconds, milliseconds or microseconds since
            1970 UTC as numbers.
        schema: JSON schema of the events, relative to the project. `apply` compares the types of its properties with
            the columns.
        registry: URL of a schema registry, as for `Avro`.
    """

    times: Literal["iso", "s", "ms", "us"] = "iso"
    schema: str = field(default="", kw_only=True)
    registry: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Avro:
    """Events as Avro records, with the schema in a file or in a schema registry.

    Attributes:
        schema: `.avsc` file with the writers' schema, relative to the project.
        registry: URL of a schema registry with Confluent's API; each event then begins with the id of its schema.
            `${NAME}` is replaced by the environment variable, as in `https://${USER}:${PASSWORD}@host`.
    """

    schema: str = ""
    registry: str = ""


@dataclass(frozen=True)
class Protobuf:
    """Events as Protobuf messages.

    Attributes:
        descriptors: file that `protoc --descriptor_set_out=FILE --include_imports` wrote, relative to the project.
        message: full name of the message, such as `flights.Landed`. With a registry, it may be left out; other
            messages are unreadable.
        framed: True if events begin with a schema id of Confluent's registry. The id is skipped. The message must be
            the first one of its schema file.
        times: form of the time columns: "iso" for `google.protobuf.Timestamp`; seconds, milliseconds or microseconds
            since 1970 UTC for numbers.
        registry: URL of a schema registry, as for `Avro`, that returns compiled schemas (`format=serialized`).
    """

    descriptors: str = ""
    message: str = ""
    framed: bool = False
    times: Literal["iso", "s", "ms", "us"] = "iso"
    registry: str = field(default="", kw_only=True)


Format: TypeAlias = Json | Avro | Protobuf


@dataclass(frozen=True)
class Kafka:
    """A topic of Apache Kafka or of another broker with Kafka's protocol.

    Attributes:
        topic: name of the topic.
        servers: addresses of brokers, `HOST:PORT`, separated by commas.
        properties: options of librdkafka, for example for TLS and SASL. `${NAME}` in a value is replaced by the
            environment variable, so that no password stands in the definitions.
    """

    topic: str
    servers: str
    format: Format = field(default_factory=Json)
    properties: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def name(self) -> str:
        """Name of the topic. A source whose stream has another name starts at its beginning."""
        return f"topic {self.topic}"


@dataclass(frozen=True)
class RedisStream:
    """A Redis stream.

    Attributes:
        key: key of the stream.
        connection: environment variable with the URL of the Redis server; by default the project's online store.
        member: name of the entry's field that holds the event.
    """

    key: str
    format: Format = field(default_factory=Json)
    connection: str = field(default="", kw_only=True)
    member: str = field(default="event", kw_only=True)

    @property
    def name(self) -> str:
        return f"Redis stream {self.connection} {self.key}"


@dataclass(frozen=True)
class FileStream:
    """A folder in which complete files appear, with an event per line. Files are never changed once they are there.

    Attributes:
        folder: folder, relative to the project. Files whose name begins with a dot are ignored.
    """

    folder: str
    format: Json = field(default_factory=Json)

    @property
    def name(self) -> str:
        return f"folder {self.folder}"


Stream: TypeAlias = Kafka | RedisStream | FileStream


def view_problems(view: str, sources: Sequence[str], *, bounded: bool) -> Iterator[Problem]:
    """Yield why no stream can keep a view up to date, from the names of its sources that have one."""
    if len(sources) > 1:
        yield Problem(
            view, f"reads several streams (of {' and '.join(sources)})", "one source with a stream",
            "declare a view for each stream, or leave stream= out of all sources but one: builds still read the others",
        )  # fmt: skip
    if sources and not bounded:
        yield Problem(
            view, f"reads the stream of {sources[0]} without a lookback", "lookback=timedelta(...)",
            "declare how far before and after a row it reads; without a bound, every event needs all others",
        )  # fmt: skip


def stream_problems(where: str, stream: Stream) -> Iterator[Problem]:
    if wrong := type_problems(stream, f"{where}, ") or type_problems(stream.format, f"{where}, "):
        yield from wrong
        return
    yield from _format_problems(where, stream, stream.format)
    if isinstance(stream, Kafka):
        yield from _property_problems(where, stream)
    if isinstance(stream, RedisStream) and stream.connection and not VARIABLE.fullmatch(stream.connection):
        yield Problem(f"{where}, connection", "is not the name of an environment variable",
                      "the variable with the URL of the Redis server")  # fmt: skip


def _format_problems(where: str, stream: Stream, format_: Format) -> Iterator[Problem]:
    if (times := getattr(format_, "times", "iso")) not in _TIMES:
        yield Problem(f"{where}, times", repr(times), one_of(_TIMES))
    where = f"{where}, {type(format_).__name__}"
    name = "descriptors" if isinstance(format_, Protobuf) else "schema"
    file = getattr(format_, name)
    if file and format_.registry:
        yield Problem(where, "has a schema file and a registry", f"{name}= or registry=")
    elif not file and not format_.registry and not isinstance(format_, Json):
        yield Problem(where, "has no schema", f"{name}= or registry=")
    if isinstance(format_, Protobuf) and file and not format_.message:
        yield Problem(where, "has no message", 'the name of a message, like "flights.Landed"')
    if format_.registry and isinstance(stream, FileStream):
        yield Problem(where, "a file has an event per line, without the id of a schema", "no registry=")
    if (user := USER.match(format_.registry)) and "${" not in user[0]:
        yield Problem(f"{where}, registry", "has a user in its URL",
                      "environment variables, like https://${USER}:${PASSWORD}@host")  # fmt: skip


def _property_problems(where: str, stream: Kafka) -> Iterator[Problem]:
    if not all(isinstance(text, str) for pair in stream.properties.items() for text in pair):
        yield Problem(
            f"{where}, properties", "have a name or value that is not a text", 'texts like {"client.id": "isthmus"}'
        )
        return
    for name, value in stream.properties.items():
        if name.endswith(_SECRET) and "${" not in value:
            yield Problem(f"{where}, property {name}", "is written in the definitions",
                          f'an environment variable, like {{"{name}": "${{KAFKA_SECRET}}"}}')  # fmt: skip
