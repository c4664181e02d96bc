"""Measure recorded answers by the labels known since, and their drift from training (`isthmus answers monitor`)."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.declaration import Distillation
from isthmus.distill.gates import PRODUCTION, bounds_on, limits_text, value_text
from isthmus.distill.labels import Classes
from isthmus.distill.types import Array
from isthmus.features.clock import MICROSECOND
from isthmus.features.contract.schema import Column
from isthmus.features.errors import IsthmusError, RequestError
from isthmus.features.files import write_atomically
from isthmus.features.production import (
    InputDrift,
    PackageQuality,
    Production,
    QualityLoss,
    SliceQuality,
    production_file,
)
from isthmus.features.progress import Progress, silent
from isthmus.orchestration.frames import source_frames, spine_columns
from isthmus.orchestration.monitoring import figures
from isthmus.orchestration.monitoring.answers import PackageAnswers, package_folder, read_answers
from isthmus.orchestration.monitoring.bounds import check_bound
from isthmus.orchestration.monitoring.deploymentloss import deployment_losses, roll_back_if_worse
from isthmus.orchestration.monitoring.drift import served_drift
from isthmus.orchestration.monitoring.labels import CODES, LabelMatches, Without, match_labels, nearest_answers
from isthmus.orchestration.monitoring.page import page, page_file
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import collect
from isthmus.orchestration.recording.served import key_values
from isthmus.orchestration.server.collect import describe_error, run_every
from isthmus.package.manifest import read_package
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.rollout.releases import current_deployment
from isthmus.transforms.views.compute import compute_spine

# Between two turns of `follow`: each computes the spine.
SECONDS = 3600.0
_SLICED = ("Bool", "Int32", "Int64", "Float32", "Float64", "String")


def monitor(project: Project, name: str | None = None, *, progress: Progress = silent) -> Production:
    """Measure a distillation in production: the quality of recorded answers by known labels, and the drift of inputs.

    Collects recorded answers first, computes the spine (the table with the labels) again, and writes the result to
    `production_file`, with an HTML page beside it. Rolls the deployment back if it loses more quality than its bounds
    allow. The first package of the result is the deployed one, if it has answers. A broken bound raises no error: call
    `require_bounds` with the result. Raise RequestError if the distillation's kind of label has no measure, and
    ContractMismatch if the definitions are not applied. Raise DataError if the answers or the spine cannot be read, or
    a label is invalid.
    """
    declared = project.distillation(name)
    decides = figures.main_measure(declared)
    contract = project.applied()
    label = declared.spine.label.name
    columns = [
        column
        for column in spine_columns(contract, declared.spine.name)
        if column.name != label and column.dtype.element is None
    ]

    @lru_cache(None)
    def spine() -> pa.Table:
        progress(f"computing {declared.spine.name}", 0.3)
        with source_frames(project, [declared.spine]) as frames:
            return compute_spine(declared.spine, spine_columns(contract, declared.spine.name), frames)

    def keys(column: str) -> Sequence[Any]:
        return key_values(pc.unique(spine()[column].drop_null()))

    collect(project, progress=progress)
    progress("reading recorded answers", 0.0)
    deployment = current_deployment(project.deployment_file)
    measured = read_answers(project, declared, columns, keys)
    if deployment is not None:
        # The deployed package comes first, even if a candidate or a rolled-back package answered later.
        kind = deployment.digest, deployment.precision
        measured.sort(key=lambda each: ((each.package, each.precision) != kind, each.package != kind[0]))
    left_out: Counter[Without] = Counter()
    packages: list[PackageQuality] = []
    all_slices: Sequence[SliceQuality] = ()
    for each in measured:
        progress(f"measuring package {each.package[:12]}", 0.5)
        work = _Work(project, declared, columns, decides, deployment)
        package, slices = _package(work, each, spine(), left_out)
        all_slices = all_slices if packages else slices
        packages.append(package)
    lost = [loss for package in packages for loss in package.lost]
    result = Production(
        model=declared.name, metric=decides[0], higher_is_better=decides[1], at=project.now(),
        left_out={why.value: left_out[why] for why in Without if left_out[why]}, packages=tuple(packages),
        bounds=tuple(
            check_bound(bound, packages[0] if packages else None, all_slices)
            for bound in bounds_on(declared.bounds, PRODUCTION)
        ),
        undone="" if deployment is None else roll_back_if_worse(project, deployment, lost),
    )  # fmt: skip
    file = production_file(project.state, declared.name)
    write_atomically(page_file(file), page(result).encode())
    write_atomically(file, result.dumps())
    progress("production quality is written", 1.0)
    return result


def follow(project: Project, name: str | None, say: Callable[[str], None], stopped: Event | None = None) -> None:
    """Call `monitor` every hour until the event `stopped` is set, or forever if `stopped` is None.

    If `name` is None, all distillations whose labels can be measured are monitored. `say` gets a sentence about each
    broken bound, rollback and error; none of them ends the loop.
    """
    names = [name] if name is not None else list(project.definitions.distillations)

    def turn() -> str:
        problems = []
        for each in names:
            try:
                result = monitor(project, each)
            except Exception as error:  # noqa: BLE001 - one failure must not stop the next
                # Without a name, skip distillations that have no measure, such as rankings.
                problems += (
                    [] if isinstance(error, RequestError) and name is None else [f"{each}: {describe_error(error)}"]
                )
                continue
            for bound in (bound for bound in result.bounds if bound.broken):
                say(f"{each}: {value_text(bound)}, expected {limits_text(bound)}")
            if result.undone:
                say(f"{each}: {result.undone}")
        return "\n".join(problems)

    run_every(turn, SECONDS, say, stopped)


def plain(project: Project, result: Production) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(result)
    file = production_file(project.state, result.model)
    return {**built, "file": str(file), "page": str(page_file(file))}


class _Work(NamedTuple):
    project: Project
    declared: Distillation
    columns: Sequence[Column]
    decides: tuple[str, bool]
    deployment: Deployment | None


def _package(
    work: _Work, answers: PackageAnswers, spine: pa.Table, left_out: Counter[Without]
) -> tuple[PackageQuality, Sequence[SliceQuality]]:
    """Measure a package. Return its quality and all of its slices; count its rows without a label in `left_out`."""
    project, declared = work.project, work.declared
    folder, unknown = package_folder(project, declared, answers.package), []
    if folder is None:
        unknown.append("its package is gone, so its inputs are not known")
    matches = _matched_labels(work, answers, spine)
    chosen = nearest_answers(matches, answers.at)
    codes = np.where((matches.why < 0) & ~chosen, CODES[Without.AGAIN], matches.why)
    for code, why in enumerate(Without):
        left_out[why] += int((codes == code).sum())
    labels = _labels(declared, spine, folder, answers.outputs.shape[1])
    if isinstance(labels, str):
        unknown.append(labels)
        labels, chosen = np.zeros(len(spine)), np.zeros(len(chosen), bool)
    row_labels = np.where(matches.row >= 0, labels[matches.row] if len(labels) else math.nan, math.nan)
    measure = figures.measuring(declared)
    whole = figures.quality(measure, row_labels, answers.outputs, chosen)
    slices = figures.slices(
        measure, row_labels, answers.outputs, chosen, answers.columns.select(_slice_columns(work)), work.decides
    )  # fmt: skip
    drifted: tuple[InputDrift, ...] = ()
    since = None
    if folder is not None and len(answers.at):
        try:
            since, drifted = served_drift(project, declared, folder, answers)
        except IsthmusError as error:
            unknown.append(f"drift is not known: {error}")
    lost: tuple[QualityLoss, ...] = ()
    try:
        lost = deployment_losses(project, declared, work.deployment, answers, row_labels, chosen)
    except IsthmusError as error:
        unknown.append(f"the loss against the previous package is not known: {error}")
    quality = PackageQuality(
        package=answers.package, precision=answers.precision, first=int(answers.at.min()), last=int(answers.at.max()),
        answers=whole.answers, rows=whole.rows, measures=whole.measures,
        weeks=figures.weeks(measure, row_labels, answers.outputs, chosen, answers.at),
        slices=slices[: figures.SLICES], drift=drifted, drift_since=since, lost=lost, unknown=tuple(unknown),
    )  # fmt: skip
    return quality, slices


def _slice_columns(work: _Work) -> list[str]:
    """Return the columns to slice by. Private join keys are left out by default: reports store values in clear text."""
    chosen, record = work.declared.monitor.slices, work.project.settings.server.record
    views = work.project.applied().views
    private = {key.name for name in (record.private if record else ()) if name in views for key in views[name].keys}
    return [
        column.name
        for column in work.columns
        if column.dtype.name in _SLICED and (column.name not in private if chosen is None else column.name in chosen)
    ]


def _matched_labels(work: _Work, answers: PackageAnswers, spine: pa.Table) -> LabelMatches:
    declared, count = work.declared, len(answers.at)
    names = list(answers.columns.column_names)
    match = names if declared.monitor.match is None else list(declared.monitor.match)
    limits_text = np.isin(names, match)
    row, distance = np.full(count, -1), np.zeros(count, np.int64)
    why = np.full(count, CODES[Without.UNMATCHED])
    patterns, of = np.unique(answers.had & limits_text, axis=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        if not pattern.any() or (declared.monitor.match is not None and not pattern[limits_text].all()):
            continue
        own = of.reshape(-1) == number
        columns = answers.columns.select([name for name, there in zip(names, pattern, strict=True) if there])
        matches = match_labels(
            spine, declared.spine.label.name, columns.filter(pa.array(own)), answers.at[own],
            tolerance=declared.monitor.within // MICROSECOND, now=work.project.now(),
        )  # fmt: skip
        row[own], distance[own], why[own] = matches.row, matches.distance, matches.why
    for reason, holds in (
        (Without.UNREAD, answers.unread),
        (Without.SCORE, ~np.isfinite(answers.outputs).all(axis=1)),
        (Without.CLOCK, answers.twice),
        (Without.FUTURE, answers.at > work.project.now()),
    ):
        why[holds] = CODES[reason]
    return LabelMatches(np.where(why < 0, row, -1), distance, why)


def _labels(declared: Distillation, spine: pa.Table, folder: Path | None, width: int) -> Array | str:
    """Return the spine's labels as numbers or class indices, or a sentence if they do not fit the package's outputs."""
    column = spine[declared.spine.label.name]
    if isinstance(declared.label, Classes):
        if folder is None:
            return "its package is gone, so the order of its classes is not known"
        if not (classes := read_package(folder).classes):
            return "it predicts no classes, but the label has classes now"
        places: Array = figures.class_indices(column, classes).to_numpy().astype(np.float64)
        return places
    if width > 1:
        return "it predicts classes, but the label has no classes now"
    return figures.numeric_labels(declared, column)
