"""Whether a package answers as the student it was made from: a part of the verdict."""

from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa

from isthmus.distill.dataset import columns, tensors
from isthmus.distill.evaluate import sigmoid
from isthmus.distill.golden import spread
from isthmus.distill.runtime import predict, session
from isthmus.distill.student import load_student, read_record
from isthmus.features.errors import PackageError
from isthmus.features.manifest import feeds, read_golden, read_package


class Comparison(TypedDict):
    """Probabilities compared, how many differed by more than their tolerance, and the largest difference in fp32."""

    compared: int
    differing: int
    worst: float


def check_package(package: Path, model_folder: Path, table: pa.Table, rows: int) -> Comparison:
    """Compares a package with the student in torch, and with its own golden rows.

    On up to `rows` rows spread over the table every model file must give the student's probability; on the golden
    rows every model file must give the recorded one. Each within the tolerance of the file.

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
    fed = feeds(manifest.model_inputs, golden.columns(manifest.model_inputs))
    compared = differing = 0
    worst = 0.0
    for variant in manifest.variants:
        opened = session((package / variant.file).read_bytes(), 1)
        gap = np.abs(predict(opened, fed) - np.array(golden.outputs[variant.file]))
        compared += len(gap)
        differing += int((~(gap <= variant.tolerance)).sum())
    if table.num_rows:
        some = table.take(spread(table.num_rows, rows))
        expected = sigmoid(load_student(model_folder).logits(tensors(some, record.model_inputs)))
        fed = feeds(manifest.model_inputs, columns(some, manifest.model_inputs))
        for variant in manifest.variants:
            opened = session((package / variant.file).read_bytes(), 1)
            gap = np.abs(predict(opened, fed) - expected)
            compared += len(gap)
            differing += int((~(gap <= variant.tolerance)).sum())
            if variant.precision == "fp32":
                worst = max(worst, float(gap.max()))
    return {"compared": compared, "differing": differing, "worst": worst}
