"""Declarations of streams: where events arrive (`Kafka`, `RedisStream`, `FileStream`) and how they are encoded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias


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
