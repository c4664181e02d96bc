"""What a program of the user's own pushes, without a server. Importing this loads no third-party library."""

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
    """Writes rows of a view that its transform did not compute, as `/push` of the API does: all of them or none.

    The rows are checked as there, by the contracts that servers answer under, and with the limits of `[server.limits]`.
    Returns how many `rows` there were, and how many were `written` online: an older row replaces none.

    Args:
        project: the project, or its folder.
        view: its name.
        rows: the join keys, `event_timestamp`, every feature, and `known_at` unless that is now: a mapping of column
            names to lists of values, an Arrow table, or a pandas or Polars frame.
        to: "online_and_offline" is the online store at once and the history of the view with the next `isthmus
            collect`; "offline" is the history alone, "online" the online store alone.

    Raises:
        RequestError: there is no such view, or rows disagree with the contract; every problem is named.
        DependencyError: Redis does not answer, or too many rows wait for the history. What was pushed may be in the
            history all the same; pushed again with the same `known_at`, it is there once.
    """
    from isthmus.features.errors import RequestError, one_of
    from isthmus.features.online.store import OnlineStore
    from isthmus.features.redis.connection import answering, connect
    from isthmus.orchestration.project import Project
    from isthmus.serving.lookup.push import FIRST, PUSH, Times, by_table, packed
    from isthmus.serving.state import State

    opened = project if isinstance(project, Project) else Project(Path(project))
    if to not in DESTINATIONS:
        raise RequestError("to", f"is {to!r}", expected=one_of(DESTINATIONS))
    state, now, limits = State(opened.generations()), opened.now(), opened.settings.server.limits
    declared, kept = state.pushed(view, PUSH)
    parts = packed(declared, kept, _columns(rows, declared[0].view), limits, Times(FIRST, now))
    count, written = len(parts[0][2]), [0]
    with opened.redis() as url, answering(url), connect(url) as client:
        store = OnlineStore(client, state.contract)
        if to != "online":
            for definition, names, part in by_table(parts):
                store.append(definition, names, part, now, limits.waiting_rows)
        if to != "offline":
            written = [store.put(definition, names, part).written for definition, names, part in parts]
    return {"rows": count, "written": written[0]}


def _columns(rows: object, view: "ViewContract") -> dict[str, "msgspec.Raw"]:
    """Each column as the JSON of a push."""
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
    """Whole numbers that pandas keeps as floating-point ones, as it does beside nulls."""
    import pyarrow as pa

    for column in (*view.keys, *view.fields):
        place = table.schema.get_field_index(column.name)
        if column.dtype.name in ("Int32", "Int64") and place >= 0 and pa.types.is_floating(table.schema.types[place]):
            try:
                table = table.set_column(place, column.name, table[column.name].cast(pa.int64()))
            except pa.ArrowInvalid:
                continue  # It has a fraction, which is for the contract to refuse.
    return table
