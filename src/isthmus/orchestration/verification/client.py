"""A private API of the project: a real server, whose answers the verdict compares."""

import http.client
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from isthmus.features import errors
from isthmus.features.contract.contract import RESERVED, SEPARATOR, STATUS, Contract
from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError, DependencyError, IsthmusError
from isthmus.features.types import DataType, Float32
from isthmus.features.values.columns import ARROW, Values, from_python
from isthmus.features.values.entitykey import KeyValue
from isthmus.orchestration.api.server import running, settings
from isthmus.orchestration.project import Project
from isthmus.serving.limits import Limits
from isthmus.serving.wire.formats import Format

LOT = 2_000
"""Rows of a request, where the limits of the project let through as many."""
READY_SECONDS = 20.0
ANSWER_SECONDS = 65.0
"""Longer than any request may take by the server's own deadline."""
_PAUSE_SECONDS = 0.02
_NO_START = "mend what it names; `isthmus serve` must be able to start"

Column = tuple[DataType, Values]
"""The values that a request gives for a name."""


class Client:
    """A running server of the project, asked by this process alone.

    Args:
        contract: the contract it must answer under.
        limits: what it lets through in one request.
        server: its process.
        log: where it logs, to say why it does not answer.
    """

    def __init__(self, contract: Contract, limits: Limits, server: "subprocess.Popen[bytes]", log: Path) -> None:
        self._contract, self._limits, self._server, self._log = contract, limits, server, log
        self._open: http.client.HTTPConnection | None = None

    def lookup(
        self,
        features: Sequence[tuple[str, str]],
        keys: Mapping[str, Sequence[KeyValue]],
        rows: int,
        request: Mapping[str, Column] = MappingProxyType({}),
    ) -> pa.Table:
        """The answer to a lookup, as Arrow: columns by their full names, and per view its status and event time.

        Args:
            features: pairs (view, feature), and (request transform, field).
            keys: join key to its values, one per row.
            rows: how many.
            request: the request fields that the request transforms take.

        Raises:
            DependencyError: the server does not run, or Redis does not answer it.
            ContractMismatch: it answers under another contract, or rows are stored under one.
            DataError: what it answers is not what was asked for.
        """
        few = max(1, self._limits.values)
        given = {name: _plain(dtype, values) for name, (dtype, values) in request.items()}
        parts = [self._lookup(features[n : n + few], keys, given, rows) for n in range(0, len(features), few)]
        whole = parts[0]
        for part in parts[1:]:
            for name in part.column_names:
                if name not in whole.column_names:
                    whole = whole.append_column(part.schema.field(name), part[name])
        return whole

    def _lookup(
        self,
        features: Sequence[tuple[str, str]],
        keys: Mapping[str, Sequence[KeyValue]],
        request: Mapping[str, Sequence[Any]],
        rows: int,
    ) -> pa.Table:
        schema = self._schema(features, list(keys))
        most = min(LOT, self._limits.rows, max(1, self._limits.values // len(features)))
        asked = {"features": [f"{view}:{feature}" for view, feature in features], "full_feature_names": True}
        parts = [schema.empty_table()]
        for start in range(0, rows, most):
            some = {name: column[start : start + most] for name, column in {**keys, **request}.items()}
            for body in self._bodies(asked, {"entities": some}, min(most, rows - start)):
                answer = self._answer("/get-online-features", body, Format.ARROW)
                table = pa.ipc.open_stream(answer).read_all()
                found = {field.name: field.type for field in table.schema}
                for field in schema:
                    if found.get(field.name) != field.type:
                        raise DataError(f"the API, column {field.name}", f"is answered as {found.get(field.name)}",
                                        expected=str(field.type))  # fmt: skip
                parts.append(table.select(schema.names).cast(schema))
        whole = pa.concat_tables(parts)
        if len(whole) != rows:
            raise DataError("the API", f"the answer has {len(whole)} rows", expected=str(rows))
        for name, column in keys.items():
            if not whole[name].equals(pa.chunked_array([_arrow(column, schema, name)])):
                raise DataError(f"the API, join key {name}", "the answer is about other rows than those asked for")
        return whole

    def refused(self) -> str | None:
        """Why the deployed package is not taken up; None if it is."""
        told = json.loads(self._ask("GET", "/models"))
        outdated = next((model["outdated"] for model in told["models"]), None)
        why: str | None = told["refused"] or outdated
        return why

    def predict(self, entities: Mapping[str, Column], request: Mapping[str, Column], rows: int) -> Values:
        """What the deployed model answers, float32 (n,).

        Args:
            entities: join keys.
            request: request fields.
            rows: how many there are of each.
        """
        most = max(1, min(LOT, self._limits.rows, self._limits.values // max(1, len(entities) + len(request))))
        predictions: list[float] = []
        for start in range(0, rows, most):
            given = {
                part: {name: _plain(dtype, values)[start : start + most] for name, (dtype, values) in columns.items()}
                for part, columns in (("entities", entities), ("request", request))
            }
            for body in self._bodies({}, given, min(most, rows - start)):
                predictions += map(float, json.loads(self._answer("/predict", body, Format.JSON))["predictions"])
        return from_python(predictions, Float32)

    def _schema(self, features: Sequence[tuple[str, str]], keys: Sequence[str]) -> pa.Schema:
        """What the answer to a lookup must have."""
        views = {name: self._contract.views[name] for name, _ in features if name in self._contract.views}
        # What a request transform takes may be of views that are not answered themselves.
        known = (*self._contract.views.values(), *views.values())
        types = {column.name: ARROW[column.dtype.name] for view in known for column in view.keys}
        columns = {name: types[name] for name in keys}
        for pair in features:
            column = self._contract.stored(pair) if pair[0] in views else self._contract.computed(pair)
            columns[column.name] = ARROW[column.dtype.name]
        for view in views:
            columns[f"{view}{SEPARATOR}{STATUS}"] = pa.dictionary(pa.int8(), pa.string())
            columns[f"{view}{SEPARATOR}{RESERVED[0]}"] = ARROW["UnixTimestamp"]
        return pa.schema(list(columns.items()))

    def _bodies(
        self, asked: Mapping[str, Any], columns: Mapping[str, Mapping[str, Sequence[Any]]], rows: int
    ) -> Iterator[bytes]:
        """The body of a request, or of several where one would be too long."""
        body = msgspec.json.encode({**asked, **columns})
        if len(body) <= self._limits.body_bytes or rows < 2:
            yield body
            return
        half = rows // 2
        for part, count in ((slice(half), half), (slice(half, None), rows - half)):
            some = {name: {key: column[part] for key, column in group.items()} for name, group in columns.items()}
            yield from self._bodies(asked, some, count)

    def _answer(self, path: str, body: bytes, form: Format) -> bytes:
        return self._ask("POST", path, body, {"content-type": "application/json", "accept": form.value})

    def _ask(self, method: str, path: str, body: bytes | None = None, head: Mapping[str, str] | None = None) -> bytes:
        try:
            try:
                response, answer = self._exchanged(method, path, body, head or {})
            except ConnectionError:
                # What is compared between two questions may take longer than a server keeps a connection.
                response, answer = self._exchanged(method, path, body, head or {})
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(f"does not answer ({error})") from error
        if response.status != 200:
            raise _refusal(path, response.status, answer)
        under = response.headers.get("isthmus-contract")
        if method == "POST" and under != self._contract.hash:
            raise ContractMismatch("the API", f"answers under contract {str(under)[:12]}",
                                   expected=self._contract.hash[:12], remedy="verify again")  # fmt: skip
        return answer

    def _exchanged(
        self, method: str, path: str, body: bytes | None, head: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """One request and its answer; after an error the connection is opened anew."""
        connection = self._open = self._open or self._connected()
        try:
            connection.request(method, path, body, head)
            response = connection.getresponse()
            return response, response.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            raise

    def _connected(self) -> http.client.HTTPConnection:
        """A connection to the server, once it is ready. Where it listens stands in its log."""
        deadline = time.monotonic() + READY_SECONDS
        said = ""
        while time.monotonic() < deadline and self._server.poll() is None:
            listening = next((line for line in self._lines() if line.get("event") == "listening"), None)
            if listening is not None:
                connection = http.client.HTTPConnection(listening["host"], listening["port"], timeout=ANSWER_SECONDS)
                try:
                    connection.request("GET", "/readyz")
                    response = connection.getresponse()
                    answer = response.read()
                    if response.status == 200:
                        return connection
                    said = str(_refusal("/readyz", response.status, answer))
                except (OSError, http.client.HTTPException) as error:
                    said = str(error)
                connection.close()
            time.sleep(_PAUSE_SECONDS)
        raise self._silent(said and f"was not ready within {READY_SECONDS:.0f} s ({said})")

    def _silent(self, found: str) -> DependencyError:
        """Why there is no answer: by the last line of the log, if the process has ended."""
        code = self._server.poll()
        if code is not None:
            last: dict[str, Any] = next((x for x in reversed(self._lines()) if x.get("level") != "info"), {})
            why = last.get("problem") or last.get("event")
            found = f"ended by itself with code {code}" + (f" ({why})" if why else "")
        return DependencyError(
            "the API", found or f"was not ready within {READY_SECONDS:.0f} s", remedy=f"see {self._log}; {_NO_START}"
        )

    def _lines(self) -> list[dict[str, Any]]:
        """The whole lines of the log that are objects."""
        found = []
        for line in self._log.read_bytes().splitlines(keepends=True):
            try:
                told = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                told = {"event": line.decode(errors="replace").strip()}
            if isinstance(told, dict):
                found.append(told)
        return found

    def close(self) -> None:
        """Closes the connection."""
        if self._open is not None:
            self._open.close()


@contextmanager
def private_api(
    project: Project, contract: Contract, url: str, at: int, deployment: Path | None = None
) -> Iterator[Client]:
    """A server of the project on a free port of this machine, whose clock stands still, until the block ends.

    It starts while the block goes on: the first request waits until it is ready.

    Args:
        project: the project.
        contract: its contract.
        url: where its Redis is.
        at: the moment of which it answers, in microseconds.
        deployment: what it has deployed; by default what the project has.
    """
    log = project.state / "logs" / f"verify-{os.getpid()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    told = msgspec.structs.replace(settings(project, url, 0, private=True), workers=1, now=at)
    if deployment is not None:
        told = msgspec.structs.replace(told, deployment=str(deployment))
    with log.open("wb") as file, running(told, file) as child:
        api = Client(contract, told.limits, child, log)
        try:
            yield api
        finally:
            api.close()
    # It stays where something went wrong.
    log.unlink()


def _refusal(path: str, status: int, body: bytes) -> IsthmusError:
    """The error that the server answered with, as it would be here."""
    try:
        told = json.loads(body)
        kind, where = getattr(errors, told["error"], None), told["where"]
        if not (isinstance(kind, type) and issubclass(kind, IsthmusError)) or kind is ConfigurationError:
            kind, where = DependencyError if status == 503 else DataError, f"the API, {where}"
        return kind(where, told["found"], expected=told["expected"], remedy=told["remedy"])
    except (ValueError, KeyError, TypeError):
        return DependencyError(f"the API, {path}", f"answered {status}: {body[:200].decode(errors='replace')}")


def _arrow(column: Sequence[KeyValue], schema: pa.Schema, name: str) -> pa.Array:
    dtype = schema.field(name).type
    return pa.array(column, pa.int64()).cast(dtype) if pa.types.is_timestamp(dtype) else pa.array(column, dtype)


def _plain(dtype: DataType, values: Values) -> list[Any]:
    """Values as JSON takes them."""
    plain = values.tolist(dtype)
    if values.data.dtype.kind != "f" or np.isfinite(values.data).all():
        return plain
    words = {np.inf: "Infinity", -np.inf: "-Infinity"}
    return [words.get(value, "NaN") if value is not None and not np.isfinite(value) else value for value in plain]
