"""The small training set with a label of each kind."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from isthmus.distill.labels import Binary, Classes, Label, Number, Rank
from isthmus.distill.tasks.task import Material
from isthmus.features.definition.spec import Entity, Field, Spine
from isthmus.features.types import Array, DataType, Float64, Int64, String
from isthmus.features.values.arrow import from_arrow
from tests.distill.support import HOUR, material, training_set

KINDS: dict[str, tuple[Label, DataType]] = {
    "binary": (Binary(), Int64),
    "classes": (Classes(), String),
    "several": (Classes(several=True), Array(String)),
    "number": (Number(), Float64),
    "rank": (Rank(within="query"), Int64),
}
NAMES = ("delayed", "late", "rough")
QUERY = Entity("query", join_keys={"query": Int64})
ROWS_OF_A_QUERY = 8


def labelled(kind: str, rows: int = 2000, seed: int = 0) -> pa.Table:
    """The training set, in which "late" depends on the inputs as much as there, but is of another kind.

    Of a rank, eight rows are asked at a time, as a query.
    """
    table, draw = training_set(rows, seed), np.random.default_rng(seed + 1)
    if kind == "binary":
        return table
    distance = np.nan_to_num(from_arrow(table["distance"], Float64).data, nan=800.0)
    signal = (distance - 800) / 300 + (table["hour"].to_numpy() > 12) + table["secret"].to_numpy()
    noisy = signal + draw.normal(size=rows)
    if kind == "number":
        return _with(table, 1000 + 250 * noisy)
    if kind == "classes":
        return _with(table, np.array(["early", "on time", "late"])[np.digitize(noisy, (0, 1.5))])
    if kind == "several":
        has = np.stack([noisy > 0, noisy > 1.5, draw.random(rows) < 0.3], 1).tolist()
        return _with(table, [[name for name, is_one in zip(NAMES, row, strict=True) if is_one] for row in has])
    query = np.arange(rows) // ROWS_OF_A_QUERY
    event = table["event_timestamp"].cast(pa.int64()).to_numpy()[query * ROWS_OF_A_QUERY]
    moments = pa.timestamp("us", tz="UTC")
    grouped = _with(table, np.digitize(noisy, (0, 1, 2, 3))).append_column("query", pa.array(query))
    for name, times in (("event_timestamp", event), ("known_at", event + HOUR)):
        grouped = grouped.set_column(grouped.column_names.index(name), name, pa.array(times, moments))
    return grouped


def _with(table: pa.Table, labels: np.ndarray[Any, Any] | list[list[str]]) -> pa.Table:
    return table.set_column(table.column_names.index("late"), "late", pa.array(labels))


def material_of(kind: str, table: pa.Table, label: Label | None = None, **changes: Any) -> Material:
    """A material whose task has the label of a kind, or another of that kind."""
    usual, dtype = KINDS[kind]
    made = material(table, **changes, label=label or usual)
    spine = Spine("flights", [QUERY] if kind == "rank" else [], Field("late", dtype), [])
    return replace(made, declaration=replace(made.declaration, spine=spine))
