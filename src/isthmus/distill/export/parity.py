"""Whether a package answers as the student it was made from: a part of the verdict."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from isthmus.distill.executorch.process import opened
from isthmus.distill.onnx.runtime import Run, ask
from isthmus.distill.restore import restored
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.tasks.task import Material
from isthmus.distill.types import Answers, Array, spread
from isthmus.features.errors import PackageError
from isthmus.features.package import replay
from isthmus.features.package.golden import read_golden
from isthmus.features.package.manifest import Manifest, Variant, feeds, read_package
from isthmus.features.types import Float64
from isthmus.features.values.columns import Values, micros
from isthmus.features.verdict import FeatureVerdict, compare


def check_package(
    material: Material, package: Path, model_folder: Path, keys: Sequence[str] = (), rows: int | None = None
) -> dict[str, FeatureVerdict]:
    """Compares each model file of a package with the student in torch, and with its own golden cases.

    On rows spread over the training set every model file must give what the student says; in the golden cases every
    model file must give what is recorded. A model of rows is fed as the manifest says that its columns are. Each within
    the task's tolerance for its precision, not what a manifest may say. Of an output with many numbers in a row, that
    which differs most is shown.

    Args:
        material: what the student was trained with.
        package: its folder.
        model_folder: the student's.
        keys: columns of the training set that name its rows in examples.
        rows: how many of them to compare; by default what the task says.

    Returns:
        Model file to its comparison; its worst difference counts all rows.

    Raises:
        PackageError: the package is damaged, was made from another student, or a model file reaches out of it.
        ContractMismatch: the student was trained with something else.
        DataError: the student cannot be read.
    """
    manifest, found = read_package(package), restored(material, model_folder)
    if manifest.model != found.id:
        raise PackageError(
            str(package), f"made from student {manifest.model}", expected=found.id, remedy="export the student again"
        )
    task, golden, table = found.task, read_golden(package, manifest), material.table
    some = spread(table.num_rows, task.compared if rows is None else rows)
    named = table.take(some).select(list(keys)).to_pylist() if keys else [f"row {n}" for n in range(len(some))]
    names, times = [*map(str, named)], micros(table["event_timestamp"].take(some)).tolist()
    parts = [some[begin : begin + task.at_once] for begin in range(0, len(some), task.at_once)]
    inputs = manifest.model_inputs
    asked = [
        (case.expected, feeds(inputs, columns(table.take(part), inputs)) if inputs else case.feeds)
        for part in parts
        for case in (task.case(found.student, part),)
    ]
    recorded = [(case, feeds(inputs, golden.columns(case, inputs)) if inputs else case.feeds) for case in golden.cases]
    compared = {}
    for variant in manifest.variants:
        told, when = list(names), list(times)
        with _running(package, manifest, variant) as run:
            sides = [_worst(expected, run(fed)) for expected, fed in asked]
            replies = [run(fed) for _, fed in recorded]
        for number, ((case, _), answer) in enumerate(zip(recorded, replies, strict=True)):
            kept = {name: tensor.array for name, tensor in case.outputs[variant.file].items()}
            sides.append(_worst(kept, answer))
            told += [f"golden case {number}, row {row}" for row in range(len(sides[-1][0]))]
            when += [None] * len(sides[-1][0])
        both = [np.concatenate(side) for side in zip(*sides, strict=True)]
        expected, answers = (Values(side, np.ones(len(told), bool)) for side in both)
        compared[variant.file] = compare(told, expected, answers, Float64, task.tolerance[variant.precision], when)
    return compared


@contextmanager
def _running(package: Path, manifest: Manifest, variant: Variant) -> Iterator[Run]:
    if variant.format == "pte":
        with opened(package, manifest, variant) as program:
            yield program.ask
    else:
        # By its path: of a model from memory, weights in another file would be looked for in the working folder.
        yield partial(ask, replay.open_session(package, manifest, variant, 1))


def _worst(expected: Answers, found: Mapping[str, Array]) -> tuple[Array, Array]:
    """Of each row the number that differs most, as it is expected and as it was found; (n,) each."""
    rows = len(expected[next(iter(found))])
    if any(values.shape != expected[name].shape for name, values in found.items()):
        # An answer of another size is none.
        return np.zeros(max(rows, 1)), np.full(max(rows, 1), np.nan)
    if not rows:
        return np.zeros(0), np.zeros(0)
    pairs = [[side.reshape(rows, -1).astype(np.float64) for side in (expected[name], values)]
             for name, values in found.items()]  # fmt: skip
    ours, theirs = (np.concatenate(side, 1) for side in zip(*pairs, strict=True))
    with np.errstate(invalid="ignore"):
        apart = np.abs(ours - theirs)
    # A number that only one side has differs most of all; where both have none they agree.
    apart = np.where(np.isnan(ours) & np.isnan(theirs), 0.0, np.where(np.isnan(apart), np.inf, apart))
    place = apart.argmax(1)
    chosen = np.arange(rows)
    return ours[chosen, place], theirs[chosen, place]
