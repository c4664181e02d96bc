"""Status and features of a view by its ttl, applied after a join to the newest row of any age."""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.clock import Status
from isthmus.features.contract.schema import ViewContract
from isthmus.features.offline.history import status_column
from isthmus.features.types import UnixTimestamp
from isthmus.features.values.arrow import ARROW

_TIME = ARROW[UnixTimestamp.name]


def by_ttl(
    view: ViewContract, moments: pa.ChunkedArray, event: pa.ChunkedArray, present: pa.ChunkedArray,
    rows: pa.Table | Mapping[str, pa.ChunkedArray],
) -> dict[str, pa.ChunkedArray]:  # fmt: skip
    """Return the features and the status column of a view by column name; expired rows become null.

    Args:
        view: the view.
        moments: time of each query.
        event: event time of the newest row; null without a row.
        present: whether a row exists.
        rows: features of the newest row, by full name.
    """
    at = moments.cast(_TIME).cast(pa.int64())
    age = pc.subtract(at, pc.fill_null(event.cast(pa.int64()), 0))
    expired = pc.and_(present, pc.greater(age, view.ttl) if view.ttl is not None else False)
    valid = pc.and_(present, pc.invert(expired))
    columns, empty = {}, valid
    for column in view.fields:
        name = view.full_name(column.name)
        columns[name] = pc.if_else(valid, rows[name], pa.scalar(None, ARROW[column.dtype.name]))
        empty = pc.and_(empty, rows[name].is_null())
    status = pc.case_when(
        pc.make_struct(empty, valid, expired),
        Status.NULL.label,
        Status.PRESENT.label,
        Status.EXPIRED.label,
        Status.NOT_FOUND.label,
    )
    columns[status_column(view)] = pc.cast(status, pa.string())
    return columns
