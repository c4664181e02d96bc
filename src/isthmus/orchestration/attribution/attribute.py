"""Attribute the gap between ideal and actual scores to the stages that cause it (`isthmus model attribute`)."""

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.distill.declaration import Distillation
from isthmus.distill.evaluation.metrics import auc, log_loss, mae, rmse
from isthmus.distill.gates import EACH, STAGES, GateResult, bounds_on, check_gate
from isthmus.distill.labels import Binary
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.training.teacheroutputs import open_outputs
from isthmus.features import clock
from isthmus.features.days import Days
from isthmus.features.errors import RequestError, one_of
from isthmus.features.files import write_atomically
from isthmus.features.progress import Progress, silent
from isthmus.features.values.arrow import micros
from isthmus.orchestration.artifacts import Artifacts, serving_profile
from isthmus.orchestration.attribution import inputs
from isthmus.orchestration.attribution.inputs import TIME, TrainingRows
from isthmus.orchestration.attribution.page import page
from isthmus.orchestration.attribution.recorded import ID, load_recorded, predictions
from isthmus.orchestration.attribution.report import SCORE, Attribution, Measure, page_file, parts_of, rows_file
from isthmus.orchestration.attribution.scores import ChosenRows, PackageModels, open_models
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
from isthmus.orchestration.recording.served import ServedAnswers
from isthmus.orchestration.runtimes.products import RUNTIMES, Product
from isthmus.package.inputs import ModelInput
from isthmus.package.manifest import open_package

# Rows farthest from the ideal that a report lists.
LARGEST = 10


def day_range(first: str | None, end: str | None) -> Days | None:
    if (first is None) != (end is None):
        raise RequestError("range", f"--{'to' if end is None else 'from'} is missing",
                           expected="both --from and --to, or neither")  # fmt: skip
    return None if first is None or end is None else Days.parse(first, end)


def reject_combined(options: Mapping[str, object], beside: str) -> None:
    if named := [name for name, value in options.items() if value not in (None, [])]:
        raise RequestError(", ".join(named), f"cannot be combined with {beside}", remedy="remove the option")


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
    """Explain why a package's predictions differ from ideal ones, by splitting the difference among five stages.

    The stages are staleness of features, skew between served and fed features, distillation, precision and runtime. The
    ideal prediction is the teacher's, from the features that could be known at the time of the row. The actual
    prediction is the latest package's. Writes a page and a table of all rows to `attribution/<name>` in the state
    folder, readable by their owner only. Call `require_bounds` with the result to enforce the bounds that the
    distillation declares.

    Args:
        project: project that declares the distillation.
        name: distillation; None for the project's only one.
        days: use the rows of these days, from the latest training set. By default, use the test rows of the training
            set that the student was trained on.
        fed: Parquet or Arrow file with the inputs that the model really got, by join keys and event time. Without it,
            skew is unknown: the inputs are assumed to be the served features.
        precision: precision of the model file to run; by default the one that is served.
        runtime: runtime of the model file; by default "ort" (ONNX Runtime).
        recorded: use predictions that servers recorded, in `days` or at any time. They come from the package that
            answered last. `fed`, `precision` and `runtime` must then be None.
        progress: called with a message and the finished share, 0 to 1.

    Raises:
        RequestError: the label is not Binary or Number, `days` has no row, or an option is invalid.
        DataError: a package, student, table or file is missing or invalid, or no row can be used.
        ContractMismatch: the package cannot run under the current contract.
    """
    artifacts = Artifacts.of(project, name)
    declared, product = artifacts.declared, _product(runtime or "ort")
    answers = None
    if recorded:
        reject_combined({"--fed": fed, "--precision": precision, "--runtime": runtime}, "--recorded")
        progress("reading recorded answers", 0.0)
        answers = predictions(ServedAnswers(project), declared, days)
        package, precision = answers.package, answers.precision
    else:
        package = open_package(artifacts.last_package())
        precision = precision or serving_profile(project, package.files.folder).precision
    with open_models(artifacts, package, precision, product, progress) as models:
        progress("joining what was served", 0.2)
        chosen = (
            _of_training_set(artifacts, models, days, fed)
            if answers is None
            else load_recorded(artifacts, answers, models)
        )
        scored = models.score(chosen, progress)
    rows, cells, unknown = scored.chosen.rows, scored.cells, scored.chosen.unknown
    spine = project.applied().spines[declared.spine.name].key_names
    keys = [name for name in (ID, *spine, TIME) if name in rows.table.column_names]
    shares = shapley(coalitions(cells), NEEDS)
    known = [stage for stage in STAGES if stage not in unknown]
    table = _table(rows.table.select(list(dict.fromkeys(keys))), cells, shares, known)
    of = measures_of(declared, scored.labels)
    far = np.argsort(-np.abs(cells[CELLS[-1]] - cells[CELLS[0]]), kind="stable")[:LARGEST]
    measures = {measure: _measure(cells, function, known) for measure, function in of.items()}
    each = {stage: float(np.abs(shares.value[STAGES.index(stage)]).mean()) for stage in known}
    result = Attribution(
        declared.name, package.files.digest, precision, product.option, rows.examples.id, len(rows.places),
        scored.chosen.matched, scored.chosen.left_out, unknown, measures, each, table.take(pa.array(far)).to_pylist(),
        _bounds(declared, measures, each), table, project.state / "attribution" / declared.name,
    )  # fmt: skip
    write(result)
    progress("the attribution is written", 1.0)
    return result


def write(result: Attribution) -> None:
    buffer = io.BytesIO()
    pq.write_table(result.table, buffer)
    write_atomically(rows_file(result.folder), buffer.getvalue(), mode=0o600)
    write_atomically(page_file(result.folder), page(result).encode(), mode=0o600)


def _product(option: str) -> Product:
    known = {product.option: product for product in RUNTIMES.values()}
    if option not in known:
        raise RequestError(f"runtime {option}", "is not a known runtime", expected=one_of(known))
    return known[option]


def _of_training_set(artifacts: Artifacts, models: PackageModels, days: Days | None, fed: Path | None) -> ChosenRows:
    material, scores = models.material, models.scores
    examples = artifacts.training_set(material.training_set)
    rows = TrainingRows(examples, material.table.take(pa.array(material.parts.test)), material.parts.test)
    if days is not None:
        rows = inputs.rows_in(artifacts.latest_training_set() or examples, days)
    chosen = _features(artifacts.project, artifacts.declared, rows, scores.student_inputs, fed)
    if rows.examples.id != examples.id:
        return chosen
    every = np.arange(material.table.num_rows)
    return replace(chosen, outputs=open_outputs(scores.task, scores.teacher_model, every, artifacts.outputs, silent))


def _features(
    project: Project, declared: Distillation, rows: TrainingRows, read: tuple[ModelInput, ...], file: Path | None
) -> ChosenRows:
    left_out: dict[str, int] = {}
    unknown: dict[str, str] = {}

    def keep(chosen: TrainingRows, why: str) -> TrainingRows:
        if len(chosen.places) < len(rows.places):
            left_out[why] = len(rows.places) - len(chosen.places)
        return chosen

    if declared.student.device is None:
        since, view = inputs.served_since(project, declared)
        after = np.flatnonzero(micros(rows.table[TIME]) >= (since or 0))
        if since is None:
            unknown[STALENESS] = f"{view} was never materialized under this contract"
        elif not len(after):
            unknown[STALENESS] = f"{view} was first served at {clock.moment(since).isoformat()}, after all rows"
        else:
            rows = keep(rows.take(after), "nothing was served yet")
    fed = None
    if file is None:
        unknown[SKEW] = "the inputs that the model was fed are not known: they are assumed to be the served ones"
    else:
        keys = project.applied().spines[declared.spine.name].key_names
        matched, fed = inputs.read_model_inputs(file, rows.table, keys, [item.name for item in read])
        rows = keep(rows.take(matched), f"not exactly once in {file}")
    ideal = columns(rows.table, read)
    served = ideal if STALENESS in unknown else columns(inputs.served_features(project, declared, rows), read)
    inputs_fed = served
    if fed is not None:
        inputs_fed = {**served, **columns(fed, [item for item in read if item.name in fed.column_names])}
    return ChosenRows(rows, Features.of(ideal, served, inputs_fed), left_out, unknown)


def measures_of(declared: Distillation, labels: Numbers) -> dict[str, Callable[[Numbers], float]]:
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
    return Measure(float(values[0]), float(values[-1]), parts_of(shares, STAGES, known))


def _bounds(declared: Distillation, measures: Mapping[str, Measure], each: Mapping[str, float]) -> list[GateResult]:
    figures = {f"{stage}.{EACH}": value for stage, value in each.items()}
    for name, measure in measures.items():
        figures |= {f"{stage}.{name}": part.value for stage, part in measure.parts.items()}
    return [check_gate(bound, figures.get(bound.metric)) for bound in bounds_on(declared.bounds, *STAGES)]


def _table(rows: pa.Table, cells: Numbers, shares: Shares, known: list[str]) -> pa.Table:
    added = {"ideal": cells[CELLS[0]], "answer": cells[CELLS[-1]]}
    added |= {stage: shares.value[STAGES.index(stage)] for stage in known}
    for name, values in added.items():
        rows = rows.append_column(name if name not in rows.column_names else f"{name} of the score", pa.array(values))
    return rows
