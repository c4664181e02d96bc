"""Push rows with Feast's SDK to the history of a view that `isthmus apply` has registered."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import requests
from feast import FeatureView
from feast.infra.online_stores.remote import RemoteOnlineStoreConfig
from feast.repo_config import RepoConfig
from feast.rest_error_handler import rest_error_handling_decorator

from isthmus.features import clock
from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import ConfigurationError, DataError, DependencyError, Problem, RequestError
from isthmus.features.feast import values as feast_values
from isthmus.features.feast.online import SETTING, TIMEOUT_SECONDS, IsthmusOnlineStoreConfig
from isthmus.features.feast.views import contract_of, layout_of, project_of, tagged_contract
from isthmus.features.offline.canonical import declared_schema
from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.features.values.arrow import from_arrow, micros
from isthmus.features.values.entitykey import entity_keys
from isthmus.features.values.plain import plain
from isthmus.features.values.rows import RowCodec

COLUMNS = "isthmus.columns"
"""The tag of a registered table with the columns of a push: those of the table, without those that builds add."""

PIECE = 100_000
"""Rows per command to Redis, which does not accept commands with a million parts."""

_EVENT, _KNOWN = "event_timestamp", "known_at"


def columns_of(view: ViewContract) -> list[tuple[str, str]]:
    return [(field.name, str(field.type)) for field in declared_schema(view)]


def push(config: RepoConfig, table: FeatureView, rows: pa.Table) -> None:
    """Push rows of a registered view to its Redis stream, from which `isthmus pushes collect` adds them to the table.

    With `RemoteOnlineStoreConfig`, send all rows to the server in one request. With `IsthmusOnlineStoreConfig`, write
    them to Redis in atomic pieces of `PIECE` rows. If a piece fails, earlier pieces stay pushed.

    A view is registered if `isthmus apply` has written it to Feast's registry. `rows` has the columns `event_timestamp`
    and `known_at`, and all join keys and features of the view.

    Raises:
        ConfigurationError: the project has another online store.
        RequestError: a column is missing, or the server rejects the rows.
        DependencyError: Redis or the server does not answer, or is full.
        DataError: a value does not fit its type, a key or time is null, or a time is in the future.
        ContractMismatch: the tags or the schema of the view do not match its registered contract.
    """
    view = tagged_contract(table.name, table.tags)
    columns = _columns(view, rows)
    if isinstance(config.online_store, IsthmusOnlineStoreConfig):
        layout_of(config, table)  # checks that the view belongs to this project
        _append(config, view, columns)
    elif isinstance(config.online_store, RemoteOnlineStoreConfig):
        _post(config, view, columns)
    else:
        kind = type(config.online_store).__name__.removesuffix("Config")
        problem = Problem("online_store", f"is {kind}, but pushed rows need the Redis of Isthmus",
                          "isthmus.feast.IsthmusOnlineStore or remote")  # fmt: skip
        raise ConfigurationError("feature_store.yaml", [problem])


def _columns(view: ViewContract, rows: pa.Table) -> dict[str, pa.ChunkedArray]:
    required = [name for name, _ in columns_of(view)]
    if missing := [name for name in required if name not in rows.column_names]:
        raise RequestError(f"view {view.name}", f"the rows lack {', '.join(missing)}", expected=", ".join(required))
    columns = {}
    for name in (_EVENT, _KNOWN):
        where = f"view {view.name}, {name}"
        times = columns[name] = feast_values.to_timestamps(rows[name], where)
        if times.null_count:
            # Only the caller knows since when the rows are known: the online store already has them.
            raise DataError(where, f"{times.null_count} nulls", expected="a time in every row of a history")
        later = np.flatnonzero(micros(times) > clock.now())
        if len(later):
            problem = f"{times[int(later[0])].as_py().isoformat()} in row {later[0]} is in the future"
            raise DataError(where, problem, expected="a time no later than now")
    for column in (*view.keys, *view.fields):
        where = f"view {view.name}, column {column.name}"
        columns[column.name] = feast_values.cast_to(rows[column.name], column.dtype, where)
    return columns


def _append(config: RepoConfig, view: ViewContract, columns: Mapping[str, pa.ChunkedArray]) -> None:
    keys = {key.name: feast_values.plain_keys(columns[key.name], key, f"view {view.name}") for key in view.keys}
    features = {column.name: from_arrow(columns[column.name], column.dtype) for column in view.fields}
    event, known = micros(columns[_EVENT]), micros(columns[_KNOWN])
    with (
        translate_errors(config.online_store.url, SETTING),
        connect(config.online_store.url, TIMEOUT_SECONDS, SETTING) as client,
    ):
        project = project_of(config)
        names = entity_keys(project, view.keys, keys)
        rows = RowCodec(view).encode(event, known, features)
        store = OnlineStore(client, contract_of(project, [view]))
        for start in range(0, len(rows), PIECE):
            part = slice(start, start + PIECE)
            store.append(view, names[part], rows[part], clock.now())


def _post(config: RepoConfig, view: ViewContract, columns: Mapping[str, pa.ChunkedArray]) -> None:
    body = {
        "push_source_name": view.name,
        "df": {name: plain(column) for name, column in columns.items()},
        "to": "offline",
    }
    try:
        answer = _posted(config, body)
    except requests.RequestException as error:
        raise DependencyError(
            "online_store.path in feature_store.yaml", f"{config.online_store.path} does not answer ({error})",
            remedy="start the server: `isthmus serve`",
        ) from error  # fmt: skip
    if answer.status_code != requests.codes.ok:
        kind = DependencyError if answer.status_code >= requests.codes.server_error else RequestError
        raise kind(f"view {view.name}", f"the server rejected the rows ({answer.status_code}: {answer.text})")


@rest_error_handling_decorator  # type: ignore[untyped-decorator]  # so in Feast
def _posted(session: requests.Session, config: RepoConfig, body: Mapping[str, Any]) -> requests.Response:
    return session.post(f"{config.online_store.path}/push", json=body, verify=config.online_store.cert or True)
