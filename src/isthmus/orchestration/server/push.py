"""`isthmus.push`: write rows of a view from Python, without a server.

Importing this module loads no third-party library.
"""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import msgspec
    import pyarrow as pa

    from isthmus.features.contract.schema import ViewContract
    from isthmus.orchestration.project import Project

DESTINATIONS = ("online_and_offline", "offline", "online")
_FORMS = "column names with lists of values, an Arrow table, or a pandas or Polars frame"


def push(
    project: "Project | str | PathLike[str]", view: str, rows: object, *, to: str = "online_and_offline"
) -> dict[str, int]:
    """Push rows of a view to Redis, as `/push` of the API does. If a row is invalid, nothing is written.

    Rows are checked against the contracts that the servers use and the limits in `[server.limits]`. A row replaces the
    online row of its key unless the online row is newer. If Redis is embedded, starts it.

        isthmus.push(".", "customer_orders", {"customer": ["c1"], "event_timestamp": [now], "orders_7d": [3]})

    Args:
        project: the project, or its folder.
        view: name of the view.
        rows: join keys, `event_timestamp`, every feature, and optionally `known_at` (default: now), as a mapping of
            column names to lists, an Arrow table, or a pandas or Polars frame. Only features may be null.
        to: "online_and_offline" writes to the online store at once and to the offline table with the next
            `isthmus pushes collect`; "offline" and "online" write to one of them.

    Returns:
        `rows`, the number of rows, and `written`, the number of rows that changed the online store.

    Raises:
        RequestError: `to` or the view is unknown, or rows do not match contract and limits. All problems are listed.
        DependencyError: no contract has been applied, Redis is not reachable, or too many rows wait to be collected.
            Some rows may have been stored; pushing them again with the same `known_at` does not duplicate them.
    """
    from isthmus.features.errors import RequestError, one_of
    from isthmus.features.online.store import OnlineStore
    from isthmus.features.redis.connection import connect, translate_errors
    from isthmus.orchestration.project import Project
    from isthmus.serving.lookup.push import FIRST, PUSH, Times, first_per_table, pack_all
    from isthmus.serving.state import State

    opened = project if isinstance(project, Project) else Project(Path(project))
    if to not in DESTINATIONS:
        raise RequestError("to", f"is {to!r}", expected=one_of(DESTINATIONS))
    state, now, limits = State(opened.generations()), opened.now(), opened.settings.server.limits
    definitions, previous = state.pushed(view, PUSH)
    parts = pack_all(definitions, previous, _columns(rows, definitions[0].view), limits, Times(FIRST, now))
    count, written = len(parts[0][2]), [0]
    with opened.redis() as url, translate_errors(url), connect(url) as client:
        store = OnlineStore(client, state.contract)
        if to != "online":
            for definition, names, part in first_per_table(parts):
                store.append(definition, names, part, now, limits.waiting_rows)
        if to != "offline":
            written = [store.put(definition, names, part).written for definition, names, part in parts]
    return {"rows": count, "written": written[0]}


def _columns(rows: object, view: "ViewContract") -> dict[str, "msgspec.Raw"]:
    import msgspec
    import orjson

    from isthmus.features.values.plain import plain

    return {name: msgspec.Raw(orjson.dumps(plain(column))) for name, column in _arrays(rows, view).items()}


def _arrays(rows: object, view: "ViewContract") -> Mapping[str, "pa.Array | pa.ChunkedArray"]:
    import pyarrow as pa

    from isthmus.features.errors import RequestError

    library = type(rows).__module__.partition(".")[0]
    if isinstance(rows, Mapping):
        return {str(name): _array(str(name), values) for name, values in rows.items()}
    if library == "pandas":
        table = _whole(pa.Table.from_pandas(rows, preserve_index=False), view)
    elif hasattr(rows, "__arrow_c_stream__"):
        table = pa.table(rows)
    else:
        raise RequestError("rows", f"is a {type(rows).__name__}", expected=_FORMS)
    return dict(zip(table.column_names, table.columns, strict=True))


def _array(name: str, values: Any) -> "pa.Array":
    import pyarrow as pa

    from isthmus.features.errors import RequestError, first_line

    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"df.{name}", first_line(error), expected="a list of values of one type") from error


def _whole(table: "pa.Table", view: "ViewContract") -> "pa.Table":
    """Convert float columns to integers where the view has integers. Pandas stores integers with nulls as floats."""
    import pyarrow as pa

    for column in (*view.keys, *view.fields):
        place = table.schema.get_field_index(column.name)
        if column.dtype.name in ("Int32", "Int64") and place >= 0 and pa.types.is_floating(table.schema.types[place]):
            try:
                table = table.set_column(place, column.name, table[column.name].cast(pa.int64()))
            except pa.ArrowInvalid:
                continue  # the contract check reports the fractions
    return table
