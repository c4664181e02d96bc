"""Checks that the graphs of request transforms accept every row of a training set.

A graph refuses some values that an engine accepts, such as non-ASCII letters. The API and every package use graphs, so
a model must not learn from rows that they refuse.
"""

from collections.abc import Mapping
from functools import lru_cache

import pyarrow as pa

from isthmus.features.contract.schema import Contract
from isthmus.features.errors import DataError
from isthmus.features.request.graph import RowGraph
from isthmus.features.values.arrow import from_arrow

REMEDY = "correct it, or drop such rows from the spine"


class Graphs:
    """The graphs of a contract, opened on first use."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._graph = lru_cache(None)(lambda name: RowGraph(contract.transforms[name]))
        keys = (column.name for view in contract.views.values() for column in view.keys)
        self._identity = ["event_timestamp", *dict.fromkeys(keys)]

    def require(
        self, place: str, name: str, batch: pa.RecordBatch, rows: Mapping[str, pa.Array], refusal: str = ""
    ) -> None:
        """Raise a DataError for the first row of a batch that the graph of a transform refuses.

        `rows` are the inputs in the types of the transform. `refusal` is the engine's error, if it refused a row.
        """
        graph, inputs = self._graph(name), self._contract.transform_inputs(self._contract.transforms[name])
        columns = {column.name: from_arrow(rows[column.name], column.dtype) for column in inputs}
        refused = graph.first_refused(columns, graph.run(columns), self._graph)
        if refused is None:
            return
        at = ", ".join(f"{key}={batch[key][refused.row]}" for key in self._identity if key in batch.schema.names)
        text = f"{refused.shown} at {at}" if refused.rule else f"cannot be computed at {at}, where {refused.shown}"
        if refusal and not refused.rule:
            text += f" ({refusal})"
        raise DataError(f"{place}, field {refused.field}", text, expected=refused.expected, remedy=REMEDY)
