"""The graphs of request transforms beside the engine: what they refuse is in no training set.

A graph refuses some of what an engine computes, as other letters than those of ASCII. The API and every package do as
their graphs, and a model must not learn from a row that they refuse.
"""

from collections.abc import Mapping
from functools import lru_cache

import pyarrow as pa

from isthmus.features.contract.contract import Contract
from isthmus.features.errors import DataError
from isthmus.features.request.graph import RowGraph
from isthmus.features.values.columns import from_arrow

REMEDY = "correct it, or leave such rows out of the spine"


class Graphs:
    """The graphs of a contract, each opened when it is first needed.

    Args:
        contract: the contract.
    """

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._graph = lru_cache(None)(lambda name: RowGraph(contract.transforms[name]))
        keys = (column.name for view in contract.views.values() for column in view.keys)
        self._identity = ["event_timestamp", *dict.fromkeys(keys)]

    def require(
        self, place: str, name: str, batch: pa.RecordBatch, rows: Mapping[str, pa.Array], said: str = ""
    ) -> None:
        """Computes rows, all of which must be computable.

        Args:
            place: the transform and where it stands, for a message.
            name: the transform.
            batch: the rows as they are in the training set.
            rows: what the transform takes of them, in its types.
            said: why the engine refused them, if it did.

        Raises:
            DataError: one of them is refused.
        """
        graph, taken = self._graph(name), self._contract.transform_inputs(self._contract.transforms[name])
        columns = {column.name: from_arrow(rows[column.name], column.dtype) for column in taken}
        one = graph.first_refused(columns, graph.run(columns), self._graph)
        if one is None:
            return
        at = ", ".join(f"{key}={batch[key][one.row]}" for key in self._identity if key in batch.schema.names)
        found = f"{one.shown} at {at}" if one.rule else f"cannot be computed at {at}, where {one.shown}"
        if said and not one.rule:
            found += f" ({said})"
        raise DataError(f"{place}, field {one.field}", found, expected=one.expected, remedy=REMEDY)
