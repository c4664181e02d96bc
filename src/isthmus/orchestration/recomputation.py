"""Request transforms in the verdict: what the engine computed for a training set, beside what the graphs compute."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from isthmus.distill.declaration import Distillation
from isthmus.features.columns import from_arrow, micros
from isthmus.features.contract import Contract, TransformContract
from isthmus.features.rowgraph import RowGraph
from isthmus.features.spec import AtRequest
from isthmus.features.verdict import FeatureVerdict, compare
from isthmus.orchestration.project import Project
from isthmus.orchestration.trainingset import latest_training_set


def recompute(
    project: Project, contract: Contract, declared: Distillation, sample: int | None
) -> tuple[dict[str, dict[str, FeatureVerdict]], dict[str, str]]:
    """Request transform to field to its comparison, over the rows of the last training set.

    A transform is left out if there is no training set, or if it computed something else then: the second part says
    which, and why.

    Args:
        project: the project.
        contract: its contract.
        declared: the distillation.
        sample: rows to compare, spread over the training set; None for all.
    """
    services = (declared.teacher.name, declared.student.name)
    transforms = {transform.name: transform for service in services for transform in contract.used(service)}
    made = latest_training_set(project, declared) if transforms else None
    if made is None:
        return {}, dict.fromkeys(transforms, "there is no training set in which an engine computed it")
    same = [one for name, one in transforms.items() if made.computed.get(name, {}).get("hash") == one.hash]
    table = made.table()
    if sample is not None and len(table) > sample:
        table = table.take(pa.array(np.linspace(0, len(table) - 1, sample).astype(np.int64)))
    keys = [name for name, _ in contract.spines[declared.spine.name]["keys"]]
    names = [str(row) for row in table.select(keys).to_pylist()]
    compared = {
        one.name: _compare(one, project.definitions.transforms[one.name], contract, table, names) for one in same
    }
    older = f"training set {made.id} was made before it was changed: run `isthmus training-set`"
    return compared, {name: older for name in transforms if name not in compared}


def _compare(
    transform: TransformContract, declared: AtRequest, contract: Contract, table: pa.Table, names: Sequence[str]
) -> dict[str, FeatureVerdict]:
    given = {column.name: from_arrow(table[column.name], column.dtype) for column in contract.taken(transform)}
    # What the graph refuses is null, which the engine's value is not.
    found = RowGraph(transform).run(given).values
    tolerances = {field.name: field.tolerance for field in declared.schema}
    times = micros(table["event_timestamp"]).tolist()
    return {
        field.name: compare(
            names,
            from_arrow(table[transform.full_name(field.name)], field.dtype),
            found[field.name],
            field.dtype,
            tolerances[field.name],
            times,
        )
        for field in transform.fields
    }
