"""Whether a package answers like its student: a part of the verdict."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from isthmus.distill.export.candidate import require_student
from isthmus.distill.formats.programs import PROGRAMS
from isthmus.distill.onnx.runtime import Run, ask
from isthmus.distill.portable.process import opened
from isthmus.distill.restore import restored
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.tasks.task import Material
from isthmus.distill.types import Answers, Array, in_batches, spread
from isthmus.features.package import replay
from isthmus.features.package.golden import read_golden
from isthmus.features.package.manifest import WHOLE, Package, Variant, feeds
from isthmus.features.types import Float64
from isthmus.features.values.columns import Values, micros
from isthmus.features.verdict import FeatureVerdict, compare


def check_package(
    material: Material, package: Package, model_folder: Path, keys: Sequence[str] = (), rows: int | None = None
) -> dict[str, FeatureVerdict]:
    """Compares each model file of a package with the student in torch, and with its own golden cases.

    On rows spread over the training set it must answer like the student, for the golden cases as recorded, both within
    the tolerance of the task, whatever the manifest says. A model of rows gets its columns as the manifest describes
    them. Of an output with many numbers in a row, the comparison shows that which differs most. Examples name rows by
    the columns in `keys`.

    Raises:
        PackageError: the package is of another student, or a model file refers to files outside.
        ContractMismatch: the student was trained with something else.
        DataError: the student cannot be read.
    """
    manifest, trained = package.manifest, restored(material, model_folder)
    require_student(package, trained.id)
    task, golden, table = trained.task, read_golden(package), material.student_table
    sample = spread(table.num_rows, task.compared if rows is None else rows)
    labels = table.take(sample).select(list(keys)).to_pylist() if keys else [f"row {n}" for n in range(len(sample))]
    names, times = [*map(str, labels)], micros(table["event_timestamp"].take(sample)).tolist()
    inputs = manifest.model_inputs
    cases = [
        (case.expected, feeds(inputs, columns(table.take(batch), inputs)) if inputs else case.feeds, case.core)
        for batch in in_batches(sample, task.at_once)
        for case in (task.case(trained.student, batch),)
    ]
    recorded = [(case, feeds(inputs, golden.columns(case, inputs)) if inputs else case.feeds) for case in golden.cases]
    verdicts = {}
    for variant in manifest.variants:
        places, moments = list(names), list(times)
        with _running(package, variant) as run:
            sides = [_worst(expected, run(core if variant.core else tensors)) for expected, tensors, core in cases]
            replies = [run(case.fed(variant) if variant.core else tensors) for case, tensors in recorded]
        for number, ((case, _), answer) in enumerate(zip(recorded, replies, strict=True)):
            sides.append(_worst({name: tensor.array for name, tensor in case.outputs[variant.file].items()}, answer))
            places += [f"golden case {number}, row {row}" for row in range(len(sides[-1][0]))]
            moments += [None] * len(sides[-1][0])
        both = [np.concatenate(side) for side in zip(*sides, strict=True)]
        expected, answers = (Values(side, np.ones(len(places), bool)) for side in both)
        tolerance = task.tolerance[variant.precision]
        verdicts[variant.file] = compare(places, expected, answers, Float64, tolerance, moments)
    return verdicts


@contextmanager
def _running(package: Package, variant: Variant) -> Iterator[Run]:
    if variant.format in WHOLE:
        yield partial(ask, replay.open_session(package, variant, 1))
    else:
        with opened(PROGRAMS[variant.format], package, variant) as program:
            yield program.ask


def _worst(expected: Answers, outputs: Answers) -> tuple[Array, Array]:
    """Of each row the number that differs most: the expected ones and the model's, (n,) each."""
    rows = len(expected[next(iter(outputs))])
    if any(values.shape != expected[name].shape for name, values in outputs.items()):
        return np.zeros(max(rows, 1)), np.full(max(rows, 1), np.nan)
    if not rows:
        return np.zeros(0), np.zeros(0)
    pairs = [[side.reshape(rows, -1).astype(np.float64) for side in (expected[name], values)]
             for name, values in outputs.items()]  # fmt: skip
    ours, theirs = (np.concatenate(side, 1) for side in zip(*pairs, strict=True))
    with np.errstate(invalid="ignore"):
        differences = np.abs(ours - theirs)
    # A number that a single side has differs most of all; two NaNs agree.
    differences = np.where(np.isnan(differences), np.inf, differences)
    differences = np.where(np.isnan(ours) & np.isnan(theirs), 0.0, differences)
    worst = np.arange(rows), differences.argmax(1)
    return ours[worst], theirs[worst]
