"""Schemas of a registry with Confluent's API, and the bytes with which events name them."""

import os
import re
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

from isthmus.features.errors import ConfigurationError, DataError, DependencyError, Problem, extra, first_line

_FRAME = struct.Struct(">bI")
"""The bytes before an event whose schema is in the registry: zero, then the schema's id."""
_MISSING_SECONDS = 10.0
"""Seconds after which an id is looked up again that the registry did not have."""
_NOT_FOUND = range(40400, 40500)
"""Error codes of Confluent's API for a schema, subject or version that does not exist."""
_VARIABLE = re.compile(r"\$\{(\w+)\}")
T = TypeVar("T")


class RegisteredSchema(NamedTuple):
    """A schema as the registry has it. `imports` are the schemas that it refers to, by name, dependencies first."""

    text: str
    imports: Mapping[str, str]


class SchemaRegistry(Generic[T]):
    """Fetches schemas by their ids, each once.

    `kind` is the type that the schemas must have: "AVRO", "JSON" or "PROTOBUF". `parse` makes what `schema` returns.
    `${NAME}` in the URL is replaced by the environment variable. Raises ConfigurationError if it is not set or the URL
    is wrong. The user and password of the URL are in no message.
    """

    def __init__(self, where: str, url: str, kind: str, parse: Callable[[RegisteredSchema], T]) -> None:
        with extra("streams"):
            import httpx
        self._http, self._where, self._kind, self._parse = httpx, where, kind, parse
        try:
            address = httpx.URL(expand(where, url))
        except httpx.InvalidURL:
            address = httpx.URL()
        if address.scheme not in ("http", "https") or not address.host:
            problem = Problem(f"{where}, registry", "is not the URL of a schema registry", "http://HOST:PORT",
                              "percent-encode / ? # and @ in a password")  # fmt: skip
            raise ConfigurationError("definitions.py", [problem])
        # httpx logs URLs, so the password must not be part of them.
        self._login = (address.username, address.password) if address.userinfo else None
        self._url = str(address.copy_with(userinfo=b"")).rstrip("/")
        self._schemas = dict[int, T]()
        self._missing = dict[int, tuple[float, str]]()

    def schema(self, number: int) -> T:
        """Return the parsed schema with this id.

        Raises ValueError if the registry does not have it, or has one of another type; the event is then unreadable.
        Raises DependencyError if the registry does not answer, and DataError if its answer is not a schema.
        """
        if number not in self._schemas:
            until, reason = self._missing.get(number, (0.0, ""))
            if time.monotonic() < until:
                raise ValueError(reason)
            try:
                self._schemas[number] = self._parse(self._fetch(number))
            except ValueError as error:
                self._missing[number] = time.monotonic() + _MISSING_SECONDS, str(error)
                raise
        return self._schemas[number]

    def _fetch(self, number: int) -> RegisteredSchema:
        found, text = self._get(f"schemas/ids/{number}")
        if (kind := found.get("schemaType") or "AVRO") != self._kind:
            raise ValueError(f"schema {number} of the registry has type {kind}, not {self._kind}")
        imports = dict[str, str]()
        self._import(found.get("references") or (), imports)
        return RegisteredSchema(text, imports)

    def _import(self, references: Sequence[Mapping[str, Any]], imports: dict[str, str]) -> None:
        for each in references:
            if each["name"] not in imports:
                subject = quote(each["subject"], safe="")
                found, text = self._get(f"subjects/{subject}/versions/{each['version']}", deleted="true")
                self._import(found.get("references") or (), imports)
                imports[each["name"]] = text

    def _get(self, path: str, **query: str) -> tuple[dict[str, Any], str]:
        if self._kind == "PROTOBUF":
            query["format"] = "serialized"
        url = f"{self._url}/{path}"
        try:
            reply = self._http.get(url, params=query, auth=self._login, timeout=10)
        except self._http.HTTPError as error:
            problem = f"the schema registry {self._url} does not answer ({first_line(error)})"
            remedy = "start it, or correct registry=; no event is lost, it is read again from its offset"
            raise DependencyError(self._where, problem, remedy=remedy) from error
        try:
            body = reply.json()
        except ValueError:
            body = None
        body = body if isinstance(body, dict) else {}
        missing = reply.status_code == self._http.codes.NOT_FOUND
        if missing and body.get("error_code") in _NOT_FOUND:
            raise ValueError(f"the schema registry does not have {path}")
        if not reply.is_success and not missing:
            raise DependencyError(self._where, f"the schema registry answers {reply.status_code} to {url}")
        if missing or not isinstance(body.get("schema"), str):
            raise DataError(self._where, f"{url} is not a schema", expected="Confluent's API of a schema registry")
        return body, body["schema"]


def expand(where: str, text: str) -> str:
    """Replace each `${NAME}` by the environment variable. Raise ConfigurationError if it is not set."""

    def value(found: re.Match[str]) -> str:
        if own := os.environ.get(found[1]):
            return own
        problem = Problem(where, f"the environment variable {found[1]} is not set")
        raise ConfigurationError("definitions.py", [problem])

    return _VARIABLE.sub(value, text)


def unframe(value: bytes) -> tuple[int, bytes]:
    """Split an event into the id of its schema and the rest. Raise ValueError if it does not begin with an id."""
    if len(value) < _FRAME.size or value[0]:
        raise ValueError("does not begin with the id of a schema")
    return _FRAME.unpack_from(value)[1], value[_FRAME.size :]
