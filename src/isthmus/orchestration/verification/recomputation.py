"""Request transforms in the verdict: what the engine computed for a training set, beside what the graphs compute.

The graphs are run twice: here, of all that the engine was given, and by a server that is asked what the rows of the
training set asked.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from isthmus.distill.declaration import Distillation
from isthmus.distill.types import spread
from isthmus.features.contract.contract import Column, Contract, TransformContract
from isthmus.features.definition.spec import AtRequest
from isthmus.features.request.graph import RowGraph
from isthmus.features.values.columns import ARROW, Values, from_arrow, micros
from isthmus.features.values.rows import Bool
from isthmus.features.verdict import FeatureVerdict, compare, identical
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.project import Project
from isthmus.orchestration.verification.client import Client

Rows = np.ndarray[Any, np.dtype[np.int64]]


def recompute(
    project: Project, contract: Contract, declared: Distillation | None, sample: int | None, api: Client, asked: int
) -> tuple[dict[str, dict[str, FeatureVerdict]], dict[str, str]]:
    """Request transform to field to its comparison, over rows of the last training set; as `API …` of what is answered.

    A transform is left out if there is no training set, or if it computed something else then: the second part says
    which, and why.

    Args:
        project: the project.
        contract: its contract.
        declared: the distillation, if there is one.
        sample: rows to compare, spread over the training set; None for all.
        api: a server of the project.
        asked: rows to ask it about.
    """
    services = (declared.teacher.name, declared.student.name) if declared else ()
    transforms = {transform.name: transform for service in services for transform in contract.used(service)}
    others = [name for name in contract.transforms if name not in transforms]
    unused = "no distillation has it in a service" if declared is None else f"no service of {declared.name} has it"
    skipped = dict.fromkeys(others, f"{unused}, so no training set has what an engine computes")
    made = Artifacts(project, declared).latest_training_set() if declared and transforms else None
    if declared is None or made is None:
        return {}, skipped | dict.fromkeys(transforms, "there is no training set in which an engine computed it")
    alike = [one for name, one in transforms.items() if made.computed.get(name, {}).get("hash") == one.hash]
    table = made.table()
    if sample is not None and len(table) > sample:
        table = table.take(pa.array(np.linspace(0, len(table) - 1, sample).astype(np.int64)))
    keys = [name for name, _ in contract.spines[declared.spine.name]["keys"]]
    # A null key is no key of any row, and the API takes none.
    whole = np.flatnonzero(np.logical_and.reduce([table[name].is_valid().to_numpy() for name in keys]))
    few = table.take(pa.array(whole[spread(len(whole), asked)] if len(whole) else whole))
    compared = {}
    for one in alike:
        written = project.definitions.transforms[one.name]
        compared[one.name] = _Engine(one, written, contract, table, keys).compared()
        compared[f"API {one.name}"] = _Engine(one, written, contract, few, keys).answered(api)
    older = f"training set {made.id} was made before it was changed: run `isthmus training-set`"
    return compared, skipped | {name: older for name in transforms if name not in compared}


class _Engine:
    """What an engine computed by a request transform for rows of a training set.

    Args:
        transform: the transform.
        declared: the same as it is declared.
        contract: the contract.
        table: the rows.
        keys: the columns that say which they are.
    """

    def __init__(
        self, transform: TransformContract, declared: AtRequest, contract: Contract, table: pa.Table, keys: list[str]
    ) -> None:
        self._transform, self._contract, self._table = transform, contract, table
        self._tolerances = {field.name: field.tolerance for field in declared.schema}
        self._names = np.array([str(row) for row in table.select(keys).to_pylist()], object)
        self._times = micros(table["event_timestamp"])
        self._graph = RowGraph(transform)
        self._given = {column.name: _values(table, column) for column in contract.transform_inputs(transform)}
        self._found = {field.name: from_arrow(table[transform.full_name(field.name)], field.dtype)
                       for field in transform.fields}  # fmt: skip

    def compared(self) -> dict[str, FeatureVerdict]:
        """Field to the comparison with what the graph makes of the same values."""
        # What the graph refuses is null, which the engine's value is not.
        return self._compared(self._found, self._graph.run(self._given).values, np.arange(len(self._table)))

    def answered(self, api: Client) -> dict[str, FeatureVerdict]:
        """Field to the comparison with what a server answers to the same requests.

        It looks up stored features as they are now. Where one is another than the engine was given, the graph that was
        compared with the engine says what is expected; a row that it refuses is left out.
        """
        transform, contract = self._transform, self._contract
        keys = {column.name: column for view, _ in transform.stored for column in contract.views[view].keys}
        asked = {name: _values(self._table, column).tolist(column.dtype) for name, column in keys.items()}
        served = api.lookup(transform.stored, asked, len(self._table)) if transform.stored else pa.table({})
        now = self._given | self._stored(served)
        unchanged = np.ones(len(self._table), bool)
        for name, before in self._given.items():
            unchanged &= _unchanged(before, now[name])
        computed = self._graph.run(now)
        expected = {}
        for name, engine in self._found.items():
            graph = computed.values[name]
            expected[name] = Values(
                np.where(unchanged, engine.data, graph.data), np.where(unchanged, engine.valid, graph.valid)
            )
        refused = np.zeros(len(self._table), bool)
        for mask in computed.refused.values():
            refused |= mask
        rows = np.flatnonzero(~refused)
        answer = api.lookup(
            [*transform.stored, *((transform.name, field.name) for field in transform.fields)],
            {name: [values[row] for row in rows.tolist()] for name, values in asked.items()},
            len(rows),
            {column.name: (column.dtype, now[column.name].take(rows))
             for column in transform.request if column.name not in keys},
        )  # fmt: skip
        # What is pushed between the two questions is left out.
        still = np.ones(len(rows), bool)
        for name, later in self._stored(answer).items():
            still &= _unchanged(now[name].take(rows), later)
        here = np.flatnonzero(still)
        answered = {field.name: from_arrow(answer[transform.full_name(field.name)], field.dtype).take(here)
                    for field in transform.fields}  # fmt: skip
        rows = rows[here]
        return self._compared({name: values.take(rows) for name, values in expected.items()}, answered, rows)

    def _stored(self, served: pa.Table) -> dict[str, Values]:
        columns = map(self._contract.stored, self._transform.stored)
        return {column.name: from_arrow(served[column.name], column.dtype) for column in columns}

    def _compared(
        self, expected: Mapping[str, Values], found: Mapping[str, Values], rows: Rows
    ) -> dict[str, FeatureVerdict]:
        names, times = self._names[rows].tolist(), self._times[rows].tolist()
        return {
            field.name: compare(
                names, expected[field.name], found[field.name], field.dtype, self._tolerances[field.name], times
            )
            for field in self._transform.fields
        }


def _values(table: pa.Table, column: Column) -> Values:
    """A column of a training set; a spine may have left out what has a default."""
    if column.name in table.column_names:
        return from_arrow(table[column.name], column.dtype)
    return from_arrow(pa.nulls(len(table), ARROW[column.dtype.name]), column.dtype)


def _unchanged(one: Values, other: Values) -> Bool:
    """Where two columns are the same to the bit."""
    if one.data.dtype == object:
        pairs = zip(one.data, other.data, strict=True)
        equal = np.array([_same(a, b) for a, b in pairs], bool)
    else:
        equal = identical(one.data, other.data)
    found: Bool = (one.valid & other.valid & equal) | ~(one.valid | other.valid)
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.tobytes() == other.tobytes()
    return bool(one == other)
