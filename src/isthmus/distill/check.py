"""Whether a package answers as the student it was made from: a part of the verdict."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from isthmus.distill.dataset import columns, tensors
from isthmus.distill.evaluate import sigmoid
from isthmus.distill.golden import spread
from isthmus.distill.runtime import predict, session
from isthmus.distill.student import load_student, read_record
from isthmus.features.columns import Values, micros
from isthmus.features.errors import PackageError
from isthmus.features.manifest import feeds, read_golden, read_package
from isthmus.features.types import Float64
from isthmus.features.verdict import FeatureVerdict, compare


def check_package(
    package: Path, model_folder: Path, table: pa.Table, rows: int, keys: Sequence[str] = ()
) -> dict[str, FeatureVerdict]:
    """Compares each model file of a package with the student in torch, and with its own golden rows.

    On up to `rows` rows spread over the table every model file must give the student's probability; on the golden
    rows every model file must give the recorded one. Each within the tolerance of the file.

    Args:
        package: its folder.
        model_folder: the student's.
        table: rows that the student learned from.
        rows: how many of them to compare.
        keys: columns of the table that name its rows in examples.

    Returns:
        Model file to its comparison; its worst difference counts all rows.

    Raises:
        PackageError: the package is damaged, or was made from another student.
        DataError: the student or the table cannot be read.
    """
    manifest, record = read_package(package), read_record(model_folder)
    if manifest.model != record.id:
        raise PackageError(
            str(package), f"made from student {manifest.model}", expected=record.id, remedy="export the student again"
        )
    golden = read_golden(package)
    inputs = manifest.model_inputs
    some = table.take(spread(table.num_rows, rows)) if table.num_rows else table
    named = some.select(list(keys)).to_pylist() if keys else [f"row {n}" for n in range(some.num_rows)]
    names = [*map(str, named), *(f"golden row {n}" for n in range(len(golden.rows)))]
    times = [*micros(some["event_timestamp"]).tolist(), *[None] * len(golden.rows)]
    parts = [feeds(inputs, golden.columns(inputs))]
    student = np.empty(0)
    if some.num_rows:
        student = sigmoid(load_student(model_folder).logits(tensors(some, record.model_inputs)))
        parts.insert(0, feeds(inputs, columns(some, inputs)))
    found = {}
    for variant in manifest.variants:
        opened = session((package / variant.file).read_bytes(), 1)
        answers = np.concatenate([predict(opened, part) for part in parts])
        expected = np.concatenate([student, golden.outputs[variant.file]])
        sides = [Values(side.astype(np.float64), np.ones(len(names), bool)) for side in (expected, answers)]
        found[variant.file] = compare(names, sides[0], sides[1], Float64, variant.tolerance, times)
    return found
