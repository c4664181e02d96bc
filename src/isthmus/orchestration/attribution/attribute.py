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
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.training.teacheroutputs import open_outputs
from isthmus.features import clock
from isthmus.features.days import Days
from isthmus.features.errors import ContractMismatch, DataError, RequestError, one_of
from isthmus.features.files import write_atomically
from isthmus.features.package.inputs import ModelInput
from isthmus.features.package.manifest import Package, open_package
from isthmus.features.progress import Progress, silent
from isthmus.features.values.arrow import micros
from isthmus.orchestration.artifacts import Artifacts, outdated, serving_profile
from isthmus.orchestration.attribution import inputs
from isthmus.orchestration.attribution.answers import Files, PackageModels
from isthmus.orchestration.attribution.inputs import TIME, Rows
from isthmus.orchestration.attribution.page import page
from isthmus.orchestration.attribution.report import SCORE, Attribution, Measure, Part, page_file, rows_file
from isthmus.orchestration.attribution.shapley import Numbers, Shares, shapley
from isthmus.orchestration.attribution.stages import (
    AS_ANSWERED,
    CELLS,
    IN_PRECISION,
    IN_RUNTIME,
    NEEDS,
    SKEW,
    STALENESS,
    Features,
    coalitions,
    scored,
)
from isthmus.orchestration.models.models import packaged
from isthmus.orchestration.project import Project
from isthmus.orchestration.runtimes.products import RUNTIMES, Product

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


def attribute(  # noqa: PLR0913 - the options of the command
    project: Project,
    name: str | None = None,
    *,
    days: Days | None = None,
    fed: Path | None = None,
    precision: str | None = None,
    runtime: str = "ort",
    progress: Progress = silent,
) -> Attribution:
    """Splits the difference of the last package's answers from the ideal ones among the stages between them.

    The ideal answer is the teacher's, to the features that could be known at the moment of a row. The rows are the test
    part of the student's training set, or those of the last training set within `days`. `fed` is a file with what the
    model was fed, of keys, event times and inputs; without it, that is what was served.

    Raises:
        RequestError: the answers are no numbers, no row is in the range, or there is no such file or runtime.
        DataError: nothing was exported, or a student, a table or the file is gone or not what it must be.
        ContractMismatch: the package cannot run under the contract in force.
    """
    artifacts = Artifacts.of(project, name)
    declared, product = artifacts.declared, _product(runtime)
    package = open_package(artifacts.last_package())
    _require_current(project, package)
    files = Files(package, precision or serving_profile(project, package.files.folder).precision, product.formats[-1])
    progress("opening the student", 0.0)
    with packaged(project, declared, package) as trained:
        scores = Scores(trained.task, trained.student)
        material = trained.task.material
        examples = artifacts.training_set(package.manifest.training_set)
        rows = Rows(examples, material.table.take(pa.array(material.parts.test)), material.parts.test)
        if days is not None:
            rows = inputs.within(artifacts.latest_training_set() or examples, days)
        progress("joining what was served", 0.2)
        rows, features, left_out, unknown = _features(project, declared, rows, scores.student_inputs, fed)
        kept = None
        if rows.examples.id == examples.id:
            every = np.arange(material.table.num_rows)
            kept = open_outputs(trained.task, scores.boosting, every, artifacts.outputs, silent), rows.places
        models = PackageModels(
            scores, package, files, {IN_PRECISION: RUNTIMES["ONNX Runtime"], IN_RUNTIME: product, AS_ANSWERED: product},
            rows.table, material.teacher_inputs, RequestInputs.of(project.applied(), declared.teacher.name), kept,
        )  # fmt: skip
        cells = scored(features, models, lambda model: progress(f"asking {model}", 0.4))
    progress("splitting the difference", 0.9)
    answered = np.flatnonzero(np.isfinite(_needed(cells)).all(0))
    if len(answered) < len(rows.places):
        left_out["a request transform refuses them"] = len(rows.places) - len(answered)
        rows, cells = rows.take(answered), cells[..., answered]
    if not len(answered):
        raise DataError(f"attribution of {declared.name}", "a request transform refuses every row",
                        expected="a row that has an answer")  # fmt: skip
    keys = [key for key, _ in project.applied().spines[declared.spine.name]["keys"]]
    shares = shapley(coalitions(cells), NEEDS)
    known = [stage for stage in STAGES if stage not in unknown]
    table = _table(rows.table.select(list(dict.fromkeys([*keys, TIME]))), cells, shares, known)
    of = _measures(declared, inputs.labels(rows.table, material.label))
    far = np.argsort(-np.abs(cells[CELLS[-1]] - cells[CELLS[0]]), kind="stable")[:LARGEST]
    measures = {measure: _measure(cells, function, known) for measure, function in of.items()}
    each = {stage: float(np.abs(shares.value[STAGES.index(stage)]).mean()) for stage in known}
    result = Attribution(
        declared.name, package.files.digest, files.precision, product.option, rows.examples.id, len(rows.places),
        left_out, unknown, measures, each, table.take(pa.array(far)).to_pylist(),
        _bounds(declared, measures, each), table, project.state / "attribution" / declared.name,
    )  # fmt: skip
    write(result)
    progress("the attribution is written", 1.0)
    return result


def write(result: Attribution) -> None:
    """Writes the page, and the table of all rows."""
    buffer = io.BytesIO()
    pq.write_table(result.table, buffer)
    write_atomically(rows_file(result.folder), buffer.getvalue())
    write_atomically(page_file(result.folder), page(result).encode())


def _product(option: str) -> Product:
    known = {product.option: product for product in RUNTIMES.values()}
    if option not in known:
        raise RequestError(f"runtime {option}", "there is none of this name", expected=one_of(known))
    return known[option]


def _require_current(project: Project, package: Package) -> None:
    contract = project.applied()
    if changes := outdated(package.files.folder, contract):
        raise ContractMismatch(
            str(package.files.folder), f"cannot run under contract {contract.hash[:12]} ({'; '.join(changes)})",
            remedy="run `isthmus training-set`, `isthmus distill` and `isthmus export`",
        )  # fmt: skip


def _features(
    project: Project, declared: Distillation, rows: Rows, read: tuple[ModelInput, ...], file: Path | None
) -> tuple[Rows, Features, dict[str, int], dict[str, str]]:
    """The rows of which all is known, their features, how many were left out, and the stages of which nothing is."""
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
    return rows, Features.of(ideal, served, inputs_fed), left_out, unknown


def _needed(cells: Numbers) -> Numbers:
    """The cells of coalitions, (cells, n)."""
    forms, models = zip(*dict.fromkeys(CELLS), strict=True)
    needed: Numbers = cells[list(forms), list(models)]
    return needed


def _measures(declared: Distillation, labels: Numbers) -> dict[str, Callable[[Numbers], float]]:
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
