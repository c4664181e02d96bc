"""Check the `stream` setting of a source, and its format."""

import re
from collections.abc import Iterator
from datetime import timedelta

from isthmus.features.definition.failure import type_problems
from isthmus.features.definition.spec import Source
from isthmus.features.definition.streams import FileStream, Format, Json, Kafka, Protobuf, RedisStream, Stream
from isthmus.features.errors import Problem, one_of

USER = re.compile("[^/]*://[^/]*@")
VARIABLE = re.compile(r"(?!ISTHMUS_)[A-Za-z_][A-Za-z0-9_]*")
_TIMES = ("iso", "s", "ms", "us")
_SECRET = (".password", ".key.pem", ".secret")
"""Endings of the names of librdkafka's properties that hold secrets."""


def stream_problems(where: str, source: Source, stream: Stream) -> Iterator[Problem]:
    if source.timestamp is None:
        yield Problem(where, "the source has no timestamp=", "the column with the time of an event")
    if source.lateness < timedelta(0):
        yield Problem(where, f"lateness is {source.lateness}", "zero or more")
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
