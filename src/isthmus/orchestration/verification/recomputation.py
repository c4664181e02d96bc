"""Verification of request transforms: compare the engine's results in a training set with the results of the graphs."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from isthmus.distill.declaration import Distillation
from isthmus.distill.types import Index, evenly_spaced, in_batches
from isthmus.features.contract.schema import Column, Contract, TransformContract
from isthmus.features.definition.spec import AtRequest
from isthmus.features.request.graph import RowGraph
from isthmus.features.values.arrow import ARROW, from_arrow, micros
from isthmus.features.values.columns import Mask, Values
from isthmus.features.values.equality import equal_values
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.project import Project
from isthmus.orchestration.verification.client import Client
from isthmus.orchestration.verification.sides import CHECKED_ROWS, SAMPLE, SINGLES, ComparedRows, sample_with_keys
from isthmus.package.verdict import FeatureVerdict, Sample, Verdict, flat

# Batch size for the expected single-row answers: it does not fill vector registers, and is neither one row nor all.
FEW = 7

Comparison = dict[str, FeatureVerdict]


def recompute(
    project: Project, contract: Contract, declared: Distillation | None, api: Client, verdict: Verdict, *,
    all_keys: bool,
) -> None:  # fmt: skip
    """Compare what the engine and the servers compute for request transforms, and add the comparisons to `verdict`.

    A request transform computes features from a request. The engine's results are in the latest training set. Servers
    run a graph of the transform. The graphs run here, and in the server of `api`, whose comparisons are named `API
    NAME`. Uses a sample of the rows; with `all_keys`, all rows here and up to 2,000 in the server. Results may differ
    by the declared tolerance. Some rows are also computed one at a time, and must have the same bits as in a batch.
    Skips a transform, with a reason, if the training set has no values of its current definition.
    """
    services = (declared.teacher.name, declared.student.name) if declared else ()
    transforms = {transform.name: transform for service in services for transform in contract.transforms_of(service)}
    unused = "no distillation uses it" if declared is None else f"no service of {declared.name} uses it"
    for name in contract.transforms:
        if name not in transforms:
            verdict.skipped[name] = f"{unused}, so no training set has its values"
    examples = Artifacts(project, declared).latest_training_set() if declared and transforms else None
    if declared is None or examples is None:
        verdict.skipped.update(dict.fromkeys(transforms, "no training set has its values yet"))
        return
    table = examples.table()
    rows = len(table)
    keys = contract.spines[declared.spine.name].key_names
    if not all_keys and len(table) > SAMPLE:
        table = table.take(pa.array(np.linspace(0, len(table) - 1, SAMPLE).astype(np.int64)))
    answered = sample_with_keys(table, keys, CHECKED_ROWS if all_keys else SAMPLE)
    for name, transform in transforms.items():
        if examples.computed.get(name, {}).get("hash") != transform.hash:
            verdict.skipped[name] = (
                f"training set {examples.id} was made before it changed: run `isthmus features training-set`"
            )
            continue
        declaration = project.definitions.transforms[name]
        compared = {
            name: EngineResults(transform, declaration, contract, table, keys).compare_graph(),
            f"API {name}": EngineResults(transform, declaration, contract, answered, keys).compare_answers(api),
        }
        for title, (together, alone) in compared.items():
            verdict.views[title] = together
            verdict.singly.update(flat({title: alone}))
        if len(table) < rows:
            verdict.samples["rows of request transforms"] = Sample(len(table), rows)


class EngineResults:
    """Results of an engine for one request transform and the rows of a training set; `keys` are the key columns."""

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
        values = self._graph.run(self._inputs).values
        # Rows that the graph refuses are null here, and so differ from the engine's values.
        compared = self._compare(self._rows, self._results, values, self._tolerances)
        rows = evenly_spaced(len(self._rows), SINGLES)
        batched = {name: value.take(rows) for name, value in values.items()}
        return compared, self._compare(self._rows.take(rows), batched, self._in_batches(self._inputs, rows, 1))

    def compare_answers(self, api: Client) -> tuple[Comparison, Comparison]:
        transform, table = self._transform, self._table
        key_columns = {
            column.name: column for view, _ in transform.stored for column in self._contract.views[view].keys
        }
        keys = {name: _values(table, column).tolist(column.dtype) for name, column in key_columns.items()}
        answer = api.lookup(transform.stored, keys, len(table)) if transform.stored else pa.table({})
        current = self._inputs | self._stored(answer)
        expected, refused = self._expected(current)
        rows = np.flatnonzero(~refused)
        answered, online = self._answers(api, keys, current, rows)
        offline = {name: values.take(answered) for name, values in expected.items()}
        compared = self._compare(self._rows.take(answered), offline, online, self._tolerances)
        alone, online = self._answers(api.one_row_per_request(), keys, current, rows[evenly_spaced(len(rows), SINGLES)])
        return compared, self._compare(self._rows.take(alone), self._in_batches(current, alone, FEW), online)

    def _answers(
        self, api: Client, keys: Mapping[str, list[Any]], current: Mapping[str, Values], rows: Index
    ) -> tuple[Index, dict[str, Values]]:
        transform = self._transform
        current = {name: values.take(rows) for name, values in current.items()}
        answer = api.lookup(
            [*transform.stored, *((transform.name, field.name) for field in transform.fields)],
            {name: [values[row] for row in rows.tolist()] for name, values in keys.items()},
            len(rows),
            {
                column.name: (column.dtype, current[column.name])
                for column in transform.request
                if column.name not in keys
            },
        )
        unchanged = np.ones(len(rows), bool)
        for name, values in self._stored(answer).items():
            unchanged &= equal_values(current[name], values, self._types[name])
        return rows[unchanged], {name: values.take(unchanged) for name, values in self._fields(answer).items()}

    def _in_batches(self, inputs: Mapping[str, Values], rows: Index, size: int) -> dict[str, Values]:
        # Without rows, run one empty batch, which gives every field its type.
        parts = [
            self._graph.run({name: values.take(batch) for name, values in inputs.items()}).values
            for batch in tuple(in_batches(rows, size)) or (rows,)
        ]
        return {
            field.name: Values(*(np.concatenate([getattr(part[field.name], side) for part in parts])
                                 for side in ("data", "valid")))
            for field in self._transform.fields
        }  # fmt: skip

    def _expected(self, current: dict[str, Values]) -> tuple[dict[str, Values], Mask]:
        """Return expected values by field, and a mask of the rows that the graph refuses.

        The expected values are the engine's, or the graph's if an input of the row has changed since.
        """
        unchanged = np.ones(len(self._table), bool)
        for name, values in self._inputs.items():
            unchanged &= equal_values(values, current[name], self._types[name])
        graph = self._graph.run(current)
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
    """Return a column of a training set. It is all null if the column is missing, which a default allows."""
    if column.name in table.column_names:
        return from_arrow(table[column.name], column.dtype)
    return from_arrow(pa.nulls(len(table), ARROW[column.dtype.name]), column.dtype)
