"""`attribute`: a change of score, from the ideal answer to the one that was given, in parts of what caused it."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.distill.declaration import EACH, STAGES, Distillation
from isthmus.distill.evaluation.metrics import auc, log_loss
from isthmus.distill.evaluation.residuals import mae, rmse
from isthmus.distill.gates import GateResult
from isthmus.distill.labels import Binary
from isthmus.distill.tabular.scores import Scores
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.tasks.task import Material
from isthmus.distill.training.teacheroutputs import open_outputs
from isthmus.features import clock
from isthmus.features.days import Days
from isthmus.features.errors import RequestError, one_of
from isthmus.features.files import write_atomically
from isthmus.features.progress import Progress, silent
from isthmus.features.values.arrow import micros
from isthmus.orchestration.artifacts import Artifacts, serving_profile
from isthmus.orchestration.attribution import inputs
from isthmus.orchestration.attribution.inputs import TIME, Rows
from isthmus.orchestration.attribution.page import page
from isthmus.orchestration.attribution.recordings.predictions import predictions
from isthmus.orchestration.attribution.recordings.questions import ID, choose_recorded
from isthmus.orchestration.attribution.report import SCORE, Attribution, Measure, Part, page_file, rows_file
from isthmus.orchestration.attribution.scores import Choose, Chosen, compared
from isthmus.orchestration.attribution.shapley import Numbers, Shares, shapley
from isthmus.orchestration.attribution.stages import (
    CELLS,
    NEEDS,
    SKEW,
    STALENESS,
    Features,
    coalitions,
)
from isthmus.orchestration.project import Project
from isthmus.orchestration.runtimes.products import RUNTIMES, Product
from isthmus.package.inputs import ModelInput
from isthmus.package.manifest import Package, open_package

LARGEST = 10
"""Rows whose answer is farthest from the ideal, which a report has."""


def day_range(first: str | None, end: str | None) -> Days | None:
    """The days of the command line; None for the rows of the test part.

    Raises:
        RequestError: one of both is missing, is no day, or the range is empty.
    """
    if (first is None) != (end is None):
        raise RequestError("range", f"--{'to' if end is None else 'from'} is missing",
                           expected="both --from and --to, or neither")  # fmt: skip
    return None if first is None or end is None else Days.parse(first, end)


def refuse(options: Mapping[str, object], beside: str) -> None:
    """Raises a RequestError with the options that are named and do not go with another."""
    if named := [name for name, value in options.items() if value not in (None, [])]:
        raise RequestError(", ".join(named), f"does not go with {beside}", remedy="leave it out")


def attribute(  # noqa: PLR0913 - the options of the command
    project: Project,
    name: str | None = None,
    *,
    days: Days | None = None,
    fed: Path | None = None,
    precision: str | None = None,
    runtime: str | None = None,
    recorded: bool = False,
    progress: Progress = silent,
) -> Attribution:
    """Splits the difference of the last package's answers from the ideal ones among the stages between them.

    The ideal answer is the teacher's, to the features that could be known at the moment of a row. The rows are the test
    part of the student's training set, or those of the last training set within `days`. `fed` is a file with what the
    model was fed, of keys, event times and inputs; without it, that is what was served.

    With `recorded`, the rows are the recorded predictions of `days`, or all of them, of the package that answered last;
    what was answered is what they say.

    Raises:
        RequestError: the answers are no numbers, no row is in the range, or there is no such file or runtime.
        DataError: nothing was exported, or a student, a table or the file is gone or not what it must be.
        ContractMismatch: the package cannot run under the contract in force.
    """
    artifacts = Artifacts.of(project, name)
    declared, product = artifacts.declared, _product(runtime or "ort")
    if recorded:
        refuse({"--fed": fed, "--precision": precision, "--runtime": runtime}, "--recorded")
        progress("reading recorded answers", 0.0)
        answered = predictions(project, declared, days)
        package, precision = answered.package, answered.precision
        choose = choose_recorded(project, artifacts, answered)
    else:
        package = open_package(artifacts.last_package())
        precision = precision or serving_profile(project, package.files.folder).precision
        choose = _of_training_set(project, artifacts, package, days, fed)
    found = compared(project, declared, package, precision, product, choose, progress)
    rows, cells, unknown = found.rows, found.cells, found.chosen.unknown
    spine = [key for key, _ in project.applied().spines[declared.spine.name]["keys"]]
    keys = [name for name in (ID, *spine, TIME) if name in rows.table.column_names]
    shares = shapley(coalitions(cells), NEEDS)
    known = [stage for stage in STAGES if stage not in unknown]
    table = _table(rows.table.select(list(dict.fromkeys(keys))), cells, shares, known)
    of = measures_of(declared, found.labels)
    far = np.argsort(-np.abs(cells[CELLS[-1]] - cells[CELLS[0]]), kind="stable")[:LARGEST]
    measures = {measure: _measure(cells, function, known) for measure, function in of.items()}
    each = {stage: float(np.abs(shares.value[STAGES.index(stage)]).mean()) for stage in known}
    result = Attribution(
        declared.name, package.files.digest, found.precision, product.option, rows.examples.id, len(rows.places),
        found.chosen.matched, found.chosen.left_out, unknown, measures, each, table.take(pa.array(far)).to_pylist(),
        _bounds(declared, measures, each), table, project.state / "attribution" / declared.name,
    )  # fmt: skip
    write(result)
    progress("the attribution is written", 1.0)
    return result


def write(result: Attribution) -> None:
    """Writes the page, and the table of all rows."""
    buffer = io.BytesIO()
    pq.write_table(result.table, buffer)
    write_atomically(rows_file(result.folder), buffer.getvalue(), mode=0o600)
    write_atomically(page_file(result.folder), page(result).encode(), mode=0o600)


def _product(option: str) -> Product:
    known = {product.option: product for product in RUNTIMES.values()}
    if option not in known:
        raise RequestError(f"runtime {option}", "there is none of this name", expected=one_of(known))
    return known[option]


def _of_training_set(
    project: Project, artifacts: Artifacts, package: Package, days: Days | None, fed: Path | None
) -> Choose:
    def choose(scores: Scores, material: Material) -> Chosen:
        examples = artifacts.training_set(package.manifest.training_set)
        rows = Rows(examples, material.table.take(pa.array(material.parts.test)), material.parts.test)
        if days is not None:
            rows = inputs.within(artifacts.latest_training_set() or examples, days)
        chosen = _features(project, artifacts.declared, rows, scores.student_inputs, fed)
        if rows.examples.id != examples.id:
            return chosen
        every = np.arange(material.table.num_rows)
        return chosen._replace(outputs=open_outputs(scores.task, scores.boosting, every, artifacts.outputs, silent))

    return choose


def _features(
    project: Project, declared: Distillation, rows: Rows, read: tuple[ModelInput, ...], file: Path | None
) -> Chosen:
    """The rows of which all is known."""
    left_out: dict[str, int] = {}
    unknown: dict[str, str] = {}

    def keep(chosen: Rows, why: str) -> Rows:
        if len(chosen.places) < len(rows.places):
            left_out[why] = len(rows.places) - len(chosen.places)
        return chosen

    if declared.student.device is None:
        since, view = inputs.served_since(project, declared)
        after = np.flatnonzero(micros(rows.table[TIME]) >= (since or 0))
        if since is None:
            unknown[STALENESS] = f"{view} was never materialized under this contract"
        elif not len(after):
            unknown[STALENESS] = f"{view} was first served at {clock.moment(since).isoformat()}, after all of the rows"
        else:
            rows = keep(rows.take(after), "nothing was served yet")
    fed = None
    if file is None:
        unknown[SKEW] = "what the model was fed is not known: it is taken for what was served"
    else:
        keys = [key for key, _ in project.applied().spines[declared.spine.name]["keys"]]
        fed = inputs.fed(file, rows.table, keys, [item.name for item in read])
        rows = keep(rows.take(fed.rows), f"not once in {file}")
    ideal = columns(rows.table, read)
    served = ideal if STALENESS in unknown else columns(inputs.served(project, declared, rows), read)
    inputs_fed = served
    if fed is not None:
        inputs_fed = {**served, **columns(fed.table, [item for item in read if item.name in fed.table.column_names])}
    return Chosen(rows, Features.of(ideal, served, inputs_fed), left_out, unknown)


def measures_of(declared: Distillation, labels: Numbers) -> dict[str, Callable[[Numbers], float]]:
    """Of (n,) scores: their mean, and what labels say of them as far as they are known."""
    known = np.flatnonzero(np.isfinite(labels))
    labels = labels[known]
    of: dict[str, Callable[[Numbers], float]] = {SCORE: lambda scores: float(scores.mean())}
    if not isinstance(declared.label, Binary):
        if len(known):
            of |= {"rmse": lambda scores: rmse(labels, scores[known]), "mae": lambda scores: mae(labels, scores[known])}
        return of
    if len(known):
        of["log_loss"] = lambda scores: log_loss(labels, scores[known])
    if len(np.unique(labels)) > 1:
        of["auc"] = lambda scores: auc(labels, scores[known])
    return of


def _measure(cells: Numbers, of: Callable[[Numbers], float], known: list[str]) -> Measure:
    found = {cell: of(cells[cell]) for cell in dict.fromkeys(CELLS)}
    values = np.array([found[cell] for cell in CELLS])
    shares = shapley(values, NEEDS)
    return Measure(float(values[0]), float(values[-1]), {stage: _part(shares, stage) for stage in known})


def _bounds(declared: Distillation, measures: Mapping[str, Measure], each: Mapping[str, float]) -> list[GateResult]:
    figures = {f"{stage}.{EACH}": value for stage, value in each.items()}
    for name, measure in measures.items():
        figures |= {f"{stage}.{name}": part.value for stage, part in measure.parts.items()}
    own = [bound for bound in declared.bounds if bound.metric.partition(".")[0] in STAGES]
    return [GateResult(bound, figures.get(bound.metric)) for bound in own]


def _part(shares: Shares, stage: str) -> Part:
    return Part(*(float(part[STAGES.index(stage)]) for part in shares))


def _table(rows: pa.Table, cells: Numbers, shares: Shares, known: list[str]) -> pa.Table:
    """The rows, with what they were answered and the part of each stage in it."""
    added = {"ideal": cells[CELLS[0]], "answer": cells[CELLS[-1]]}
    added |= {stage: shares.value[STAGES.index(stage)] for stage in known}
    for name, values in added.items():
        rows = rows.append_column(name if name not in rows.column_names else f"{name} of the score", pa.array(values))
    return rows
