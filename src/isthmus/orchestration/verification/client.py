"""A private API of the project: a real server whose answers the verdict compares."""

import copy
import http.client
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from isthmus.features import errors
from isthmus.features.contract.schema import RESERVED, SEPARATOR, STATUS, Contract
from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError, DependencyError, IsthmusError
from isthmus.features.types import DataType
from isthmus.features.values.arrow import ARROW
from isthmus.features.values.columns import Values
from isthmus.features.values.entitykey import KeyValue
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import running, settings
from isthmus.serving.limits import Limits
from isthmus.serving.wire.formats import Format

# Rows per request.
LOT = 2_000
# Limits of a private server: those of the project are for strangers.
LIMITS = Limits(body_bytes=1 << 30, rows=LOT, values=1 << 40, deadline_seconds=60.0)
READY_SECONDS = 20.0
# Longer than the server's own deadline for a request.
ANSWER_SECONDS = 65.0
_PAUSE_SECONDS = 0.02

TypedValues = tuple[DataType, Values]


class Client:
    """Client of the private API server of `verify`. The first request waits up to 20 seconds for the server."""

    def __init__(self, contract: Contract, server: "subprocess.Popen[bytes]", log: Path) -> None:
        self._contract, self._server, self._log = contract, server, log
        self._connection: http.client.HTTPConnection | None = None
        self._lot = LOT

    def one_row_per_request(self) -> "Client":
        self._connection = self._connection or self._connect()
        single = copy.copy(self)
        single._lot = 1
        return single

    def lookup(
        self,
        features: Sequence[tuple[str, str]],
        keys: Mapping[str, Sequence[KeyValue]],
        rows: int,
        request: Mapping[str, TypedValues] = MappingProxyType({}),
    ) -> pa.Table:
        """Look up features on the server, and return them as a table.

        The table has the join keys, the features, and the status and event time of each view. `features` are pairs
        (view, feature) or (request transform, field). `keys` and `request` have `rows` values for each join key and
        each request field. Raises the errors that the API returns. Raises DependencyError if the server does not
        answer, ContractMismatch if it has another contract, and DataError if the answer has other columns or rows than
        the request.
        """
        entities = {**keys, **{name: _as_json(dtype, values) for name, (dtype, values) in request.items()}}
        schema = self._schema(features, list(keys))
        parts = [schema.empty_table()]
        fixed = {"features": [f"{view}:{feature}" for view, feature in features], "full_feature_names": True}
        for body in self._bodies(fixed, {"entities": entities}, rows):
            table = pa.ipc.open_stream(self._post("/get-online-features", body, Format.ARROW)).read_all()
            types = {field.name: field.type for field in table.schema}
            for field in schema:
                if types.get(field.name) != field.type:
                    raise DataError(f"the API, column {field.name}", f"has type {types.get(field.name)}",
                                    expected=str(field.type))  # fmt: skip
            parts.append(table.select(schema.names).cast(schema))
        answer = pa.concat_tables(parts)
        if len(answer) != rows:
            raise DataError("the API", f"the answer has {len(answer)} rows", expected=str(rows))
        for name in keys:
            if not answer[name].equals(pa.chunked_array([_key_column(entities[name], schema.field(name).type)])):
                raise DataError(f"the API, join key {name}", "the answer has other rows than the request")
        return answer

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._post(path, msgspec.json.encode(body), Format.JSON))
        return answer

    def rejection_reason(self) -> str | None:
        report = json.loads(self._send("GET", "/models"))
        outdated = next((model["outdated"] for model in report["models"]), None)
        reason: str | None = report["refused"] or outdated
        return reason

    def predict(
        self, entities: Mapping[str, TypedValues], request: Mapping[str, TypedValues], rows: int
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the server's predictions for `rows` rows: float32, shape (rows,) or (rows, classes).

        `entities` and `request` have the type and `rows` values of each join key and each request field. Raises the
        errors that the API returns. Raises DependencyError if the server does not answer, and ContractMismatch if it
        has another contract.
        """
        columns = {
            part: {name: _as_json(dtype, values) for name, (dtype, values) in group.items()}
            for part, group in (("entities", entities), ("request", request))
        }
        answers = [json.loads(self._post("/predict", body, Format.JSON)) for body in self._bodies({}, columns, rows)]
        parts = [answer.get("probabilities", answer["predictions"]) for answer in answers]
        # Converted from text, since JSON has NaN and infinities as strings.
        numbers = [np.array(part, np.str_).astype(np.float64).astype(np.float32) for part in parts]
        return np.concatenate(numbers) if numbers else np.empty(0, np.float32)

    def _schema(self, features: Sequence[tuple[str, str]], keys: Sequence[str]) -> pa.Schema:
        views = {name: self._contract.views[name] for name, _ in features if name in self._contract.views}
        # Includes keys of views that only a request transform reads, which are not in the answer.
        every = self._contract.views.values()
        types = {column.name: ARROW[column.dtype.name] for view in every for column in view.keys}
        columns = {name: types[name] for name in keys}
        for pair in features:
            column = self._contract.stored(pair) if pair[0] in views else self._contract.computed(pair)
            columns[column.name] = ARROW[column.dtype.name]
        for view in views:
            columns[f"{view}{SEPARATOR}{STATUS}"] = pa.dictionary(pa.int8(), pa.string())
            columns[f"{view}{SEPARATOR}{RESERVED[0]}"] = ARROW["UnixTimestamp"]
        return pa.schema(list(columns.items()))

    def _bodies(
        self, fixed: Mapping[str, Any], columns: Mapping[str, Mapping[str, Sequence[Any]]], rows: int
    ) -> Iterator[bytes]:
        for start in range(0, rows, self._lot):
            yield from self._split(fixed, columns, start, min(start + self._lot, rows))

    def _split(
        self, fixed: Mapping[str, Any], columns: Mapping[str, Mapping[str, Sequence[Any]]], start: int, end: int
    ) -> Iterator[bytes]:
        lot = slice(start, end)
        parts = {part: {name: column[lot] for name, column in group.items()} for part, group in columns.items()}
        body = msgspec.json.encode({**fixed, **parts})
        if len(body) <= LIMITS.body_bytes or end - start < 2:
            yield body
            return
        middle = (start + end) // 2
        yield from self._split(fixed, columns, start, middle)
        yield from self._split(fixed, columns, middle, end)

    def _post(self, path: str, body: bytes, form: Format) -> bytes:
        return self._send("POST", path, body, {"content-type": "application/json", "accept": form.value})

    def _send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = MappingProxyType({})
    ) -> bytes:
        try:
            try:
                response, answer = self._exchange(method, path, body, headers)
            except ConnectionError:
                # The server closes idle connections, and a comparison between two requests may take long.
                response, answer = self._exchange(method, path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            raise self._unanswered(f"does not answer ({error})") from error
        if response.status != 200:
            raise _refusal(path, response.status, answer)
        contract = response.headers.get("isthmus-contract")
        if method == "POST" and contract != self._contract.hash:
            raise ContractMismatch("the API", f"answers under contract {str(contract)[:12]}",
                                   expected=self._contract.hash[:12], remedy="verify again")  # fmt: skip
        return answer

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Send one request and read the response. After an error, the next request opens a new connection."""
        connection = self._connection = self._connection or self._connect()
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response, response.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            raise

    def _connect(self) -> http.client.HTTPConnection:
        deadline = time.monotonic() + READY_SECONDS
        last_answer = ""
        while time.monotonic() < deadline and self._server.poll() is None:
            listening = next((line for line in self._log_lines() if line.get("event") == "listening"), None)
            if listening is not None:
                connection = http.client.HTTPConnection(listening["host"], listening["port"], timeout=ANSWER_SECONDS)
                try:
                    connection.request("GET", "/readyz")
                    response = connection.getresponse()
                    answer = response.read()
                    if response.status == 200:
                        return connection
                    last_answer = str(_refusal("/readyz", response.status, answer))
                except (OSError, http.client.HTTPException) as error:
                    last_answer = str(error)
                connection.close()
            time.sleep(_PAUSE_SECONDS)
        raise self._unanswered(
            f"was not ready within {READY_SECONDS:.0f} s" + (f" ({last_answer})" if last_answer else "")
        )

    def _unanswered(self, problem: str) -> DependencyError:
        code = self._server.poll()
        if code is not None:
            warnings = [line for line in self._log_lines() if line.get("level") != "info"]
            reason = warnings and (warnings[-1].get("problem") or warnings[-1].get("event"))
            problem = f"ended with exit code {code}" + (f" ({reason})" if reason else "")
        remedy = f"read {self._log} and check that `isthmus serve` can start"
        return DependencyError("the API", problem, remedy=remedy)

    def _log_lines(self) -> list[dict[str, Any]]:
        objects = []
        for line in self._log.read_bytes().splitlines(keepends=True):
            try:
                message = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                message = {"event": line.decode(errors="replace").strip()}
            if isinstance(message, dict):
                objects.append(message)
        return objects

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


@contextmanager
def private_api(
    project: Project, contract: Contract, url: str, at: int, deployment: Path | None = None
) -> Iterator[Client]:
    """Run a private server of the project on a free local port during a `with` block, and yield a client for it.

    The server uses `contract` and the Redis at `url`. Its clock is frozen at `at`, in microseconds since 1970 UTC. It
    serves the package that the file `deployment` names (default: the project's deployment file). The client's first
    request waits until the server is ready. The server's log in the project's state folder is deleted at the end of the
    block, but kept after an error.
    """
    log = project.state / "logs" / f"verify-{os.getpid()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    configured = settings(project, url, 0, private=True)
    deployed = str(deployment or project.deployment_file)
    with TemporaryDirectory(prefix="isthmus-contract-") as folder, log.open("wb") as file:
        applied = Path(folder) / "contract.json"
        applied.write_bytes(contract.dumps())
        configured = msgspec.structs.replace(
            configured, workers=1, now=at, contract=str(applied), deployment=deployed, limits=LIMITS
        )
        with (
            running(configured, file) as child,
            closing(Client(contract, child, log)) as api,
        ):
            yield api
    # Not reached after an error: the log remains.
    log.unlink()


def _refusal(path: str, status: int, body: bytes) -> IsthmusError:
    try:
        message = json.loads(body)
        kind, where = getattr(errors, message["error"], None), message["where"]
        if not (isinstance(kind, type) and issubclass(kind, IsthmusError)) or kind is ConfigurationError:
            kind, where = DependencyError if status == 503 else DataError, f"the API, {where}"
        return kind(where, message["found"], expected=message["expected"], remedy=message["remedy"])
    except (ValueError, KeyError, TypeError):
        return DependencyError(f"the API, {path}", f"answered {status}: {body[:200].decode(errors='replace')}")


def _key_column(keys: Sequence[KeyValue], dtype: pa.DataType) -> pa.Array:
    return pa.array(keys, pa.int64()).cast(dtype) if pa.types.is_timestamp(dtype) else pa.array(keys, dtype)


def _as_json(dtype: DataType, values: Values) -> list[Any]:
    plain = values.tolist(dtype)
    if values.data.dtype.kind != "f" or np.isfinite(values.data).all():
        return plain
    words = {np.inf: "Infinity", -np.inf: "-Infinity"}
    return [words.get(value, "NaN") if value is not None and not np.isfinite(value) else value for value in plain]
