"""Explain why the answers of one period differ from those of an earlier one (`isthmus model attribute --against`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from isthmus.distill.declaration import Distillation
from isthmus.distill.evaluation.metrics import auc, log_loss, mae, mean, rmse
from isthmus.distill.labels import Binary, Number
from isthmus.distill.tabular.tensors import columns
from isthmus.features.contract.schema import Contract, ViewContract
from isthmus.features.days import Days
from isthmus.features.errors import DataError, IsthmusError, RequestError
from isthmus.features.files import write_atomically
from isthmus.features.profiles import ServingProfile
from isthmus.features.progress import Progress, silent
from isthmus.features.values.arrow import ARROW, micros, to_arrow
from isthmus.features.values.columns import Ints
from isthmus.orchestration.artifacts import Artifacts, TrainingSet, serving_profile
from isthmus.orchestration.attribution.inputs import TIME, labels, rows_in
from isthmus.orchestration.attribution.periods.coalitions import (
    CONTRACT,
    PARTS,
    Segments,
    Weighted,
    coalition_values,
    segments,
    weights,
)
from isthmus.orchestration.attribution.periods.page import MeasureChange, Period, PeriodChange, Segment, page, page_file
from isthmus.orchestration.attribution.recorded import predictions, recorded_rows, with_column
from isthmus.orchestration.attribution.report import SCORE, parts_of
from isthmus.orchestration.attribution.scores import REFUSED
from isthmus.orchestration.attribution.shapley import Numbers, shapley
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.served import ServedAnswers, key_values, predict_all
from isthmus.orchestration.recording.storedrows import from_history
from isthmus.package.manifest import Package, open_package, read_contract
from isthmus.serving.deployment.record import unverified_deployment
from isthmus.serving.predict.model import DeployedModel

# Stored features as (view, feature).
Pairs = Sequence[tuple[str, str]]
# Required share of rows in segments that both periods have.
COMMON = 0.95
# Segments that a report lists.
LARGEST = 10


@dataclass(frozen=True)
class Side:
    """Rows of one of two compared periods, and the package that answered in it.

    `table` has the columns of a training set. `views` has the definitions under which its features were joined.
    `left_out` counts skipped rows by reason.
    """

    days: Days
    table: pa.Table
    views: dict[str, ViewContract]
    package: Package
    profile: ServingProfile
    left_out: dict[str, int]

    @property
    def contract(self) -> Contract:
        return read_contract(self.package)


def change(  # noqa: PLR0913 - the options of the command
    project: Project,
    name: str | None = None,
    *,
    days: Days | None,
    against: Days,
    by: Sequence[str] = (),
    package: Path | None = None,
    recorded: bool = False,
    progress: Progress = silent,
) -> PeriodChange:
    """Explain why a distillation's predictions changed between two periods, by splitting the change among four causes.

    The causes are population (share of rows in each segment), features (rows within the segments), contract (how stored
    features are computed) and model. Writes an HTML page to `attribution/<name>` in the state folder, readable by its
    owner only.

    Args:
        project: project that declares the distillation.
        name: distillation; None for the project's only one.
        days: later period; None raises RequestError.
        against: earlier period.
        by: columns whose values define the segments. By default, the longest start of the spine's join keys that leaves
            at least 95 % of the rows in segments that occur in both periods; at least one key.
        package: folder of the package of the earlier period. By default, both periods use the latest package.
        recorded: use the predictions that servers recorded, with the package that answered last in each period. By
            default, use the rows of the latest training set. `package` must be None with `recorded`.
        progress: called with a message and the finished share, 0 to 1.

    Raises:
        RequestError: the label is not Binary or Number, an option is invalid, or a period has no row.
        DataError: a package, a table or a history is gone, or no row of a period can be used.
    """
    artifacts = Artifacts.of(project, name)
    declared = artifacts.declared
    if not isinstance(declared.label, Binary | Number):
        raise RequestError(declared.where, "its answers have no mean", expected="a Binary or Number label")
    if days is None:
        raise RequestError("range", "--from and --to are missing", expected="the period to compare with --against")
    if recorded and package is not None:
        raise RequestError("--package-against", "cannot be combined with --recorded", remedy="remove the option")
    progress("reading the rows", 0.0)
    examples = artifacts.latest_training_set() or artifacts.current_training_set()
    served = ServedAnswers(project)
    if recorded:
        sides = [_recorded(served, declared, examples, period) for period in (against, days)]
    else:
        folders = [package or artifacts.last_package(), artifacts.last_package()]
        profile = serving_profile(project, folders[1])
        sides = [
            _of_training_set(examples, period, open_package(folder), profile)
            for period, folder in zip((against, days), folders, strict=True)
        ]
    progress("running the packages", 0.2)
    unknown: dict[str, str] = {}
    both, scores, count = _scored_rows(sides, scores_of(served, sides, unknown))
    progress("splitting the change", 0.9)
    spine = project.applied().spines[declared.spine.name].key_names
    columns_by, found = segments_of(both, by, spine, count)
    known = [part for part in PARTS if part not in unknown]
    measures = {
        measure: difference
        for measure, (rows, of) in _measures(declared, _labels(both, declared.spine.label.name)).items()
        if (difference := _difference(of, found.places, scores, rows, count, known)) is not None
    }
    result = PeriodChange(
        declared.name, "recorded answers" if recorded else f"training set {examples.id}",
        [_period(side, rows) for side, rows in zip(sides, (count, len(both) - count), strict=True)],
        columns_by, len(found.values), _common(found.places, count), unknown, measures,
        _largest(found, scores, count), project.state / "attribution" / declared.name,
    )  # fmt: skip
    write_atomically(page_file(result), page(result).encode(), mode=0o600)
    progress("the change is written", 1.0)
    return result


def _of_training_set(examples: TrainingSet, days: Days, package: Package, profile: ServingProfile) -> Side:
    views = {name: ViewContract.from_dict(name, view) for name, view in examples.views.items()}
    return Side(days, rows_in(examples, days).table, views, package, profile, {})


def _recorded(served: ServedAnswers, declared: Distillation, examples: TrainingSet, days: Days) -> Side:
    answered = predictions(served, declared, days)
    found = recorded_rows(declared, answered, examples)
    table = found.rows.table
    for column in found.fed.column_names:
        table = table.set_column(table.column_names.index(column), column, found.fed[column])
    contract = read_contract(answered.package)
    views = {name: contract.views[name] for name, _ in contract.stored_features(answered.package.manifest.service)}
    profile = msgspec.convert({"precision": answered.precision}, ServingProfile)
    keys = [*found.keys, TIME]
    others = [name for name in table.column_names if name not in keys and table[name].null_count < len(table)]
    return Side(days, table.select([*keys, *others]), views, answered.package, profile, found.left_out)


def scores_of(served: ServedAnswers, sides: Sequence[Side], unknown: dict[str, str]) -> list[list[Numbers]]:
    """Score the rows of two periods with both models, each with features computed under both contracts.

    `sides` has the earlier and the later period. `result[contract][model]` has one score per row, those of the earlier
    period first; index 0 stands for the earlier contract or model. Equal scores share one array. If the effect of the
    contracts cannot be computed, both contracts get the same scores, and the reason is written to
    `unknown["contract"]`.
    """
    models = [DeployedModel(unverified_deployment(side.package, side.profile, 0, None)) for side in sides]
    if models[0].deployment.digest == models[1].deployment.digest:
        models[1] = models[0]
    contracts = [side.contract for side in sides]
    read = [
        contract.stored_features(side.package.manifest.service) for contract, side in zip(contracts, sides, strict=True)
    ]
    every = list(dict.fromkeys([*read[0], *read[1]]))

    def under(place: int, pairs: Pairs) -> list[pa.Table]:
        return [_under(served, side, contracts[place], pairs) for side in sides]

    def answers(before: Sequence[pa.Table], after: Sequence[pa.Table]) -> list[Numbers]:
        first = _scores(models[0], before)
        return [first, first if models[0] is models[1] and before is after else _scores(models[1], after)]

    unshared = [
        f"{view}:{feature}"
        for contract in contracts
        for view, feature in every
        if view not in contract.views or feature not in [column.name for column in contract.views[view].fields]
    ]
    views = [name for name in dict.fromkeys(view for view, _ in every) if all(name in c.views for c in contracts)]
    if unshared:
        unknown[CONTRACT] = f"only one of the packages knows {', '.join(unshared)}: its effect counts as the model's"
        own = answers(*(under(place, pairs) for place, pairs in enumerate(read)))
        return [own, own]
    if all(contracts[0].views[name].hash == contracts[1].views[name].hash for name in views):
        same = under(1, every)
        own = answers(same, same)
        return [own, own]
    try:
        return [answers(tables, tables) for tables in (under(0, every), under(1, every))]
    except IsthmusError as error:
        unknown[CONTRACT] = f"its features are not known any more; the features of each row are used instead ({error})"
        tables = [side.table for side in sides]
        own = answers(tables, tables)
        return [own, own]


def _scores(model: DeployedModel, tables: Sequence[pa.Table]) -> Numbers:
    parts = [predict_all(model, columns(table, model.inputs)) for table in tables]
    return np.concatenate(parts).astype(np.float64)


def _under(served: ServedAnswers, side: Side, contract: Contract, pairs: Pairs) -> pa.Table:
    """Return the rows of a period with the stored features `pairs` computed as `contract` defines them.

    Features that were joined under the same view definition stay. Other features are joined again; raise an
    IsthmusError if their history is gone.
    """
    table = side.table
    to_join: dict[str, list[str]] = {}
    for name, feature in pairs:
        view = contract.views[name]
        alike = name in side.views and side.views[name].hash == view.hash
        if not alike or view.full_name(feature) not in table.column_names:
            to_join.setdefault(name, []).append(feature)
    for name, features in to_join.items():
        view = contract.views[name]
        history = served.history(view)
        if missing := [column.name for column in view.keys if column.name not in table.column_names]:
            raise DataError(f"view {name}", f"the rows have no {', '.join(missing)}, needed to join it")
        keys = {column.name: key_values(table[column.name].combine_chunks()) for column in view.keys}
        rows = from_history(history, view, keys, micros(table[TIME]))
        for column in view.fields:
            if column.name in features:
                values = to_arrow(rows.columns[column.name], column.dtype).cast(ARROW[column.dtype.name])
                table = with_column(table, view.full_name(column.name), values)
    return table


def _scored_rows(sides: Sequence[Side], scores: list[list[Numbers]]) -> tuple[pa.Table, list[list[Numbers]], int]:
    whole = np.flatnonzero(np.isfinite([answers for row in scores for answers in row]).all(0))
    table = pa.concat_tables([side.table for side in sides], promote_options="default")
    first = len(sides[0].table)
    for side, rows, left in zip(
        sides, (first, len(table) - first), ((whole < first).sum(), (whole >= first).sum()), strict=True
    ):
        if left < rows:
            side.left_out[REFUSED] = rows - int(left)
        if not left:
            raise DataError(f"rows of {side.days}", "a request transform refuses every row",
                            expected="at least one row that it accepts")  # fmt: skip
    return table.take(pa.array(whole)), _taken(scores, whole), int((whole < first).sum())


def _taken(scores: list[list[Numbers]], rows: Ints) -> list[list[Numbers]]:
    kept = {id(answers): answers[rows] for row in scores for answers in row}
    return [[kept[id(answers)] for answers in row] for row in scores]


def _labels(rows: pa.Table, label: str) -> Numbers:
    return labels(rows, label) if label in rows.column_names else np.full(len(rows), np.nan)


def _measures(declared: Distillation, known: Numbers) -> dict[str, tuple[Ints, Weighted]]:
    rows = np.flatnonzero(np.isfinite(known))
    label = known[rows]
    found: dict[str, tuple[Ints, Weighted]] = {SCORE: (np.arange(len(known)), mean)}
    of: dict[str, Callable[[Numbers, Numbers, Numbers], float]] = {"rmse": rmse, "mae": mae}
    if isinstance(declared.label, Binary):
        of = {"log_loss": log_loss, "auc": auc}
    return found | {name: (rows, partial(function, label)) for name, function in of.items()}


def _difference(
    of: Weighted, places: Ints, scores: list[list[Numbers]], rows: Ints, count: int, known: Sequence[str]
) -> MeasureChange | None:
    sides = [places[rows[rows < count]], places[rows[rows >= count]]]
    if not all(map(len, sides)):
        return None
    values = coalition_values(of, weights(*sides), _taken(scores, rows))
    if not np.isfinite(values).all():
        return None
    # Parts that are not known are the same in all coalitions, so that they do not affect the others.
    return MeasureChange(float(values[0]), float(values[-1]), parts_of(shapley(values), PARTS, known))


def _period(side: Side, rows: int) -> Period:
    first, end = str(side.days).split(" to ")
    return Period(first, end, rows, side.package.files.digest, side.package.manifest.contract, side.left_out)


def segments_of(rows: pa.Table, by: Sequence[str], spine: Sequence[str], count: int) -> tuple[Sequence[str], Segments]:
    keys = [key for key in spine if key in rows.column_names]
    while True:
        found = segments(rows, by or keys, spine)
        if by or len(keys) == 1 or _common(found.places, count) >= COMMON:
            return by or keys, found
        keys.pop()


def _common(places: Ints, count: int) -> float:
    both = np.intersect1d(places[:count], places[count:])
    return float(np.isin(places, both).mean())


def _largest(found: Segments, scores: list[list[Numbers]], count: int) -> list[Segment]:
    sides = ((found.places[:count], scores[0][0][:count]), (found.places[count:], scores[1][1][count:]))
    middle = (sides[0][1].mean() + sides[1][1].mean()) / 2
    rows, means, moved = [], [], []
    for places, own in sides:
        counts = np.bincount(places, minlength=len(found.values))
        sums = np.bincount(places, own, minlength=len(found.values))
        rows.append(counts)
        means.append(np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0))
        moved.append((sums - middle * counts) / len(places))
    change = moved[1] - moved[0]
    order = np.argsort(-np.abs(change), kind="stable")[:LARGEST].tolist()

    def mean(side: int, place: int) -> float | None:
        return float(means[side][place]) if rows[side][place] else None

    return [
        Segment(found.values[n], int(rows[0][n]), int(rows[1][n]), mean(0, n), mean(1, n), float(change[n]))
        for n in order
    ]
