"""Request transforms in the verdict: what the engine computed for a training set, beside what the graphs compute.

The graphs run twice: here, on the engine's own inputs, and in a server that gets the requests of the training set. Both
compute some rows alone, too, whose bits must be those that the graph has for them among others, whatever the tolerance
for an engine is.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from isthmus.distill.declaration import Distillation
from isthmus.distill.types import Index, in_batches, spread
from isthmus.features.contract.schema import Column, Contract, TransformContract
from isthmus.features.definition.spec import AtRequest
from isthmus.features.request.graph import RowGraph
from isthmus.features.values.arrow import ARROW, from_arrow, micros
from isthmus.features.values.columns import Mask, Values
from isthmus.features.values.equality import equal_values
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.project import Project
from isthmus.orchestration.verification.client import Client
from isthmus.orchestration.verification.sides import SINGLES, ComparedRows, sample_with_keys
from isthmus.package.verdict import FeatureVerdict, Sample

FEW = 7
"""Rows among which the graph computes what a server is expected to answer to one of them: they fill no vector
register of a whole number of values, and are neither one row nor all."""

Comparison = dict[str, FeatureVerdict]
Comparisons = dict[str, Comparison]
"""Transform to its fields to their comparison."""


def recompute(
    project: Project, contract: Contract, declared: Distillation | None, sample: int | None, api: Client, requests: int
) -> tuple[Comparisons, Comparisons, dict[str, str], Sample | None]:
    """Compares request transforms over `sample` rows of the last training set, or all; a server answers `requests`.

    Returns the comparisons, transform to field, as `API …` for what the server answers; those of rows computed alone;
    each transform that is left out, because no training set has it or it computed something else then, to why; and the
    sample that was compared, if it was one.
    """
    services = (declared.teacher.name, declared.student.name) if declared else ()
    transforms = {transform.name: transform for service in services for transform in contract.used(service)}
    unused = "no distillation has it in a service" if declared is None else f"no service of {declared.name} has it"
    skipped = {
        name: f"{unused}, so no training set has what an engine computes"
        for name in contract.transforms
        if name not in transforms
    }
    examples = Artifacts(project, declared).latest_training_set() if declared and transforms else None
    if declared is None or examples is None:
        absent = "there is no training set in which an engine computed it"
        return {}, {}, skipped | dict.fromkeys(transforms, absent), None
    table = examples.table()
    rows = len(table)
    keys = [name for name, _ in contract.spines[declared.spine.name]["keys"]]
    if sample is not None and len(table) > sample:
        table = table.take(pa.array(np.linspace(0, len(table) - 1, sample).astype(np.int64)))
    answered = sample_with_keys(table, keys, requests)
    compared, singly = {}, {}
    for name, transform in transforms.items():
        if examples.computed.get(name, {}).get("hash") != transform.hash:
            skipped[name] = f"training set {examples.id} was made before it was changed: run `isthmus training-set`"
            continue
        declaration = project.definitions.transforms[name]
        engine = _Engine(transform, declaration, contract, table, keys)
        compared[name], singly[name] = engine.compare_graph()
        engine = _Engine(transform, declaration, contract, answered, keys)
        compared[f"API {name}"], singly[f"API {name}"] = engine.compare_answers(api)
    return compared, singly, skipped, Sample(len(table), rows) if compared and len(table) < rows else None


class _Engine:
    """What an engine computed by a request transform for rows of a training set; `keys` are their key columns."""

    def __init__(
        self, transform: TransformContract, declared: AtRequest, contract: Contract, table: pa.Table, keys: list[str]
    ) -> None:
        self._transform, self._contract, self._table = transform, contract, table
        self._tolerances = {field.name: field.tolerance for field in declared.schema}
        self._rows = ComparedRows.of(table, keys, micros(table["event_timestamp"]).tolist())
        self._graph = RowGraph(transform)
        self._types = {column.name: column.dtype for column in contract.transform_inputs(transform)}
        self._inputs = {column.name: _values(table, column) for column in contract.transform_inputs(transform)}
        self._results = self._fields(table)

    def compare_graph(self) -> tuple[Comparison, Comparison]:
        """All rows at once with what the engine computed, and some of them alone with the same among all."""
        values = self._graph.run(self._inputs).values
        # What the graph refuses is null, which the engine's value is not.
        compared = self._compare(self._rows, self._results, values, self._tolerances)
        rows = spread(len(self._rows), SINGLES)
        among = {name: value.take(rows) for name, value in values.items()}
        return compared, self._compare(self._rows.take(rows), among, self._in_batches(self._inputs, rows, 1))

    def compare_answers(self, api: Client) -> tuple[Comparison, Comparison]:
        """All rows with what is expected, and some of them, asked for alone, with what the graph computes among a few.

        A server looks up stored features as they are now. Where one differs from the engine's input, the graph that was
        compared with the engine says what is expected; a row that it refuses is left out.
        """
        transform, table = self._transform, self._table
        key_columns = {
            column.name: column for view, _ in transform.stored for column in self._contract.views[view].keys
        }
        keys = {name: _values(table, column).tolist(column.dtype) for name, column in key_columns.items()}
        answer = api.lookup(transform.stored, keys, len(table)) if transform.stored else pa.table({})
        now = self._inputs | self._stored(answer)
        expected, refused = self._expected(now)
        rows = np.flatnonzero(~refused)
        answered, online = self._answers(api, keys, now, rows)
        offline = {name: values.take(answered) for name, values in expected.items()}
        compared = self._compare(self._rows.take(answered), offline, online, self._tolerances)
        alone, online = self._answers(api.singly(), keys, now, rows[spread(len(rows), SINGLES)])
        return compared, self._compare(self._rows.take(alone), self._in_batches(now, alone, FEW), online)

    def _answers(
        self, api: Client, keys: Mapping[str, list[Any]], now: Mapping[str, Values], rows: Index
    ) -> tuple[Index, dict[str, Values]]:
        """What a server answers to rows, less those whose stored features are no longer as they were a moment ago."""
        transform = self._transform
        now = {name: values.take(rows) for name, values in now.items()}
        answer = api.lookup(
            [*transform.stored, *((transform.name, field.name) for field in transform.fields)],
            {name: [values[row] for row in rows.tolist()] for name, values in keys.items()},
            len(rows),
            {column.name: (column.dtype, now[column.name]) for column in transform.request if column.name not in keys},
        )
        unchanged = np.ones(len(rows), bool)
        for name, values in self._stored(answer).items():
            unchanged &= equal_values(now[name], values, self._types[name])
        return rows[unchanged], {name: values.take(unchanged) for name, values in self._fields(answer).items()}

    def _in_batches(self, inputs: Mapping[str, Values], rows: Index, size: int) -> dict[str, Values]:
        """What the graph computes of rows, up to `size` at a time."""
        # A batch of no rows gives every field its type.
        parts = [
            self._graph.run({name: values.take(batch) for name, values in inputs.items()}).values
            for batch in tuple(in_batches(rows, size)) or (rows,)
        ]
        return {
            field.name: Values(*(np.concatenate([getattr(part[field.name], side) for part in parts])
                                 for side in ("data", "valid")))
            for field in self._transform.fields
        }  # fmt: skip

    def _expected(self, now: dict[str, Values]) -> tuple[dict[str, Values], Mask]:
        """The engine's value of each field where its inputs are unchanged, else the graph's; and the refused rows."""
        unchanged = np.ones(len(self._table), bool)
        for name, values in self._inputs.items():
            unchanged &= equal_values(values, now[name], self._types[name])
        graph = self._graph.run(now)
        refused: Mask = np.logical_or.reduce([np.zeros(len(unchanged), bool), *graph.refused.values()])
        pairs = {name: (engine, graph.values[name]) for name, engine in self._results.items()}
        return {
            name: Values(np.where(unchanged, left.data, right.data), np.where(unchanged, left.valid, right.valid))
            for name, (left, right) in pairs.items()
        }, refused

    def _stored(self, answer: pa.Table) -> dict[str, Values]:
        columns = map(self._contract.stored, self._transform.stored)
        return {column.name: from_arrow(answer[column.name], column.dtype) for column in columns}

    def _fields(self, table: pa.Table) -> dict[str, Values]:
        transform = self._transform
        return {field.name: from_arrow(table[transform.full_name(field.name)], field.dtype)
                for field in transform.fields}  # fmt: skip

    def _compare(
        self, rows: ComparedRows, offline: Mapping[str, Values], online: Mapping[str, Values],
        tolerances: Mapping[str, float] = MappingProxyType({}),
    ) -> Comparison:  # fmt: skip
        return {
            field.name: rows.compare(
                offline[field.name], online[field.name], field.dtype, tolerances.get(field.name, 0.0)
            )
            for field in self._transform.fields
        }


def _values(table: pa.Table, column: Column) -> Values:
    """A column of a training set; a spine may lack a column that has a default."""
    if column.name in table.column_names:
        return from_arrow(table[column.name], column.dtype)
    return from_arrow(pa.nulls(len(table), ARROW[column.dtype.name]), column.dtype)
